"""Flushes into a lake on a real S3 server: what holds on a disk holds there."""

from pathlib import Path

import pytest
from deltalake import DeltaTable
from tarn.datasets.registry import Dataset
from tarn.lake.commit import TABLES
from tarn.settings import Settings

from tests.in_process_api import InProcessApi
from tests.pipeline.test_flush import (  # noqa: F401 - run here too
    test_checksums_are_there_where_the_dataset_asks_for_them,
    test_commit_costs_a_fixed_number_of_storage_calls_and_lists_nothing,
    test_files_are_cut_at_the_datasets_target_size,
    test_flush_counts_new_statements_only,
    test_flush_makes_one_snapshot_on_the_head_and_none_without_rows,
    test_flushed_rows_leave_the_journal_and_tags_say_so,
    test_manifest_lists_the_batches_it_holds,
    test_rows_are_sorted_by_the_stores_key_and_ids_are_bytes,
    test_segment_divided_among_tasks_makes_the_same_rows,
    test_statement_that_changes_its_key_is_seen_from_either_side,
)
from tests.s3 import S3Server

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


def test_tables_on_s3_open_at_the_versions_that_snapshots_pin(house: InProcessApi, dataset: Dataset, flush):
    made = []
    for entities in ([JANE], [JANE, JANE | {"id": "john"}]):
        answer = house.admin.post("/v1/datasets/test/entities?origin=mapping:x", entities)
        assert answer.status_code == 200, answer.text
        made += flush()
    house.admin.delete("/v1/datasets/test/entities/jane")
    made += flush()

    counts = [(each.rows.added, each.rows.seen, each.rows.ended, each.rows.live) for each in made]
    assert counts == [(2, 0, 0, 2), (2, 2, 0, 4), (0, 0, 2, 2)]
    connection = house.services.store.connection
    for snapshot in made:
        for table in TABLES:
            folder = dataset.layout.statements if table == "statements" else dataset.layout.translog
            opened = DeltaTable(
                connection.table_uri(folder),
                version=snapshot.table(table).version,
                storage_options=connection.delta_options(),
            )
            assert opened.to_pyarrow_table().num_rows == sum(file.rows for file in snapshot.table(table).files)
