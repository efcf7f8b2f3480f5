"""Batches: what one request writes, made visible whole or not at all."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from tarn.access import audit, limits
from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.db import idempotency as answers
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey
from tarn.db.tables import journal, journal_batches
from tarn.errors import StageClosed
from tarn.journal import batch_contents as contents
from tarn.journal import head as heads
from tarn.journal.event_buffer import Chunk
from tarn.journal.formats.counting import require_equal
from tarn.model.ids import new_id, now
from tarn.model.names import TenantName
from tarn.settings import Settings

OPEN, STAGED, COMMITTED, ABORTED, DONE = "open", "staged", "committed", "aborted", "done"
"""A batch is done when a snapshot holds it; its rows are deleted soon after."""


class Overtaken(Exception):
    """Another request with the same idempotency key got between our look and our write: look again."""


@dataclass(slots=True)
class Batch:
    """Whose events these are, and what the request is answered with, besides the commit number."""

    dataset: Dataset
    tenant: TenantName
    act: AuditedAction
    origin: str | None = None
    stage: int | None = None
    once: IdempotencyKey | None = None
    rows: int | None = None
    """Events that the reader of its body gave, where there is one: as many must be in the batch when it commits."""
    answer: dict[str, Any] = field(default_factory=dict)


class BatchOutcome(NamedTuple):
    """The answer to a request, made now or replayed."""

    answer: dict[str, Any]
    replayed: bool = False


class BatchWithEvents(NamedTuple):
    """A batch with its events, on its way into a transaction."""

    batch: Batch
    events: Chunk


def write_small(connection: Connection, settings: Settings, group: list[BatchWithEvents]) -> list[BatchOutcome]:
    """Write small batches whole, all in the caller's one transaction.

    Raises Overtaken, or the error of any one of them: then none is written, and the caller tries them singly.
    """
    for batch, events in group:
        require_equal(len(events), batch.rows, "rows are in the batch", "were read")
    moment = now()
    replays = [replay(connection, sized.batch) for sized in group]
    fresh = [sized for sized, replayed in zip(group, replays, strict=True) if replayed is None]
    keys = [(batch.tenant, batch.once.key) for batch, _ in fresh if batch.once is not None]
    if len(keys) > len(set(keys)):
        raise Overtaken
    _reserve(connection, settings, fresh)
    commits = iter(_write(connection, settings, fresh, moment))
    outcomes = [BatchOutcome(sized.batch.answer | {"commit": next(commits)}) for sized in fresh]
    for sized, outcome in zip(fresh, outcomes, strict=True):
        remember(connection, sized.batch, outcome)
    audit.done_all(connection, [(batch.act, _detail(batch, len(events))) for batch, events in fresh])
    made = iter(outcomes)
    return [next(made) if replayed is None else replayed for replayed in replays]


def _reserve(connection: Connection, settings: Settings, fresh: list[BatchWithEvents]) -> None:
    by_tenant: dict[TenantName, int] = defaultdict(int)
    for batch, events in fresh:
        by_tenant[batch.tenant] += events.statements
    for tenant in sorted(by_tenant):
        limits.reserve(connection, tenant, settings, statements=by_tenant[tenant])


def _write(
    connection: Connection, settings: Settings, fresh: list[BatchWithEvents], moment: datetime
) -> list[int | None]:
    """Rows and batch rows, with commit numbers where there is no stage to wait for."""
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
        more = heads.AddedSize.of(fresh[number].events for number in numbers)
        taken = heads.take(connection, dataset, len(numbers), more, moment, within=settings)
        stamps |= {number: (taken.first + place, taken.segment) for place, number in enumerate(numbers)}
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
        made = connection.execute(
            insert(journal_batches).returning(journal_batches.c.uid, journal_batches.c.id), values
        )
        ids = {row.uid: row.id for row in made}
        rows_of = [row for uid, (_, events) in zip(uids, fresh, strict=True) for row in events.rows(ids[uid])]
        if rows_of:
            connection.execute(insert(journal), rows_of)
    return [stamps[number][0] if number in stamps else None for number in range(len(fresh))]


# Large batches: opened, filled chunk by chunk, and committed or aborted


def open_large(database: Database, settings: Settings, batch: Batch, first: Chunk) -> int:
    """Make a batch that is filled in many transactions; until it commits nobody sees its rows.

    Its first chunk is counted at once. Raises Backpressure, QuotaExceeded, StageClosed.
    """
    moment = now()
    with database.write() as connection:
        heads.check_pressure(connection, batch.dataset, settings)
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
        made: int = connection.execute(
            insert(journal_batches).values(**values).returning(journal_batches.c.id)
        ).scalar_one()
    return made


def count_chunk(database: Database, settings: Settings, batch: Batch, batch_id: int, events: Chunk) -> None:
    """Take a chunk's statements from the quota, in the batch's name. Raises QuotaExceeded, StageClosed."""
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
    """Make a large batch visible in one transaction, which writes one row of it, however many it has.

    Raises Overtaken, and StageClosed if it expired meanwhile.
    """
    moment = now()
    with database.write() as connection:
        if (before := replay(connection, batch)) is not None:
            return before
        row = connection.execute(
            select(journal_batches.c.rows, journal_batches.c.size).where(journal_batches.c.id == batch_id)
        ).first()
        more = heads.AddedSize(0, 0) if row is None else heads.AddedSize(row.rows, row.size)
        if row is not None:
            require_equal(row.rows, batch.rows, "rows are in the batch", "were read")
        if batch.stage is None:
            taken = heads.take(connection, batch.dataset, 1, more, moment)
            values: dict[str, Any] = {"state": COMMITTED, "commit": taken.first, "segment": taken.segment}
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
    """End an open batch: its quota is given back at once, its rows go in small steps."""
    with database.write() as connection:
        mark_aborted(connection, journal_batches.c.id == batch_id)
    purge(database, batch_id)


def mark_aborted(connection: Connection, *which: Any) -> list[int]:
    """Abort the open and staged batches that match, give their quota back, and return their ids."""
    ended = connection.execute(
        update(journal_batches)
        .where(journal_batches.c.state.in_((OPEN, STAGED)), *which)
        .values(state=ABORTED)
        .returning(journal_batches.c.id, journal_batches.c.tenant, journal_batches.c.reserved)
    ).all()
    for row in ended:
        limits.release(connection, row.tenant, row.reserved)
    return [row.id for row in ended]


def purge(database: Database, batch_id: int) -> None:
    """Delete what an aborted batch left, in short transactions. Run again after a crash it goes on where it was."""
    gone = False
    while not gone:
        with database.write() as connection:
            gone = not contents.delete_some(connection, batch_id)
            if gone:
                own = (journal_batches.c.id == batch_id, journal_batches.c.state == ABORTED)
                connection.execute(delete(journal_batches).where(*own))


def segment_of(connection: Connection, dataset: Dataset, commit: int) -> int | None:
    """The segment that a commit is in; None if it is not known any more, which means that a snapshot holds it."""
    return connection.execute(
        select(journal_batches.c.segment)
        .where(journal_batches.c.dataset_id == dataset.id, journal_batches.c.commit == commit)
        .limit(1)
    ).scalar()


# Stages and keys


def hold_stage(connection: Connection, settings: Settings, stage: int) -> None:
    """Renew an open stage. Raises StageClosed if it is not open any more."""
    held = connection.execute(
        update(journal_batches)
        .where(journal_batches.c.id == stage, journal_batches.c.is_stage, journal_batches.c.state == OPEN)
        .values(expires=now() + timedelta(seconds=settings.stage_expiry))
    )
    if held.rowcount != 1:
        raise StageClosed("the stage is committed, aborted or expired")


def replay(connection: Connection, batch: Batch) -> BatchOutcome | None:
    """The answer that the same request got before. Raises IdempotencyMismatch if another one used the key."""
    kept = None if batch.once is None else answers.find(connection, batch.tenant, batch.once)
    return None if kept is None else BatchOutcome(kept.answer, replayed=True)


def remember(connection: Connection, batch: Batch, outcome: BatchOutcome) -> None:
    """Keep the answer in the transaction that it speaks of. Raises Overtaken if another one has the key by now."""
    if batch.once is not None and not answers._insert(connection, batch.tenant, batch.once, 200, outcome.answer):
        raise Overtaken


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
