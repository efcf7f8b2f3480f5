"""Events set aside: what a flush could not write, kept until an operator puts it back or deletes the dataset."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, insert, select

from tarn.datasets.registry import Dataset
from tarn.db.tables import journal, journal_batches, journal_rejected
from tarn.db.upsert import upsert
from tarn.journal import head as heads
from tarn.journal.batches import COMMITTED
from tarn.journal.event_buffer import SCHEMA
from tarn.model.ids import new_id, now
from tarn.model.journal import MOST_RETRIED, RejectedEvent, Retried
from tarn.settings import Settings

COLUMNS = tuple(name for name in SCHEMA.names if name not in ("batch", "position"))
"""What an event is, wherever it stands."""

ERASED_AT_ONCE = 500
"""Ids in one statement."""


class Rejected(NamedTuple):
    """An event to be set aside: where it stood, and why it cannot be written. Bytes in it are hexadecimal."""

    batch_uid: str
    tenant: str
    commit: int
    position: int
    event: dict[str, Any]
    reason: str


def store_rejected(connection: Connection, dataset_id: str, rows: list[Rejected]) -> None:
    """Keep events in the transaction that takes them out of the journal. Doing it again changes nothing."""
    moment = now()
    values = [
        {
            "id": new_id(),
            "dataset_id": dataset_id,
            "batch": row.batch_uid,
            "tenant": row.tenant,
            "commit": row.commit,
            "position": row.position,
            "event": row.event,
            "reason": row.reason,
            "at": moment,
        }
        for row in rows
    ]
    if values:
        connection.execute(upsert(connection, journal_rejected).on_conflict_do_nothing(), values)


def erase(connection: Connection, dataset_id: str, entity_ids: Collection[str]) -> None:
    """Forget the events on these entities that were set aside."""
    rows = connection.execute(
        select(journal_rejected.c.id, journal_rejected.c.event).where(journal_rejected.c.dataset_id == dataset_id)
    )
    known = set(entity_ids)
    gone = [row.id for row in rows if known & {row.event.get("entity_id"), row.event.get("canonical_id")}]
    for start in range(0, len(gone), ERASED_AT_ONCE):
        some = gone[start : start + ERASED_AT_ONCE]
        connection.execute(delete(journal_rejected).where(journal_rejected.c.id.in_(some)))


def page(connection: Connection, dataset: Dataset, after: str | None, limit: int) -> list[RejectedEvent]:
    """Events that were set aside, oldest first."""
    query = _of(dataset).order_by(journal_rejected.c.id).limit(limit)
    if after is not None:
        query = query.where(journal_rejected.c.id > after)
    return [RejectedEvent.model_validate(row._mapping, from_attributes=True) for row in connection.execute(query)]


def retry(connection: Connection, settings: Settings, dataset: Dataset, tenant: str, ids: list[str] | None) -> Retried:
    """Put events back into the journal as one new batch of this tenant: these, or the oldest ones.

    Deleting them is what takes them, so of two who retry the same event one gets it. They were counted in a quota when
    they were first written, and are not again. They happen now: what was said since is overruled by them.
    Raises DatasetNotFound, Backpressure; then nothing has changed.
    """
    wanted = _of(dataset).with_only_columns(journal_rejected.c.id).order_by(journal_rejected.c.id).limit(MOST_RETRIED)
    if ids is not None:
        wanted = wanted.where(journal_rejected.c.id.in_(ids))
    found = connection.execute(wanted).scalars().all()
    taken = connection.execute(
        delete(journal_rejected).where(journal_rejected.c.id.in_(found)).returning(journal_rejected)
    ).all()
    if not taken:
        return Retried(retried=0, commit=None)
    events = [_event(row) for row in sorted(taken, key=lambda row: (row.commit, row.position))]
    return Retried(retried=len(events), commit=_write(connection, settings, dataset, tenant, events))


def _write(
    connection: Connection, settings: Settings, dataset: Dataset, tenant: str, events: list[dict[str, Any]]
) -> int:
    moment = now()
    more = heads.AddedSize(len(events), sum(len(event["value"] or "") for event in events))
    stamp = heads.take(connection, dataset, 1, more, moment, within=settings)
    batch_id: int = connection.execute(
        insert(journal_batches)
        .values(
            uid=new_id(),
            dataset_id=dataset.id,
            tenant=tenant,
            state=COMMITTED,
            is_stage=False,
            segment=stamp.segment,
            commit=stamp.first,
            entities=0,
            rows=more.rows,
            size=more.size,
            reserved=0,
            metadata={},
            created=moment,
            expires=moment + timedelta(seconds=settings.batch_expiry),
        )
        .returning(journal_batches.c.id)
    ).scalar_one()
    rows = [{"batch": batch_id, "position": position, **event} for position, event in enumerate(events)]
    connection.execute(insert(journal), rows)
    return stamp.first


def _event(row: Row[Any]) -> dict[str, Any]:
    """The journal's columns of a kept event."""
    event = {name: row.event.get(name) for name in COLUMNS}
    return event | {"id": None if event["id"] is None else bytes.fromhex(event["id"])}


def _of(dataset: Dataset) -> Any:
    return select(journal_rejected).where(journal_rejected.c.dataset_id == dataset.id)
