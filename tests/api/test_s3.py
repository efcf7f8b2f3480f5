"""The API over a lake on a real S3 server: what it reads on a disk it reads there."""

from pathlib import Path

import pytest
from tarn.settings import Settings

from tests.api.test_diffs import (  # noqa: F401 - run here too
    history,
    test_diff_shows_entities_as_they_are_and_deleted_ones_as_they_were,
    test_streamed_diff_is_the_diff_and_ends_with_its_snapshot,
)
from tests.api.test_entity_reads import (  # noqa: F401 - run here too
    _dataset,
    test_delete_counts_what_it_ends_wherever_that_is,
    test_entity_as_one_origin_tells_it_has_nothing_of_the_others,
    test_entity_is_found_by_canonical_id_entity_id_and_referent,
    test_entity_that_is_not_there_or_is_deleted_is_not_found,
    test_entity_whose_schemata_disagree_is_told_apart_everywhere_and_ends_nothing,
    test_put_replaces_what_its_origin_said_and_that_was_flushed,
)
from tests.api.test_refs import (  # noqa: F401 - run here too
    test_ref_is_mirrored_in_the_layout_and_leaves_it,
    test_ref_stands_for_a_snapshot_wherever_one_is_named,
    two,
)
from tests.s3 import S3Server

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")
