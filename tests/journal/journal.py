"""Inspection of the journal's tables."""

from typing import Any

from sqlalchemy import select
from tarn.db.tables import journal, journal_batches, journal_head, tags

from tests.in_process_api import InProcessApi


def rows(api: InProcessApi, state: str | None = "committed") -> list[dict[str, Any]]:
    """Return every event with its batch's commit and segment, in order."""
    query = (
        select(journal, journal_batches.c.commit, journal_batches.c.segment, journal_batches.c.state)
        .join(journal_batches, journal_batches.c.id == journal.c.batch)
        .order_by(journal_batches.c.commit, journal.c.position)
    )
    if state is not None:
        query = query.where(journal_batches.c.state == state)
    with api.services.database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]


def count(api: InProcessApi) -> int:
    """Return the number of rows of any state: refused events must not be stored at all."""
    return len(rows(api, None))


def batches(api: InProcessApi) -> list[dict[str, Any]]:
    with api.services.database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(select(journal_batches))]


def head(api: InProcessApi) -> dict[str, Any]:
    with api.services.database.read() as connection:
        return dict(connection.execute(select(journal_head)).one()._mapping)


def tag(api: InProcessApi, key: str) -> Any:
    with api.services.database.read() as connection:
        return connection.execute(select(tags.c.at).where(tags.c.key == key)).scalar()
