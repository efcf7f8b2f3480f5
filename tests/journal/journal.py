"""Looking into the journal, as tests do until there are reads."""

from typing import Any

from sqlalchemy import select
from tarn.db.tables import journal, journal_batches, journal_head, tags

from tests.in_process_api import InProcessApi


def rows(house: InProcessApi, state: str | None = "committed") -> list[dict[str, Any]]:
    """Every event, with its batch's commit and segment, in the order in which they happened."""
    query = (
        select(journal, journal_batches.c.commit, journal_batches.c.segment, journal_batches.c.state)
        .join(journal_batches, journal_batches.c.id == journal.c.batch)
        .order_by(journal_batches.c.commit, journal.c.position)
    )
    if state is not None:
        query = query.where(journal_batches.c.state == state)
    with house.services.database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(query)]


def count(house: InProcessApi) -> int:
    """Rows of any state: what was refused must not even be there."""
    return len(rows(house, None))


def batches(house: InProcessApi) -> list[dict[str, Any]]:
    with house.services.database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(select(journal_batches))]


def head(house: InProcessApi) -> dict[str, Any]:
    with house.services.database.read() as connection:
        return dict(connection.execute(select(journal_head)).one()._mapping)


def tag(house: InProcessApi, key: str) -> Any:
    with house.services.database.read() as connection:
        return connection.execute(select(tags.c.at).where(tags.c.key == key)).scalar()
