"""Rows for every table of a reflected schema of any version."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, Boolean, Column, Connection, DateTime, Float, LargeBinary, MetaData, Table, select
from sqlalchemy import types as kinds

START = datetime(2026, 1, 1, tzinfo=UTC)

VALID_VALUES: dict[str, Any] = {
    "api_keys.digest": "0" * 64,
    "audit.outcome": "done",
    "datasets.name": "gone",
    "datasets.state": "deleted",
    "grants.level": "read",
    "jobs.operation": "compact",
    "jobs.state": "done",
    "jobs.arguments": {},
    "jobs.progress": None,
    "jobs.result": None,
    "jobs.problem": None,
    "journal.kind": 1,
    "journal_batches.state": "done",
    "journal_batches.is_stage": True,
    "queue.state": "done",
    "queue.action": "upsert",
    "queue.resource": "journal",
    "events.kind": "job.done",
    "events.audience": ["tenants-1"],
    "webhooks.state": "given_up",
    "webhooks.kinds": [],
    "webhooks.datasets": ["*"],
}
"""By table and column: values for columns in which the application does not accept generated ones."""

SINGLE_ROW_TABLES = {"access_revision", "clock", "compatibility", "lake"}
"""Tables of exactly one row, which is left as it is."""

Rows = dict[str, list[tuple[Any, ...]]]


def fill(connection: Connection, schema: MetaData, step: int) -> None:
    """Add two rows to every table: one with as many nulls as allowed, and one without nulls."""
    for table in schema.sorted_tables:
        if table.name == "alembic_version" or (
            table.name in SINGLE_ROW_TABLES and connection.execute(select(table)).first()
        ):
            continue
        for number in (2 * step + 1, 2 * step + 2)[: 1 if table.name in SINGLE_ROW_TABLES else 2]:
            row = {column.name: _value(table, column, number) for column in table.columns}
            connection.execute(table.insert().values(row))


def read(connection: Connection, schema: MetaData, like: Rows | None = None) -> Rows:
    """Return all rows by table, preceded by the names of the columns, those of `like` alone if it is given."""
    columns = (
        {name: rows[0] for name, rows in like.items()}
        if like is not None
        else {
            table.name: tuple(column.name for column in table.columns)
            for table in schema.sorted_tables
            if table.name != "alembic_version"
        }
    )
    return {name: [names, *_sorted_rows(connection, schema.tables[name], names)] for name, names in columns.items()}


def _sorted_rows(connection: Connection, table: Table, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, connection.execute(select(*(table.c[column] for column in columns)))), key=repr)


def _value(table: Table, column: Column[Any], number: int) -> Any:
    if column.nullable and number % 2:
        return None
    name = f"{table.name}.{column.name}"
    if name in VALID_VALUES:
        return VALID_VALUES[name]
    for key in column.foreign_keys:
        # The row of the same step, which exists already; within one table, the row before.
        return _value(key.column.table, key.column, number - (key.column.table is table))
    return _generated_value(table, column, number)


def _generated_value(table: Table, column: Column[Any], number: int) -> Any:
    kind = column.type
    if isinstance(kind, DateTime):
        timestamp = START + timedelta(minutes=number)
        return timestamp if kind.timezone else timestamp.replace(tzinfo=None)
    if isinstance(kind, Boolean):
        return number % 2 == 0
    if isinstance(kind, Float):
        return number + 0.5
    if isinstance(kind, kinds.Integer):
        return number
    if isinstance(kind, JSON):
        return {"number": number}
    if isinstance(kind, LargeBinary):
        return number.to_bytes(20, "big")
    assert isinstance(kind, kinds.String), kind
    return f"{table.name}-{number}"[-(kind.length or 100) :]
