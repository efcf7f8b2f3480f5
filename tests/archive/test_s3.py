"""The archive on a real S3 server: what holds on a disk holds there, and no put lists anything."""

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tarn.archive.files import SMALL
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.settings import Settings

from tests.archive.dataset_archive import DatasetArchive
from tests.archive.test_files import (  # noqa: F401 - run here too
    test_body_that_breaks_off_leaves_nothing,
    test_delete_takes_the_record_and_leaves_the_content,
    test_empty_file_is_a_file,
    test_file_is_stored_under_its_checksum_with_a_record_that_says_all,
    test_many_at_once_put_the_same_content_once,
    test_put_killed_at_any_step_shows_no_half_file_and_is_finished_by_a_retry,
    test_same_file_again_is_the_record_that_is_there,
    test_wrong_checksum_stores_nothing,
)
from tests.archive.test_vacuum import (  # noqa: F401 - run here too
    test_abandoned_upload_is_given_up_and_one_that_goes_on_is_kept,
    test_content_is_collected_once_no_file_refers_to_it,
    test_put_is_never_collected_while_it_is_under_way,
    test_put_that_died_is_finished_or_leaves_nothing_after_a_vacuum,
)
from tests.s3 import S3Server


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """One database: which one it is does not matter here."""
    url = f"sqlite:///{tmp_path}/tarn.db"
    with closing(Database(url)) as database:
        migrate.upgrade(database)
    return url


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


@pytest.mark.contract("X1")
@pytest.mark.parametrize("size", [10, SMALL * 3])
def test_putting_listing_and_reading_a_file_lists_nothing_on_storage(desk: DatasetArchive, s3: S3Server, size: int):
    with s3.counted() as made:
        file = desk.put("a.txt", b"x" * size)
        assert desk.files(prefix="a") == [file]
        assert len(desk.content(file)) == size
        desk.delete(file)

    asked = Counter(request.operation for request in made)
    assert asked["LIST"] == 0
    assert asked["GET"] == 1
