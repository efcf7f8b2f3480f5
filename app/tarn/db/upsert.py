"""INSERT … ON CONFLICT, which both databases have and SQLAlchemy has once for each."""

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def upsert(connection: Connection, table: Table) -> postgresql.Insert:
    """An insert with `on_conflict_…`. Both kinds have the same methods, so one type stands for them."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)  # type: ignore[return-value]  # the same methods under another name
