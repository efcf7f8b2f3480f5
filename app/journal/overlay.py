"""What the journal holds that no snapshot holds yet."""

from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, or_, select

from app.db.tables import journal, journal_batches
from app.journal.batches import COMMITTED
from app.journal.events import Kind
from app.lake.datasets import Dataset
from app.lake.fold import Event, Live, fold
from app.model.statement import shard_of

NAMES = {Kind.ADD: "add", Kind.DELETE: "delete", Kind.ERASE: "erase"}


def live_of_entity(connection: Connection, dataset: Dataset, entity_id: str, origin: str | None) -> list[Live]:
    """The live statements of an entity, of one origin or of all."""
    here = or_(journal.c.shard_key == shard_of(entity_id), journal.c.shard_key.is_(None))
    about = or_(journal.c.entity_id == entity_id, journal.c.entity_id.is_(None))
    return _of_origin(fold(_events(connection, dataset, here, about)), origin)


def live_of_origin(connection: Connection, dataset: Dataset, origin: str) -> list[Live]:
    """Everything live of one origin."""
    return fold(_events(connection, dataset, or_(journal.c.origin == origin, journal.c.origin.is_(None))))


def live_of_statement(connection: Connection, dataset: Dataset, statement: bytes, origin: str | None) -> list[Live]:
    """A statement, once for each origin in which it is live."""
    entities = connection.execute(
        select(journal.c.entity_id)
        .join(journal_batches, journal_batches.c.id == journal.c.batch)
        .where(*_visible(dataset), journal.c.id == statement)
        .distinct()
    ).scalars()
    return [
        live
        for entity_id in entities
        for live in live_of_entity(connection, dataset, entity_id, origin)
        if live.id == statement
    ]


def _events(connection: Connection, dataset: Dataset, *which: ColumnElement[bool]) -> Iterator[Event]:
    """Committed events in the order in which they happened."""
    columns = (journal.c.kind, journal.c.id, journal.c.entity_id, journal.c.prop, journal.c.origin)
    rows = connection.execution_options(stream_results=True).execute(
        select(*columns)
        .join(journal_batches, journal_batches.c.id == journal.c.batch)
        .where(*_visible(dataset), *which)
        .order_by(journal_batches.c.commit, journal.c.position)
    )
    for row in rows:
        yield Event(NAMES[Kind(row.kind)], row.id, row.entity_id, row.prop, row.origin)


def _visible(dataset: Dataset) -> tuple[ColumnElement[bool], ...]:
    return journal_batches.c.dataset_id == dataset.id, journal_batches.c.state == COMMITTED


def _of_origin(found: list[Live], origin: str | None) -> list[Live]:
    return found if origin is None else [live for live in found if live.origin == origin]
