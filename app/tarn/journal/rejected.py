"""Rejected events: those that a flush could not write, kept until an operator retries them or deletes the dataset."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, insert, select

from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal, journal_batches, journal_rejected
from tarn.db.upsert import upsert
from tarn.journal import head
from tarn.journal.batches import COMMITTED
from tarn.journal.parsing.event_buffer import SCHEMA
from tarn.model.datasets.journal import MOST_RETRIED, RejectedEvent, Retried
from tarn.model.ids import new_id, now
from tarn.model.names import TenantName
from tarn.settings import Settings

COLUMNS = tuple(name for name in SCHEMA.names if name not in ("batch", "position"))
"""The columns of an event, without batch and position."""

ERASED_AT_ONCE = 500
"""Maximum ids in one SQL statement."""


class Rejected(NamedTuple):
    """A rejected event: its batch and position, and why it cannot be written. Bytes in `event` are hexadecimal."""

    batch_uid: str
    tenant: str
    commit: int
    position: int
    event: dict[str, Any]
    reason: str


def store_rejected(connection: Connection, dataset_id: str, rows: list[Rejected]) -> None:
    """Store rejected events in the transaction that removes them from the journal. Idempotent."""
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
    """Delete the rejected events of these entities."""
    rows = connection.execute(
        select(journal_rejected.c.id, journal_rejected.c.event).where(journal_rejected.c.dataset_id == dataset_id)
    )
    erased = set(entity_ids)
    ids = [row.id for row in rows if erased & {row.event.get("entity_id"), row.event.get("canonical_id")}]
    for start in range(0, len(ids), ERASED_AT_ONCE):
        some = ids[start : start + ERASED_AT_ONCE]
        connection.execute(delete(journal_rejected).where(journal_rejected.c.id.in_(some)))


class RejectedEventService:
    """Lists and retries rejected events."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def page(self, dataset: Dataset, after: str | None, limit: int) -> list[RejectedEvent]:
        """Return rejected events, oldest first."""
        query = _of(dataset).order_by(journal_rejected.c.id).limit(limit)
        if after is not None:
            query = query.where(journal_rejected.c.id > after)
        with self._database.read() as connection:
            rows = connection.execute(query)
            return [RejectedEvent.model_validate(row._mapping, from_attributes=True) for row in rows]

    def retry(self, dataset: Dataset, tenant: TenantName, ids: list[str] | None, act: AuditedAction) -> Retried:
        """Retry rejected events: those with these ids, or the oldest. Raises DatasetNotFound, Backpressure."""
        with self._database.write() as connection:
            retried = retry(connection, self._settings, dataset, tenant, ids)
            act.done(connection, rows=retried.retried)
        return retried


def retry(connection: Connection, settings: Settings, dataset: Dataset, tenant: str, ids: list[str] | None) -> Retried:
    """Write rejected events to the journal as one new batch of this tenant: those with these ids, or the oldest.

    The DELETE claims the events, so of two concurrent retries only one gets each event. They were counted in a quota
    when they were first written, and are not counted again. They apply as of now, after all writes made since.
    Raises DatasetNotFound, Backpressure; then nothing has changed.
    """
    query = _of(dataset).with_only_columns(journal_rejected.c.id).order_by(journal_rejected.c.id).limit(MOST_RETRIED)
    if ids is not None:
        query = query.where(journal_rejected.c.id.in_(ids))
    requested = connection.execute(query).scalars().all()
    claimed = connection.execute(
        delete(journal_rejected).where(journal_rejected.c.id.in_(requested)).returning(journal_rejected)
    ).all()
    if not claimed:
        return Retried(retried=0, commit=None)
    events = [_event(row) for row in sorted(claimed, key=lambda row: (row.commit, row.position))]
    return Retried(retried=len(events), commit=_write(connection, settings, dataset, tenant, events))


def _write(
    connection: Connection, settings: Settings, dataset: Dataset, tenant: str, events: list[dict[str, Any]]
) -> int:
    moment = now()
    more = head.AddedSize(len(events), sum(len(event["value"] or "") for event in events))
    stamp = head.take(connection, dataset, 1, more, moment, within=settings)
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
    """Return the journal columns of a rejected event."""
    event = {name: row.event.get(name) for name in COLUMNS}
    return event | {"id": None if event["id"] is None else bytes.fromhex(event["id"])}


def _of(dataset: Dataset) -> Any:
    return select(journal_rejected).where(journal_rejected.c.dataset_id == dataset.id)
