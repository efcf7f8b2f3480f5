"""The relation `live` as an in-memory table, with the few columns that tests set."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import duckdb
from tarn.model.ftm.statement import microseconds


class Row(NamedTuple):
    canonical_id: str
    schema: str
    prop: str
    value: str
    entity_id: str = ""
    origin: str = "crawl"
    first_seen: int = 0
    last_seen: int = 0
    dataset: str = "d"


def moment(text: str) -> int:
    return microseconds(text, "moment")


def engine() -> duckdb.DuckDBPyConnection:
    """Return a DuckDB configured as the API runs it, with the bundled extensions only."""
    config: Any = {"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 1}
    connection = duckdb.connect(config=config)
    connection.execute(
        "CREATE TABLE live (dataset VARCHAR, canonical_id VARCHAR, entity_id VARCHAR, id BLOB, schema VARCHAR, "
        "prop VARCHAR, value VARCHAR, lang VARCHAR, original_value VARCHAR, external BOOLEAN, origin VARCHAR, "
        "first_seen BIGINT, last_seen BIGINT)"
    )
    return connection


def fill(connection: duckdb.DuckDBPyConnection, rows: Iterable[Row]) -> None:
    """Replace all rows by these; an entity id that is not given is the canonical one."""
    connection.execute("TRUNCATE live")
    given = [
        (row.dataset, row.canonical_id, row.entity_id or row.canonical_id, row.schema, row.prop, row.value, row.origin,
         row.first_seen, row.last_seen)
        for row in rows
    ]  # fmt: skip
    if given:
        insert = "INSERT INTO live VALUES (?, ?, ?, '', ?, ?, ?, NULL, NULL, false, ?, ?, ?)"
        connection.executemany(insert, given)


def ids(row: Row) -> set[str]:
    return {row.entity_id or row.canonical_id, row.canonical_id}
