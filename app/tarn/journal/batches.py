"""Journal batches: the events of one request, committed atomically.

A small batch is written in one transaction. A large one is opened, filled chunk by chunk, and committed or aborted.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from tarn.access import audit, limits
from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.db import idempotency
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey, IdempotencyRace
from tarn.db.tables import journal, journal_batches
from tarn.errors import StageClosed
from tarn.journal import batch_contents, head
from tarn.journal.formats.counting import require_equal
from tarn.journal.parsing.event_buffer import Chunk
from tarn.model.ids import new_id, now
from tarn.model.names import TenantName
from tarn.settings import Settings

OPEN, STAGED, COMMITTED, ABORTED, DONE = "open", "staged", "committed", "aborted", "done"
"""States of a batch. It is done when a snapshot holds it; its rows are deleted soon after."""


@dataclass(slots=True)
class Batch:
    """A batch to write: its dataset, tenant and origin, and the response of its request without the commit number."""

    dataset: Dataset
    tenant: TenantName
    act: AuditedAction
    origin: str | None = None
    stage: int | None = None
    once: IdempotencyKey | None = None
    rows: int | None = None
    """Number of events that the body's parser produced, if it has one; checked against the batch at commit."""
    answer: dict[str, Any] = field(default_factory=dict)


class BatchOutcome(NamedTuple):
    """The response to a request, new or replayed by its idempotency key."""

    answer: dict[str, Any]
    replayed: bool = False


class BatchWithEvents(NamedTuple):
    """A batch with its events, to be written in one transaction."""

    batch: Batch
    events: Chunk


def write_small(connection: Connection, settings: Settings, group: list[BatchWithEvents]) -> list[BatchOutcome]:
    """Write small batches, all in the caller's transaction.

    Raises IdempotencyRace, or the error of any one batch: then none is written, and the caller retries them one by one.
    """
    for batch, events in group:
        require_equal(len(events), batch.rows, "rows are in the batch", "were read")
    moment = now()
    replays = [replay(connection, sized.batch) for sized in group]
    fresh = [sized for sized, replayed in zip(group, replays, strict=True) if replayed is None]
    keys = [(batch.tenant, batch.once.key) for batch, _ in fresh if batch.once is not None]
    if len(keys) > len(set(keys)):
        raise IdempotencyRace
    _reserve(connection, settings, fresh)
    commits = iter(_write(connection, settings, fresh, moment))
    outcomes = [BatchOutcome(sized.batch.answer | {"commit": next(commits)}) for sized in fresh]
    for sized, outcome in zip(fresh, outcomes, strict=True):
        remember(connection, sized.batch, outcome)
    audit.done_all(connection, [(batch.act, _detail(batch, len(events))) for batch, events in fresh])
    new_outcomes = iter(outcomes)
    return [next(new_outcomes) if replayed is None else replayed for replayed in replays]


def _reserve(connection: Connection, settings: Settings, fresh: list[BatchWithEvents]) -> None:
    by_tenant: dict[TenantName, int] = defaultdict(int)
    for batch, events in fresh:
        by_tenant[batch.tenant] += events.statements
    for tenant in sorted(by_tenant):
        limits.reserve(connection, tenant, settings, statements=by_tenant[tenant])


def _write(
    connection: Connection, settings: Settings, fresh: list[BatchWithEvents], moment: datetime
) -> list[int | None]:
    """Insert batches and their events; return the commit number of each, None for a batch of a stage."""
    by_dataset: dict[str, list[int]] = defaultdict(list)
    for number, (batch, _) in enumerate(fresh):
        if batch.stage is None:
            by_dataset[batch.dataset.id].append(number)
        else:
            hold_stage(connection, settings, batch.stage)
    stamps: dict[int, tuple[int, int]] = {}
    for dataset_id in sorted(by_dataset):
        numbers = by_dataset[dataset_id]
        dataset = fresh[numbers[0]].batch.dataset
        more = head.AddedSize.of(fresh[number].events for number in numbers)
        commits = head.take(connection, dataset, len(numbers), more, moment, within=settings)
        stamps |= {number: (commits.first + position, commits.segment) for position, number in enumerate(numbers)}
    uids = [new_id() for _ in fresh]
    values = [
        _row(uid, batch, settings, moment)
        | {
            "state": COMMITTED if number in stamps else STAGED,
            "commit": stamps[number][0] if number in stamps else None,
            "segment": stamps[number][1] if number in stamps else None,
            "entities": events.entities,
            "rows": len(events),
            "size": events.size,
            "reserved": events.statements,
        }
        for number, (uid, (batch, events)) in enumerate(zip(uids, fresh, strict=True))
    ]
    if values:
        inserted = connection.execute(
            insert(journal_batches).returning(journal_batches.c.uid, journal_batches.c.id), values
        )
        ids = {row.uid: row.id for row in inserted}
        rows_of = [row for uid, (_, events) in zip(uids, fresh, strict=True) for row in events.rows(ids[uid])]
        if rows_of:
            connection.execute(insert(journal), rows_of)
    return [stamps[number][0] if number in stamps else None for number in range(len(fresh))]


# Large batches: opened, filled chunk by chunk, and committed or aborted


def open_large(database: Database, settings: Settings, batch: Batch, first: Chunk) -> int:
    """Create a batch that is filled in many transactions and return its id; its rows are invisible until it commits.

    Counts its first chunk towards the quota. Raises Backpressure, QuotaExceeded, StageClosed.
    """
    moment = now()
    with database.write() as connection:
        head.check_pressure(connection, batch.dataset, settings)
        limits.reserve(connection, batch.tenant, settings, statements=first.statements)
        if batch.stage is not None:
            hold_stage(connection, settings, batch.stage)
        values = _row(new_id(), batch, settings, moment) | {
            "state": OPEN,
            "entities": first.entities,
            "rows": len(first),
            "size": first.size,
            "reserved": first.statements,
        }
        batch_id: int = connection.execute(
            insert(journal_batches).values(**values).returning(journal_batches.c.id)
        ).scalar_one()
    return batch_id


def count_chunk(database: Database, settings: Settings, batch: Batch, batch_id: int, events: Chunk) -> None:
    """Reserve quota for a chunk, add its counts to the batch, and renew the batch's expiry.

    Raises QuotaExceeded, StageClosed.
    """
    with database.write() as connection:
        limits.reserve(connection, batch.tenant, settings, statements=events.statements)
        counted = connection.execute(
            update(journal_batches)
            .where(journal_batches.c.id == batch_id, journal_batches.c.state == OPEN)
            .values(
                entities=journal_batches.c.entities + events.entities,
                rows=journal_batches.c.rows + len(events),
                size=journal_batches.c.size + events.size,
                reserved=journal_batches.c.reserved + events.statements,
                expires=_expiry(settings),
            )
        )
        if counted.rowcount != 1:
            raise StageClosed("the batch is no longer open: it expired, or was aborted")
        if batch.stage is not None:
            hold_stage(connection, settings, batch.stage)


def commit_large(database: Database, settings: Settings, batch: Batch, batch_id: int) -> BatchOutcome:
    """Commit a large batch in one transaction, which updates one row regardless of the batch's size.

    Raises IdempotencyRace, and StageClosed if it expired meanwhile.
    """
    moment = now()
    with database.write() as connection:
        if (before := replay(connection, batch)) is not None:
            return before
        row = connection.execute(
            select(journal_batches.c.rows, journal_batches.c.size).where(journal_batches.c.id == batch_id)
        ).first()
        more = head.AddedSize(0, 0) if row is None else head.AddedSize(row.rows, row.size)
        if row is not None:
            require_equal(row.rows, batch.rows, "rows are in the batch", "were read")
        if batch.stage is None:
            commits = head.take(connection, batch.dataset, 1, more, moment)
            values: dict[str, Any] = {"state": COMMITTED, "commit": commits.first, "segment": commits.segment}
        else:
            hold_stage(connection, settings, batch.stage)
            values = {"state": STAGED}
        stamped = connection.execute(
            update(journal_batches)
            .where(journal_batches.c.id == batch_id, journal_batches.c.state == OPEN)
            .values(**values)
        )
        if stamped.rowcount != 1:
            raise StageClosed("the batch is no longer open: it expired, or was aborted")
        outcome = BatchOutcome(batch.answer | {"commit": values.get("commit")})
        remember(connection, batch, outcome)
        audit.done_all(connection, [(batch.act, _detail(batch, more.rows))])
    return outcome


def abort(database: Database, batch_id: int) -> None:
    """Abort an open batch: release its quota at once and delete its rows in short transactions."""
    with database.write() as connection:
        mark_aborted(connection, journal_batches.c.id == batch_id)
    purge(database, batch_id)


def mark_aborted(connection: Connection, *conditions: Any) -> list[int]:
    """Abort the matching open and staged batches, release their quota, and return their ids."""
    ended = connection.execute(
        update(journal_batches)
        .where(journal_batches.c.state.in_((OPEN, STAGED)), *conditions)
        .values(state=ABORTED)
        .returning(journal_batches.c.id, journal_batches.c.tenant, journal_batches.c.reserved)
    ).all()
    for row in ended:
        limits.release(connection, row.tenant, row.reserved)
    return [row.id for row in ended]


def purge(database: Database, batch_id: int) -> None:
    """Delete an aborted batch and its events in short transactions. Idempotent: resumes after a crash."""
    is_empty = False
    while not is_empty:
        with database.write() as connection:
            is_empty = not batch_contents.delete_some(connection, batch_id)
            if is_empty:
                own = (journal_batches.c.id == batch_id, journal_batches.c.state == ABORTED)
                connection.execute(delete(journal_batches).where(*own))


def segment_of(connection: Connection, dataset: Dataset, commit: int) -> int | None:
    """Return the segment of a commit; None if its batch was deleted, which means that a snapshot holds it."""
    return connection.execute(
        select(journal_batches.c.segment)
        .where(journal_batches.c.dataset_id == dataset.id, journal_batches.c.commit == commit)
        .limit(1)
    ).scalar()


# Stages and idempotency keys


def hold_stage(connection: Connection, settings: Settings, stage: int) -> None:
    """Renew the expiry of an open stage. Raises StageClosed if it is no longer open."""
    renewed = connection.execute(
        update(journal_batches)
        .where(journal_batches.c.id == stage, journal_batches.c.is_stage, journal_batches.c.state == OPEN)
        .values(expires=now() + timedelta(seconds=settings.stage_expiry))
    )
    if renewed.rowcount != 1:
        raise StageClosed("the stage is committed, aborted or expired")


def replay(connection: Connection, batch: Batch) -> BatchOutcome | None:
    """Return the stored response of the same earlier request, or None.

    Raises IdempotencyMismatch if a different request used the key.
    """
    stored = None if batch.once is None else idempotency.find(connection, batch.tenant, batch.once)
    return None if stored is None else BatchOutcome(stored.answer, replayed=True)


def remember(connection: Connection, batch: Batch, outcome: BatchOutcome) -> None:
    """Store the response in the transaction that writes the batch. Raises IdempotencyRace."""
    if batch.once is not None:
        idempotency.store(connection, batch.tenant, batch.once, 200, outcome.answer)


def _row(uid: str, batch: Batch, settings: Settings, moment: datetime) -> dict[str, Any]:
    return {
        "uid": uid,
        "dataset_id": batch.dataset.id,
        "tenant": batch.tenant,
        "origin": batch.origin,
        "is_stage": False,
        "stage": batch.stage,
        "metadata": {},
        "created": moment,
        "expires": _expiry(settings),
    }


def _expiry(settings: Settings) -> datetime:
    return now() + timedelta(seconds=settings.batch_expiry)


def _detail(batch: Batch, rows: int) -> dict[str, Any]:
    return {"rows": rows} | ({} if batch.origin is None else {"origin": batch.origin})
