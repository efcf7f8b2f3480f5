"""The archive on a real S3 server: no operation on a file lists the store."""

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
    test_concurrent_puts_of_the_same_content_store_it_once,
    test_delete_removes_the_record_and_keeps_the_content,
    test_empty_file_is_stored,
    test_file_is_stored_under_its_checksum_with_a_complete_record,
    test_interrupted_body_leaves_nothing,
    test_put_killed_at_any_step_leaves_no_partial_file_and_is_completed_by_a_retry,
    test_repeated_put_returns_the_existing_record,
    test_wrong_checksum_stores_nothing,
)
from tests.archive.test_vacuum import (  # noqa: F401 - run here too
    test_abandoned_upload_is_deleted_and_an_active_one_is_kept,
    test_content_of_a_running_put_is_kept,
    test_content_without_a_file_record_is_deleted,
    test_killed_put_is_completed_or_leaves_nothing_after_a_vacuum,
)
from tests.s3 import S3Server


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """Use one database: storage requests do not depend on it."""
    url = f"sqlite:///{tmp_path}/tarn.db"
    with closing(Database(url)) as database:
        migrate.upgrade(database)
    return url


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


@pytest.mark.contract("X1")
@pytest.mark.parametrize("size", [10, SMALL * 3])
def test_put_list_and_read_of_a_file_send_no_list_request(dataset_archive: DatasetArchive, s3: S3Server, size: int):
    with s3.counted() as requests:
        file = dataset_archive.put("a.txt", b"x" * size)
        assert dataset_archive.files(prefix="a") == [file]
        assert len(dataset_archive.content(file)) == size
        dataset_archive.delete(file)

    operations = Counter(request.operation for request in requests)
    assert operations["LIST"] == 0
    assert operations["GET"] == 1
