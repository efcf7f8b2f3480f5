"""Transactional outbox: events are written in the transaction that makes the change, numbered per stream.

    record      collect an event in the transaction; it is committed or rolled back with it
    number      right before the commit, update the heads of the transaction's streams in the order of their names, and
                write the events under the numbers that this allocates
    read        return the events above the reader's last number

The update of a head locks its row until the end of the transaction, and the next writer waits: numbers of one stream
become visible in order, and a reader that has seen one has seen, or can still see, every lower one. (With a sequence, a
transaction could commit after one with a higher number, and a reader would skip its events.) The heads are the last
locks that a transaction takes, always in the same order, so they cannot deadlock.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from tarn.db.notifications import EVENTS, job_topic, snapshot_topic
from tarn.db.tables import datasets, event_heads, events, jobs, webhook_cursors
from tarn.db.upsert import upsert
from tarn.model.ids import now
from tarn.model.work.event import EventKind, checked

RECORDED = "tarn_events"
"""The connection's execution option that holds the events of its transaction."""

KNOWN_KINDS = frozenset(EventKind)

TRIM_EVENTS = 2000
"""Maximum number of events that one transaction deletes."""


class RecordedEvent(NamedTuple):
    """An event without a number."""

    stream: str
    kind: EventKind
    job: str | None
    audience: list[str] | None
    data: dict[str, Any]


class OutboxEvent(NamedTuple):
    """A numbered event, as stored in its row."""

    stream: str
    number: int
    kind: EventKind
    dataset: str | None
    job: str | None
    audience: frozenset[str] | None
    """Tenants that may see it; None: all that may read the dataset."""
    body: bytes
    """The whole event as JSON, on one line."""


class OutboxPage(NamedTuple):
    """A page of a stream's events."""

    events: list[OutboxEvent]
    through: int
    """There are no further matching events up to this number."""
    tail: int
    """Events up to this number are deleted."""
    last: int
    """The last number that was allocated."""


def record(
    connection: Connection,
    stream: str,
    kind: EventKind,
    *,
    audience: Collection[str] | None = None,
    of_job: str | None = None,
    **data: Any,
) -> None:
    """Record an event in the caller's transaction, which must come from `Database.write`.

    `stream` is the dataset's id. With an `audience`, only those of these tenants that may read the dataset see it, and
    the lake's administrator.
    """
    tenants = None if audience is None else sorted(audience)
    recorded: list[RecordedEvent] = connection.get_execution_options()[RECORDED]
    recorded.append(RecordedEvent(stream, kind, of_job, tenants, checked(kind, data)))


def number(connection: Connection, recorded: Iterable[RecordedEvent]) -> None:
    """Number and write the recorded events, as the last step of a transaction."""
    by_stream: dict[str, list[RecordedEvent]] = {}
    for each in recorded:
        by_stream.setdefault(each.stream, []).append(each)
    moment = now()
    for stream, new in sorted(by_stream.items()):
        head = upsert(connection, event_heads).values(stream=stream, last=len(new), tail=0)
        allocated = head.on_conflict_do_update(
            index_elements=["stream"], set_={"last": event_heads.c.last + len(new)}
        ).returning(event_heads.c.last)
        first = connection.execute(allocated).scalar_one() - len(new) + 1
        rows = [
            {
                "stream": stream,
                "number": first + offset,
                "kind": each.kind,
                "at": moment,
                "job": each.job,
                "audience": each.audience,
                "data": each.data,
            }
            for offset, each in enumerate(new)
        ]
        connection.execute(insert(events), rows)


def topics(recorded: Iterable[RecordedEvent]) -> set[str]:
    """Return the notification topics of the recorded events: their kinds, new snapshots, and new states of jobs."""
    named: set[str] = set()
    for each in recorded:
        named |= {EVENTS, each.kind}
        if each.kind is EventKind.SNAPSHOT_PUBLISHED:
            named.add(snapshot_topic(each.stream))
        if each.job is not None and each.kind is not EventKind.JOB_PROGRESS:
            named.add(job_topic(each.job))
    return named


def start_stream(connection: Connection, dataset_id: str, name: str) -> None:
    """Start a new dataset's numbers above those of former datasets of its name.

    Otherwise a reader of the former one would take the first events for events that it has already seen.
    """
    former = (
        select(func.max(event_heads.c.last))
        .join(datasets, datasets.c.id == event_heads.c.stream)
        .where(datasets.c.name == name, datasets.c.id != dataset_id)
    )
    last: int = connection.execute(former).scalar() or 0
    connection.execute(insert(event_heads).values(stream=dataset_id, last=last, tail=last))


def heads(connection: Connection, streams: Collection[str]) -> dict[str, int]:
    """Return the last number of each of these streams that has one."""
    query = select(event_heads.c.stream, event_heads.c.last).where(event_heads.c.stream.in_(streams))
    return {row.stream: row.last for row in connection.execute(query)}


def after(connection: Connection, stream: str, above: int, limit: int, job: str | None = None) -> OutboxPage:
    """Return the events above a number, of one job or of all, in the caller's read transaction.

    The page ends before the first event of a kind that only a newer version knows: a process of that version returns
    it.
    """
    head = connection.execute(select(event_heads).where(event_heads.c.stream == stream)).first()
    if head is None:
        return OutboxPage([], 0, 0, 0)
    query = (
        select(events, datasets.c.name.label("dataset"))
        .outerjoin(datasets, datasets.c.id == events.c.stream)
        .where(events.c.stream == stream, events.c.number > above)
        .order_by(events.c.number)
        .limit(limit)
    )
    if job is not None:
        query = query.where(events.c.job == job)
    rows = connection.execute(query).all()
    page_events = [_event(row) for row in takewhile(lambda row: row.kind in KNOWN_KINDS, rows)]
    if len(page_events) < len(rows):
        through = rows[len(page_events)].number - 1
    else:
        through = page_events[-1].number if len(page_events) == limit else head.last
    return OutboxPage(page_events, through, head.tail, head.last)


def missed(page: OutboxPage, stream: str, dataset: str | None, last_read: int) -> OutboxEvent:
    """Return the event that reports that some events were deleted before they were read."""
    data = {"after": last_read, "first": page.tail + 1}
    body = _body(page.tail, stream, EventKind.MISSED, dataset, now(), data)
    return OutboxEvent(stream, page.tail, EventKind.MISSED, dataset, None, None, body)


# Retention


def expired_numbers(connection: Connection, before: datetime, max_events: int) -> dict[str, int]:
    """Return, by stream, the number up to which events are older than `before` or exceed `max_events`."""
    old = select(events.c.stream, func.max(events.c.number)).where(events.c.at < before).group_by(events.c.stream)
    many = select(event_heads.c.stream, event_heads.c.last - max_events).where(
        event_heads.c.last - event_heads.c.tail > max_events
    )
    numbers: dict[str, int] = {}
    for query in (old, many):
        for stream, number in connection.execute(query):
            numbers[stream] = max(number, numbers.get(stream, 0))
    return numbers


def trim(connection: Connection, stream: str, to: int) -> bool:
    """Delete some of a stream's oldest events, up to a number. Returns True if more remain to be deleted."""
    tail: int = connection.execute(select(event_heads.c.tail).where(event_heads.c.stream == stream)).scalar_one()
    until = min(to, tail + TRIM_EVENTS)
    lower = event_heads.c.stream == stream, event_heads.c.tail < until
    connection.execute(update(event_heads).where(*lower).values(tail=until))
    connection.execute(delete(events).where(events.c.stream == stream, events.c.number <= until))
    return until < to


def forget_jobs(connection: Connection) -> None:
    """Delete the stream heads of deleted jobs that have no events left, and the webhook cursors of deleted streams."""
    known = select(datasets.c.id).where(datasets.c.id == event_heads.c.stream).exists()
    has_job = select(jobs.c.id).where(jobs.c.id == event_heads.c.stream).exists()
    over = event_heads.c.tail == event_heads.c.last
    connection.execute(delete(event_heads).where(over, ~known, ~has_job))
    followed = select(event_heads.c.stream).where(event_heads.c.stream == webhook_cursors.c.stream).exists()
    connection.execute(delete(webhook_cursors).where(~followed))


def _event(row: Row[Any]) -> OutboxEvent:
    return OutboxEvent(
        row.stream,
        row.number,
        EventKind(row.kind),
        row.dataset,
        row.job,
        None if row.audience is None else frozenset(row.audience),
        _body(row.number, row.stream, row.kind, row.dataset, row.at, row.data),
    )


def _body(number: int, stream: str, kind: str, dataset: str | None, at: datetime, data: dict[str, Any]) -> bytes:
    document = {"id": number, "stream": stream, "kind": str(kind), "dataset": dataset, "at": at, **data}
    return orjson.dumps(document, option=orjson.OPT_UTC_Z)
