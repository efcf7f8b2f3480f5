"""Comparable descriptions of database schemas, and the contractions between two of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import CheckConstraint, Connection, MetaData, Table, UniqueConstraint, text


@dataclass(frozen=True)
class TableDescription:
    """One table, in values that compare equal regardless of the order of creation."""

    columns: dict[str, tuple[str, bool, str | None]]
    """Type, whether it is nullable, and the default."""
    primary: tuple[str, ...]
    unique: frozenset[tuple[str, ...]]
    foreign: frozenset[tuple[Any, ...]]
    indexes: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    checks: frozenset[str] = frozenset()
    comments: dict[str, str | None] = field(default_factory=dict)
    without_rowid: bool = False


class Contraction(NamedTuple):
    """A change that code of an earlier version may not expect: the table or `table.column`, and what was changed."""

    subject: str
    change: str


def reflect(connection: Connection) -> MetaData:
    """Return the tables that the database has."""
    schema = MetaData()
    schema.reflect(connection)
    return schema


def describe_schema(connection: Connection, schema: MetaData | None = None) -> dict[str, TableDescription]:
    """Describe every table of a database except Alembic's."""
    schema = schema or reflect(connection)
    without_rowid: set[str] = set()
    if connection.dialect.name == "sqlite":
        tables = connection.execute(text("SELECT name FROM sqlite_master WHERE sql LIKE '%WITHOUT ROWID%'"))
        without_rowid = set(tables.scalars())
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


def _default(default: Any) -> str | None:
    return None if default is None else str(getattr(default, "arg", type(default).__name__))


def contractions(before: dict[str, TableDescription], after: dict[str, TableDescription]) -> list[Contraction]:
    """Return the changes between two schemas that code for the first one may not expect."""
    return [
        contraction
        for name, table in before.items()
        for contraction in _table_contractions(name, table, after.get(name))
    ]


def _table_contractions(name: str, before: TableDescription, after: TableDescription | None) -> Iterator[Contraction]:
    if after is None:
        yield Contraction(name, "was removed or renamed")
        return
    for column, (type_, nullable, default) in before.columns.items():
        current = after.columns.get(column)
        if current is None:
            yield Contraction(f"{name}.{column}", "was removed or renamed")
            continue
        if current[0] != type_:
            yield Contraction(f"{name}.{column}", f"was {type_} and is {current[0]}")
        if nullable and not current[1]:
            yield Contraction(f"{name}.{column}", "is no longer nullable")
        if default is not None and current[2] is None and not current[1]:
            yield Contraction(f"{name}.{column}", "lost its default")
    for column in after.columns.keys() - before.columns.keys():
        _, nullable, default = after.columns[column]
        if not nullable and default is None:
            yield Contraction(f"{name}.{column}", "is new, not nullable and without a default")
    if after.primary != before.primary:
        yield Contraction(name, "has a different primary key")
    for constraint, old, new in (
        ("a new unique constraint", before.unique, after.unique),
        ("a new foreign key", before.foreign, after.foreign),
        ("a new check constraint", before.checks, after.checks),
    ):
        if new - old:
            yield Contraction(name, f"has {constraint}: {sorted(map(str, new - old))}")
    if before.unique - after.unique:
        yield Contraction(name, f"lost a unique constraint: {sorted(before.unique - after.unique)}")
