"""Flushes into a lake on a real S3 server."""

from pathlib import Path

import pytest
from deltalake import DeltaTable
from tarn.datasets.registry import Dataset
from tarn.lake.commit import TABLES
from tarn.settings import Settings

from tests.in_process_api import InProcessApi
from tests.pipeline.test_flush import (  # noqa: F401 - run here too
    test_commit_makes_a_fixed_number_of_storage_calls_and_lists_nothing,
    test_files_are_split_at_the_target_size_of_the_dataset,
    test_files_have_checksums_if_the_dataset_is_configured_so,
    test_flush_counts_new_statements_only,
    test_flush_publishes_one_snapshot_and_none_without_rows,
    test_flushed_rows_are_deleted_from_the_journal_and_tags_are_updated,
    test_manifest_lists_its_batches,
    test_rows_are_sorted_by_the_sort_key_and_ids_are_bytes,
    test_segment_divided_among_tasks_has_the_same_rows,
    test_statement_with_a_changed_key_is_found_by_either_key,
)
from tests.s3 import S3Server

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


def test_tables_on_s3_open_at_the_versions_of_snapshots(api: InProcessApi, dataset: Dataset, flush):
    snapshots = []
    for entities in ([JANE], [JANE, JANE | {"id": "john"}]):
        response = api.admin.post("/v1/datasets/test/entities?origin=mapping:x", entities)
        assert response.status_code == 200, response.text
        snapshots += flush()
    api.admin.delete("/v1/datasets/test/entities/jane")
    snapshots += flush()

    counts = [(each.rows.added, each.rows.seen, each.rows.ended, each.rows.live) for each in snapshots]
    assert counts == [(2, 0, 0, 2), (2, 2, 0, 4), (0, 0, 2, 2)]
    connection = api.services.store.connection
    for snapshot in snapshots:
        for table in TABLES:
            folder = dataset.layout.statements if table == "statements" else dataset.layout.translog
            opened = DeltaTable(
                connection.table_uri(folder),
                version=snapshot.table(table).version,
                storage_options=connection.delta_options(),
            )
            assert opened.to_pyarrow_table().num_rows == sum(file.rows for file in snapshot.table(table).files)
