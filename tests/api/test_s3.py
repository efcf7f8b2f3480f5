"""API reads of a lake on a real S3 server: the same as on a disk."""

from pathlib import Path

import pytest
from tarn.settings import Settings

from tests.api.test_diffs import (  # noqa: F401 - run here too
    history,
    test_diff_shows_current_entities_and_the_former_state_of_deleted_ones,
    test_streamed_diff_equals_the_diff_and_ends_with_its_snapshot,
)
from tests.api.test_entity_reads import (  # noqa: F401 - run here too
    _dataset,
    test_delete_counts_removed_statements_of_snapshot_and_journal,
    test_entity_filtered_by_origin_has_only_that_origins_statements,
    test_entity_is_found_by_canonical_id_entity_id_and_referent,
    test_invalid_entity_is_reported_by_every_read_and_fails_none,
    test_missing_or_deleted_entity_is_not_found,
    test_put_replaces_flushed_statements_of_its_origin,
)
from tests.api.test_refs import (  # noqa: F401 - run here too
    test_ref_is_accepted_wherever_a_snapshot_is_named,
    test_ref_is_mirrored_in_the_lake_and_removed_from_it,
    two_snapshots,
)
from tests.s3 import S3Server

pytestmark = [pytest.mark.parametrize("database_url", ["sqlite"], indirect=True), pytest.mark.own_query_process]


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")
