"""A database as lines of text: every table at one moment, to be loaded into a database of either kind.

Of each table the first line names the columns and what kind of values they hold, and each further line is a row. So a
dump tells all that is needed to load it, also by a later version whose own tables have more columns.
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
"""What is true of running processes and of this machine only."""

SEEDED = (access_revision, clock, compatibility)
"""What a database without anybody's data may hold."""

AT_ONCE, PACKS_AT_ONCE = 2000, 16
"""Rows that are read or written at once; a pack has thousands of rows in it."""

KINDS: tuple[tuple[type[TypeEngine[Any]] | type[Moment], str], ...] = (
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
    """A dump does not say what a dump says."""


# Out of a database


def dumped() -> list[Table]:
    """The tables that are in a dump, each after those that it refers to."""
    return [one for one in metadata.sorted_tables if one not in NOT_DUMPED]


def lines(connection: Connection, one: Table) -> Iterator[bytes]:
    """A table, line by line, as the caller's transaction sees it."""
    kinds = {str(each.name): _kind(each) for each in one.columns}
    yield _line({"table": str(one.name), "columns": kinds})
    chosen = [_selected(each, kinds[each.name]) for each in one.columns]
    at_once = connection.execution_options(yield_per=_at_once(one.name))
    found = at_once.execute(select(*chosen).order_by(*one.primary_key.columns))
    for row in found:
        yield _line([_to_json(value) for value in row])


def _kind(each: Column[Any]) -> str:
    # An enumeration of SQLAlchemy's own: String is above Text.
    return next((kind for known, kind in KINDS if isinstance(each.type, known)), "text")


def _selected(each: Column[Any], kind: str) -> Any:
    # As text: read as a value, a null in JSON and the absence of one look alike.
    return type_coerce(cast(each, Text), Text()).label(each.name) if kind == "json" else each


def _to_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | memoryview):
        # Also where a text should be: SQLite takes anything anywhere.
        return {"hex": bytes(value).hex()}
    return value


def _line(value: object) -> bytes:
    return orjson.dumps(value) + b"\n"


# Into a database


def occupied(connection: Connection) -> str | None:
    """What keeps a database from being loaded into; None: it is empty, migrated or not."""
    present = set(inspect(connection).get_table_names())
    if migrate.revision(connection) is None:
        strange = sorted(present - {"alembic_version"})
        return f"it has the table {strange[0]!r}, which Tarn did not make" if strange else None
    for one in metadata.sorted_tables:
        is_full = one.name in present and one not in SEEDED
        if (
            is_full
            and connection.execute(
                select(func.count()).select_from(select(text("1")).select_from(one).limit(1).subquery())
            ).scalar()
        ):
            return f"its table {one.name!r} has rows"
    return None


def prepare(connection: Connection, revision: str) -> None:
    """Give an empty database the tables of a revision. Raises StartRefused for one that this version does not know."""
    if revision not in migrate.revisions():
        raise StartRefused(
            f"the backup is of revision {revision}, which this version of Tarn does not know: use the one that made it"
        )
    if migrate.revision(connection) != revision:
        there = MetaData()
        there.reflect(connection, resolve_fks=False)
        there.drop_all(connection)
        migrate.upgrade_in(connection, revision)


def load(connection: Connection, given: Iterable[bytes]) -> int:
    """Put a table's rows in the place of those there are, and return how many. Raises DumpInvalid."""
    found = iter(given)
    try:
        head = orjson.loads(next(found))
        name, kinds = str(head["table"]), dict(head["columns"])
        columns = [column(each, TYPES[kind]) for each, kind in kinds.items()]
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        raise DumpInvalid("a dump does not begin with its columns") from error
    target = table(name, *columns)
    connection.execute(delete(target))
    values = [_VALUES.get(kind, _decoded) for kind in kinds.values()]
    rows = 0
    while some := list(islice(found, _at_once(name))):
        try:
            read = [
                {each: value(given) for each, value, given in zip(kinds, values, orjson.loads(line), strict=True)}
                for line in some
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DumpInvalid(f"a row of {name!r} cannot be read") from error
        connection.execute(insert(target), read)
        rows += len(read)
    return rows


def reset_sequences(connection: Connection) -> None:
    """Let numbers that the database itself gives out go on above those that are there."""
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
    read = orjson.loads(value)
    return JSON.NULL if read is None else read


_VALUES: dict[str, Callable[[Any], Any]] = {"moment": _moment, "json": _json}
