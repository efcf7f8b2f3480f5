"""The outbox: what happened, told in the transaction in which it does.

    record      an event is kept with its transaction, and in no other way
    number      right before the transaction commits, its streams' heads are raised by an update, in the order of their
                names, and its events written under the numbers that this gives
    read        whatever is above the last number that a reader has

Who raises a head holds its row to the end of its transaction, and the next one to raise it waits: so numbers of one
stream become visible in their order, and a reader that has seen one has seen, or can still see, every lower one. (A
sequence would give a number to a transaction that commits after one with a higher number, and a reader would have
passed it by.) The heads are the last locks that a transaction takes: nobody who holds one waits for anything but
another head, in the one order that there is.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from tarn.db.tables import datasets, event_heads, events, jobs, webhook_cursors
from tarn.db.upsert import upsert
from tarn.model.event import EventKind, checked
from tarn.model.ids import now

RECORDED = "tarn_events"
"""The option of a connection that holds what was recorded in its transaction."""

KNOWN_KINDS = frozenset(EventKind)

TRIM_EVENTS = 2000
"""Events that one transaction gives up at most."""


class RecordedEvent(NamedTuple):
    """An event that has no number yet."""

    stream: str
    kind: EventKind
    job: str | None
    audience: list[str] | None
    data: dict[str, Any]


class OutboxEvent(NamedTuple):
    """An event as its row has it."""

    stream: str
    number: int
    kind: EventKind
    dataset: str | None
    job: str | None
    audience: frozenset[str] | None
    """Tenants that may see it; None: whoever may read the dataset."""
    body: bytes
    """The whole event as JSON, on one line."""


class Page(NamedTuple):
    """Events of a stream, and how far they go."""

    told: list[OutboxEvent]
    through: int
    """Up to this number there is nothing else."""
    tail: int
    """Up to this number nothing is kept any more."""
    last: int
    """The last number given out."""


def record(
    connection: Connection,
    stream: str,
    kind: EventKind,
    *,
    audience: Collection[str] | None = None,
    of_job: str | None = None,
    **data: Any,
) -> None:
    """Tell of something in the caller's transaction, which is one of `Database.write`.

    `stream` is the dataset's id. With an `audience` only these tenants hear it, besides the lake's administrator, and
    of them those that may read the dataset.
    """
    heard = None if audience is None else sorted(audience)
    recorded: list[RecordedEvent] = connection.get_execution_options()[RECORDED]
    recorded.append(RecordedEvent(stream, kind, of_job, heard, checked(kind, data)))


def number(connection: Connection, recorded: Iterable[RecordedEvent]) -> None:
    """Write what was recorded, as the last thing that a transaction does."""
    by_stream: dict[str, list[RecordedEvent]] = {}
    for each in recorded:
        by_stream.setdefault(each.stream, []).append(each)
    moment = now()
    for stream, found in sorted(by_stream.items()):
        head = upsert(connection, event_heads).values(stream=stream, last=len(found), tail=0)
        raised = head.on_conflict_do_update(
            index_elements=["stream"], set_={"last": event_heads.c.last + len(found)}
        ).returning(event_heads.c.last)
        first = connection.execute(raised).scalar_one() - len(found) + 1
        rows = [
            {
                "stream": stream,
                "number": first + place,
                "kind": each.kind,
                "at": moment,
                "job": each.job,
                "audience": each.audience,
                "data": each.data,
            }
            for place, each in enumerate(found)
        ]
        connection.execute(insert(events), rows)


def start_stream(connection: Connection, dataset_id: str, name: str) -> None:
    """Let the numbers of a new dataset go on above those of the ones that had its name: who has heard of those must
    not take its first events for heard."""
    former = (
        select(func.max(event_heads.c.last))
        .join(datasets, datasets.c.id == event_heads.c.stream)
        .where(datasets.c.name == name, datasets.c.id != dataset_id)
    )
    last: int = connection.execute(former).scalar() or 0
    connection.execute(insert(event_heads).values(stream=dataset_id, last=last, tail=last))


def heads(connection: Connection, streams: Collection[str]) -> dict[str, int]:
    """The last numbers of these streams, as far as they have any."""
    found = select(event_heads.c.stream, event_heads.c.last).where(event_heads.c.stream.in_(streams))
    return {row.stream: row.last for row in connection.execute(found)}


def after(connection: Connection, stream: str, above: int, limit: int, job: str | None = None) -> Page:
    """Events above a number, of one job or of all, in the caller's view of one moment.

    They end before the first one that only a newer version knows: whoever asks a process of that one goes on there.
    """
    head = connection.execute(select(event_heads).where(event_heads.c.stream == stream)).first()
    if head is None:
        return Page([], 0, 0, 0)
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
    told = [_event(row) for row in takewhile(lambda row: row.kind in KNOWN_KINDS, rows)]
    if len(told) < len(rows):
        through = rows[len(told)].number - 1
    else:
        through = told[-1].number if len(told) == limit else head.last
    return Page(told, through, head.tail, head.last)


def missed(page: Page, stream: str, dataset: str | None, heard: int) -> OutboxEvent:
    """The event that says that some are not kept any more."""
    said = {"after": heard, "first": page.tail + 1}
    body = _body(page.tail, stream, EventKind.MISSED, dataset, now(), said)
    return OutboxEvent(stream, page.tail, EventKind.MISSED, dataset, None, None, body)


# Retention


def expired_numbers(connection: Connection, before: datetime, most: int) -> dict[str, int]:
    """By stream, the number up to which events are older than a moment, or more than are kept."""
    old = select(events.c.stream, func.max(events.c.number)).where(events.c.at < before).group_by(events.c.stream)
    many = select(event_heads.c.stream, event_heads.c.last - most).where(event_heads.c.last - event_heads.c.tail > most)
    found: dict[str, int] = {}
    for query in (old, many):
        for stream, number in connection.execute(query):
            found[stream] = max(number, found.get(stream, 0))
    return found


def trim(connection: Connection, stream: str, to: int) -> bool:
    """Give up some of a stream's oldest events, up to a number. True if there are more of them."""
    tail: int = connection.execute(select(event_heads.c.tail).where(event_heads.c.stream == stream)).scalar_one()
    until = min(to, tail + TRIM_EVENTS)
    lower = event_heads.c.stream == stream, event_heads.c.tail < until
    connection.execute(update(event_heads).where(*lower).values(tail=until))
    connection.execute(delete(events).where(events.c.stream == stream, events.c.number <= until))
    return until < to


def forget_jobs(connection: Connection) -> None:
    """Forget the streams of jobs that are forgotten, once nothing of them is kept."""
    known = select(datasets.c.id).where(datasets.c.id == event_heads.c.stream).exists()
    kept = select(jobs.c.id).where(jobs.c.id == event_heads.c.stream).exists()
    over = event_heads.c.tail == event_heads.c.last
    connection.execute(delete(event_heads).where(over, ~known, ~kept))
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
    told = {"id": number, "stream": stream, "kind": str(kind), "dataset": dataset, "at": at, **data}
    return orjson.dumps(told, option=orjson.OPT_UTC_Z)
