"""What a database's schema is, and what of it a step takes away from the code of before."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import CheckConstraint, Connection, MetaData, Table, UniqueConstraint, text


@dataclass(frozen=True)
class TableDescription:
    """One table, in values that can be compared whatever order they were made in."""

    columns: dict[str, tuple[str, bool, str | None]]
    """Type, whether it may be null, and what it is if nothing is said."""
    primary: tuple[str, ...]
    unique: frozenset[tuple[str, ...]]
    foreign: frozenset[tuple[Any, ...]]
    indexes: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    checks: frozenset[str] = frozenset()
    comments: dict[str, str | None] = field(default_factory=dict)
    without_rowid: bool = False


class Contraction(NamedTuple):
    """What code of before may rely on and is no more: of which table or `table.column`, and what of it."""

    of: str
    what: str


def reflected(connection: Connection) -> MetaData:
    """The tables as the database has them."""
    found = MetaData()
    found.reflect(connection)
    return found


def describe_schema(connection: Connection, schema: MetaData | None = None) -> dict[str, TableDescription]:
    """Every table of a database but Alembic's own."""
    schema = schema or reflected(connection)
    without_rowid: set[str] = set()
    if connection.dialect.name == "sqlite":
        made = connection.execute(text("SELECT name FROM sqlite_master WHERE sql LIKE '%WITHOUT ROWID%'"))
        without_rowid = set(made.scalars())
    return {
        table.name: _describe_table(table, connection.dialect.name, table.name in without_rowid)
        for table in schema.sorted_tables
        if table.name != "alembic_version"
    }


def _describe_table(table: Table, dialect: str, without_rowid: bool) -> TableDescription:
    unique = {_names(each.columns) for each in table.constraints if isinstance(each, UniqueConstraint)}
    unique |= {_names(index.columns) for index in table.indexes if index.unique}
    return TableDescription(
        columns={
            each.name: (str(each.type), bool(each.nullable), _default(each.server_default)) for each in table.columns
        },
        primary=_names(table.primary_key.columns),
        unique=frozenset(unique),
        foreign=frozenset(
            (_names(each.columns), *_names(key.target_fullname for key in each.elements))
            for each in table.foreign_key_constraints
        ),
        indexes={
            str(index.name): (_names(index.columns), str(index.dialect_options[dialect]["where"]))
            for index in table.indexes
        },
        checks=frozenset(str(each.sqltext) for each in table.constraints if isinstance(each, CheckConstraint)),
        comments={each.name: each.comment for each in table.columns},
        without_rowid=without_rowid,
    )


def _names(columns: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(getattr(each, "name", each)) for each in columns)


def _default(found: Any) -> str | None:
    return None if found is None else str(getattr(found, "arg", type(found).__name__))


def contractions(before: dict[str, TableDescription], after: dict[str, TableDescription]) -> list[Contraction]:
    """What a step from one schema to another takes from those who read and write the first one."""
    return [found for name, table in before.items() for found in _table_contractions(name, table, after.get(name))]


def _table_contractions(name: str, before: TableDescription, after: TableDescription | None) -> Iterator[Contraction]:
    if after is None:
        yield Contraction(name, "is gone, or has another name")
        return
    for column, (kind, nullable, default) in before.columns.items():
        now = after.columns.get(column)
        if now is None:
            yield Contraction(f"{name}.{column}", "is gone, or has another name")
            continue
        if now[0] != kind:
            yield Contraction(f"{name}.{column}", f"was {kind} and is {now[0]}")
        if nullable and not now[1]:
            yield Contraction(f"{name}.{column}", "may not be null any more")
        if default is not None and now[2] is None and not now[1]:
            yield Contraction(f"{name}.{column}", "has no default any more")
    for column in after.columns.keys() - before.columns.keys():
        _, nullable, default = after.columns[column]
        if not nullable and default is None:
            yield Contraction(f"{name}.{column}", "is new, may not be null and has no default")
    if after.primary != before.primary:
        yield Contraction(name, "has another primary key")
    for what, old, new in (
        ("to be unique", before.unique, after.unique),
        ("to be in another table", before.foreign, after.foreign),
        ("to fulfil a condition", before.checks, after.checks),
    ):
        if new - old:
            yield Contraction(name, f"has {what}: {sorted(map(str, new - old))}")
    if before.unique - after.unique:
        yield Contraction(name, f"need not be unique any more: {sorted(before.unique - after.unique)}")
