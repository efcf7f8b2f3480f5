"""The relation `live` as a table in memory, and the few columns of it that tests set."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import duckdb
from tarn.model.statement import microseconds


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
    """A DuckDB as the API runs it: with what is in the wheel, and nothing to be loaded."""
    config: Any = {"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 1}
    connection = duckdb.connect(config=config)
    connection.execute(
        "CREATE TABLE live (dataset VARCHAR, canonical_id VARCHAR, entity_id VARCHAR, id BLOB, schema VARCHAR, "
        "prop VARCHAR, value VARCHAR, lang VARCHAR, original_value VARCHAR, external BOOLEAN, origin VARCHAR, "
        "first_seen BIGINT, last_seen BIGINT)"
    )
    return connection


def fill(connection: duckdb.DuckDBPyConnection, rows: Iterable[Row]) -> None:
    """Make these the only rows there are; an entity id that is not given is the canonical one."""
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
