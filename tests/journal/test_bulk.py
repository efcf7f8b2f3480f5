"""Bulk writes to SQLite: the same rows as ADBC's driver writes."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from adbc_driver_sqlite import dbapi
from tarn.journal.bulk import copy_rows, insert_rows
from tarn.journal.parsing.event_buffer import SCHEMA

COMMON = {
    "batch": 7,
    "kind": 1,
    "shard_key": 3,
    "canonical_id": None,
    "schema": "Person",
    "prop": "name",
    "lang": None,
    "original_value": None,
    "external": False,
    "origin": "mapping:it's",
    "first_seen": -5,
    "last_seen": 1 << 50,
}


def chunk(*rows: dict[str, Any]) -> pa.RecordBatch:
    given = [
        COMMON
        | {"position": place, "id": bytes([place] * 20), "entity_id": f"e{place}", "value": f"'{place}\x00"}
        | row
        for place, row in enumerate(rows)
    ]
    return pa.RecordBatch.from_pylist(given, SCHEMA)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{}],
        [{}, {}, {}],
        [{"origin": "a"}, {"origin": "b"}],
        [{"origin": None}, {}],
        [{"kind": 3, "external": None, "first_seen": None}, {}],
        [{"origin": "文\n", "canonical_id": "x"}] * 2,
        [{"lang": "deu", "external": True}] * 2,
    ],
    ids=["none", "one", "alike", "origins", "no origin", "kinds", "not plain", "languages"],
)
def test_bulk_statement_writes_the_same_rows_as_the_driver(tmp_path: Path, rows: list[dict[str, Any]]):
    columns = ", ".join(f'"{name}"' for name in SCHEMA.names)

    def write_rows(ingest: Any, name: str) -> list[tuple[Any, ...]]:
        with dbapi.connect(f"file:{tmp_path}/{name}.db") as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE TABLE journal ({columns})")
            ingest(cursor, chunk(*rows))
            types = ", ".join(f'typeof("{column}")' for column in SCHEMA.names)
            cursor.execute(f"SELECT quote(id), quote(value), {types}, {columns} FROM journal ORDER BY position")
            return cursor.fetchall()

    assert write_rows(insert_rows, "ours") == write_rows(copy_rows, "theirs")
    assert len(write_rows(insert_rows, "again")) == len(rows)
