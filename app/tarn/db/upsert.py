"""INSERT … ON CONFLICT for both databases; SQLAlchemy has one construct per dialect."""

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def upsert(connection: Connection, table: Table) -> postgresql.Insert:
    """Return an insert with `on_conflict_…` methods. Both dialects have the same ones, so one type covers both."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)  # type: ignore[return-value]  # the same methods under another name
