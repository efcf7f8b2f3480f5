"""Slices of the journal: values that SQLite's reader drops are restored."""

from concurrent.futures import ProcessPoolExecutor

import pyarrow as pa
import pytest
from sqlalchemy import text
from tarn.datasets.registry import Dataset
from tarn.model.datasets.shards import ALL_SHARDS
from tarn.pipeline.tasks.journal_slice import COLUMNS, SAMPLE, Journal, JournalSlice
from tarn.settings import Settings

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import read_both_ways

pytestmark = pytest.mark.both_databases

OTHERS = [
    "kind = 2",
    "canonical_id = 'q'",
    "schema = 'Company'",
    "prop = 'alias'",
    "lang = 'deu'",
    "original_value = 'x'",
    "external = 1",
    "origin = 'other'",
    "origin = NULL",
    "first_seen = first_seen - 1",
    "last_seen = last_seen + 1",
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("others", [[], OTHERS])
def test_events_unlike_the_first_thousand_are_read_unchanged(
    settings: Settings, api: InProcessApi, dataset: Dataset, kernel_process: ProcessPoolExecutor, others: list[str]
):
    count = SAMPLE * 2
    people = [{"id": f"e{each}", "schema": "Person", "properties": {"name": ["Jane"]}} for each in range(count)]
    assert api.admin.post("/v1/datasets/test/entities", people).status_code == 200
    with api.services.database.write() as connection:
        for index, other in enumerate(others):
            which = {"entity": f"e{count - 1 - index}"}
            connection.execute(text(f"UPDATE journal SET {other} WHERE entity_id = :entity AND prop = 'name'"), which)

    journal, everything = Journal.at(settings.database_url), JournalSlice(dataset.id, 0, 1, ALL_SHARDS)
    quickly, one_by_one = kernel_process.submit(read_both_ways, journal, everything).result(60)

    assert isinstance(quickly, pa.Table)
    assert len(quickly) == 2 * count
    assert quickly.select(["ord", *COLUMNS]) == one_by_one.select(["ord", *COLUMNS])
