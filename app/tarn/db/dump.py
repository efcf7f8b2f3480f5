"""Database dump as NDJSON: every table in one consistent read, loadable into SQLite or PostgreSQL.

The first line of each table names its columns and their types; each further line is a row. A dump therefore describes
itself: a later version whose tables have more columns can load it.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

import orjson
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    cast,
    column,
    delete,
    func,
    insert,
    inspect,
    select,
    table,
    text,
    type_coerce,
)
from sqlalchemy.types import TypeEngine

from tarn.db import migrate
from tarn.db.tables import (
    Moment,
    access_revision,
    clock,
    compatibility,
    journal_batches,
    journal_packs,
    metadata,
    readers,
    workers,
)
from tarn.errors import StartRefused

NOT_DUMPED = (clock, readers, workers)
"""Tables that only describe running processes and this machine: they are not dumped."""

SEEDED = (access_revision, clock, compatibility)
"""Tables that may have rows in a database that counts as empty."""

AT_ONCE, PACKS_AT_ONCE = 2000, 16
"""Rows per read or write; fewer of packs, each of which holds thousands of events."""

COLUMN_TYPES: tuple[tuple[type[TypeEngine[Any]] | type[Moment], str], ...] = (
    (Moment, "moment"),
    (JSON, "json"),
    (LargeBinary, "bytes"),
    (Boolean, "boolean"),
    (Integer, "integer"),
    (Float, "number"),
    (Text, "text"),
)

TYPES: dict[str, TypeEngine[Any]] = {
    "moment": Moment(),
    "json": JSON(none_as_null=True),
    "bytes": LargeBinary(),
    "boolean": Boolean(),
    "integer": BigInteger(),
    "number": Float(),
    "text": Text(),
}


class DumpInvalid(Exception):
    """A dump cannot be parsed."""


# Writing a dump


def dumped() -> list[Table]:
    """Return the tables of a dump, each after those that it references."""
    return [each for each in metadata.sorted_tables if each not in NOT_DUMPED]


def lines(connection: Connection, dumped_table: Table) -> Iterator[bytes]:
    """Yield a table line by line, as the caller's transaction sees it."""
    kinds = {str(each.name): _kind(each) for each in dumped_table.columns}
    yield _line({"table": str(dumped_table.name), "columns": kinds})
    selected = [_selected(each, kinds[each.name]) for each in dumped_table.columns]
    at_once = connection.execution_options(yield_per=_at_once(dumped_table.name))
    rows = at_once.execute(select(*selected).order_by(*dumped_table.primary_key.columns))
    for row in rows:
        yield _line([_to_json(value) for value in row])


def _kind(each: Column[Any]) -> str:
    # An enumeration of SQLAlchemy's own: String is above Text.
    return next((kind for known, kind in COLUMN_TYPES if isinstance(each.type, known)), "text")


def _selected(each: Column[Any], kind: str) -> Any:
    # As text: read as a value, a JSON null and an SQL NULL cannot be distinguished.
    return type_coerce(cast(each, Text), Text()).label(each.name) if kind == "json" else each


def _to_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | memoryview):
        # Also in text columns: SQLite does not enforce column types.
        return {"hex": bytes(value).hex()}
    return value


def _line(value: object) -> bytes:
    return orjson.dumps(value) + b"\n"


# Loading a dump


def occupied(connection: Connection) -> str | None:
    """Return why a database cannot be loaded into; None if it is empty, migrated or not."""
    present = set(inspect(connection).get_table_names())
    if migrate.revision(connection) is None:
        unknown = sorted(present - {"alembic_version"})
        return f"it has the table {unknown[0]!r}, which is not Tarn's" if unknown else None
    for dumped_table in metadata.sorted_tables:
        is_full = dumped_table.name in present and dumped_table not in SEEDED
        if (
            is_full
            and connection.execute(
                select(func.count()).select_from(select(text("1")).select_from(dumped_table).limit(1).subquery())
            ).scalar()
        ):
            return f"its table {dumped_table.name!r} has rows"
    return None


def prepare(connection: Connection, revision: str) -> None:
    """Create the tables of a revision in an empty database. Raises StartRefused for an unknown revision."""
    if revision not in migrate.revisions():
        raise StartRefused(
            f"the backup has database revision {revision}, which this version of Tarn does not know: "
            "restore it with the version that made it"
        )
    if migrate.revision(connection) != revision:
        existing = MetaData()
        existing.reflect(connection, resolve_fks=False)
        existing.drop_all(connection)
        migrate.upgrade_in(connection, revision)


def load(connection: Connection, dump_lines: Iterable[bytes]) -> int:
    """Replace a table's rows by those of a dump and return their number. Raises DumpInvalid."""
    remaining = iter(dump_lines)
    try:
        head = orjson.loads(next(remaining))
        name, kinds = str(head["table"]), dict(head["columns"])
        columns = [column(each, TYPES[kind]) for each, kind in kinds.items()]
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        raise DumpInvalid("the first line of a table's dump does not describe its columns") from error
    target = table(name, *columns)
    connection.execute(delete(target))
    values = [_VALUES.get(kind, _decoded) for kind in kinds.values()]
    rows = 0
    while batch := list(islice(remaining, _at_once(name))):
        try:
            decoded_rows = [
                {each: decode(value) for each, decode, value in zip(kinds, values, orjson.loads(line), strict=True)}
                for line in batch
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DumpInvalid(f"a row of {name!r} cannot be read") from error
        connection.execute(insert(target), decoded_rows)
        rows += len(decoded_rows)
    return rows


def reset_sequences(connection: Connection) -> None:
    """Move the id sequence of journal batches above the ids that were loaded."""
    if connection.dialect.name == "postgresql":
        last = select(func.max(journal_batches.c.id)).scalar_subquery()
        name = func.pg_get_serial_sequence(journal_batches.name, "id")
        connection.execute(select(func.setval(name, func.coalesce(last, 1), last.is_not(None))))


def _at_once(name: str) -> int:
    return PACKS_AT_ONCE if name == journal_packs.name else AT_ONCE


def _decoded(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def _moment(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value)


def _json(value: str | None) -> Any:
    if value is None:
        return None
    parsed = orjson.loads(value)
    return JSON.NULL if parsed is None else parsed


_VALUES: dict[str, Callable[[Any], Any]] = {"moment": _moment, "json": _json}
