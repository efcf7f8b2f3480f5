"""The outbox of events: written with its transaction, numbered in commit order, expired oldest first."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import insert, select, text, update
from tarn.db import jobs, outbox
from tarn.db.engine import Database
from tarn.db.outbox import RecordedEvent
from tarn.db.tables import datasets, event_heads, webhook_cursors
from tarn.db.tables import events as table
from tarn.db.tables import jobs as jobs_table
from tarn.model.ids import new_id, now
from tarn.model.names import DatasetName
from tarn.model.work.event import EventKind
from tarn.model.work.job import JobState, Operation, Progress

from tests.waiting import wait_until

pytestmark = pytest.mark.both_databases

PROBLEM = {"type": "t", "title": "t", "status": 503, "detail": "d", "instance": "i", "retryable": True}


def make_dataset(database: Database, name: str = "donations", state: str = "active") -> str:
    dataset_id = new_id()
    with database.write() as connection:
        connection.execute(insert(datasets).values(id=dataset_id, name=name, state=state, created=now(), revision=0))
        outbox.start_stream(connection, dataset_id, DatasetName(name))
    return dataset_id


@pytest.fixture
def stream(database: Database) -> str:
    return make_dataset(database)


def record(database: Database, stream: str, kind: EventKind = EventKind.DATASET_CREATED, **data: Any) -> None:
    with database.write() as connection:
        outbox.record(connection, stream, kind, **data)


def read_events(
    database: Database, stream: str, above: int = 0, limit: int = 1000, job: str | None = None
) -> list[Any]:
    with database.read() as connection:
        return [json.loads(each.body) for each in outbox.after(connection, stream, above, limit, job).events]


def kinds(database: Database, stream: str) -> list[str]:
    return [each["kind"] for each in read_events(database, stream)]


def numbers(database: Database, stream: str, above: int = 0) -> list[int]:
    return [each["id"] for each in read_events(database, stream, above)]


def test_event_exists_exactly_if_its_transaction_was_committed(database: Database, stream: str):
    record(database, stream)
    with pytest.raises(RuntimeError), database.write() as connection:
        outbox.record(connection, stream, EventKind.DATASET_DELETED)
        raise RuntimeError
    record(database, stream, EventKind.DATASET_DELETED)

    assert [(each["id"], each["kind"], each["dataset"]) for each in read_events(database, stream)] == [
        (1, "dataset.created", "donations"),
        (2, "dataset.deleted", "donations"),
    ]


@pytest.mark.parametrize("data", [{}, {"count": 1}, {"count": 1, "files": [{"id": "x"}]}])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_event_without_the_data_of_its_kind_is_refused_when_it_is_recorded(database: Database, stream: str, data):
    with pytest.raises(ValidationError), database.write() as connection:
        outbox.record(connection, stream, EventKind.FILES_PUT, **data)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_second_committer_waits_so_that_no_number_appears_below_a_visible_one(database: Database, stream: str):
    first = RecordedEvent(stream, EventKind.DATASET_CREATED, None, None, {})
    second = threading.Thread(target=record, args=[database, stream])
    with database.engine.connect() as connection, connection.begin():
        outbox.number(connection, [first])
        second.start()
        wait_until(lambda: _waits(database))
        seen_meanwhile = numbers(database, stream)
    second.join(20)

    assert seen_meanwhile == []
    assert numbers(database, stream) == [1, 2]


def _waits(database: Database) -> bool:
    with database.read() as connection:
        return bool(connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar())


def test_reader_that_continues_from_its_last_number_misses_no_event_of_concurrent_writers(database: Database):
    streams = [make_dataset(database, f"d{number}") for number in range(2)]

    def write() -> None:
        for place in range(8):
            with database.write() as connection:
                # Both heads in one transaction, in either order: writers must not deadlock.
                for stream in streams[:: 1 if place % 2 else -1]:
                    outbox.record(connection, stream, EventKind.DATASET_CREATED)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    seen: list[int] = []

    def has_seen_all() -> bool:
        seen.extend(numbers(database, streams[0], seen[-1] if seen else 0))
        return len(seen) == 32

    wait_until(has_seen_all)
    for writer in writers:
        writer.join(20)

    assert seen == list(range(1, 33))
    assert numbers(database, streams[1]) == seen


def test_page_has_the_number_up_to_which_it_is_complete(database: Database, stream: str):
    for _ in range(3):
        record(database, stream)

    with database.read() as connection:
        partial, complete, none = (outbox.after(connection, stream, above, 2) for above in (0, 1, 3))

    assert [(len(page.events), page.through, page.last) for page in (partial, complete, none)] == [
        (2, 2, 3),
        (2, 3, 3),
        (0, 3, 3),
    ]


def test_events_are_expired_oldest_first_by_age_and_by_number(database: Database, stream: str, monkeypatch):
    monkeypatch.setattr(outbox, "TRIM_EVENTS", 2)
    other = make_dataset(database, "other")
    for _ in range(6):
        record(database, stream)
    record(database, other)
    with database.write() as connection:
        connection.execute(update(table).where(table.c.number <= 3).values(at=now() - timedelta(days=9)))

    with database.read() as connection:
        by_age = outbox.expired_numbers(connection, now() - timedelta(days=7), max_events=100)
        by_number = outbox.expired_numbers(connection, now() - timedelta(days=70), max_events=2)
    with database.write() as connection:
        steps = [outbox.trim(connection, stream, by_number[stream]) for _ in range(2)]

    assert by_age == {stream: 3, other: 1}
    assert by_number == {stream: 4}
    assert steps == [True, False]
    with database.read() as connection:
        page = outbox.after(connection, stream, 0, 10)
    assert ([each.number for each in page.events], page.tail, page.last) == ([5, 6], 4, 6)


def test_numbers_of_a_recreated_dataset_continue_above_those_of_the_former(database: Database):
    former = make_dataset(database, state="deleted")
    record(database, former)
    record(database, former)

    stream = make_dataset(database)
    record(database, stream)

    assert numbers(database, stream) == [3]
    with database.read() as connection:
        assert outbox.after(connection, stream, 2, 10).tail == 2


def test_every_state_of_a_job_is_an_event_for_its_tenant(database: Database, stream: str):
    with database.write() as connection:
        job = jobs.enqueue(connection, Operation.FLUSH, stream, "alice", "r")
    with database.write() as connection:
        jobs.claim(connection, "w", 30, among=[Operation.FLUSH])
    with database.write() as connection:
        jobs.fail(connection, job.id, "w", PROBLEM, now() - timedelta(seconds=1))
    with database.write() as connection:
        jobs.claim_all(connection, "w", Operation.FLUSH, 30)
    with database.write() as connection:
        jobs.beat(connection, job.id, "w", Progress(done=1, total=2, unit="rows"))
        jobs.beat(connection, job.id, "w", Progress(done=2, total=2, unit="rows"))
    with database.write() as connection:
        jobs.finish(connection, job.id, "w", {"statements": 1, "snapshots": []})

    events = read_events(database, stream, job=job.id)
    assert [each["kind"].removeprefix("job.") for each in events] == [
        "queued", "started", "queued", "started", "progress", "done",
    ]  # fmt: skip
    assert [each["attempts"] for each in events] == [0, 1, 1, 2, 2, 2]
    assert events[2]["problem"]["status"] == 503
    assert events[4]["progress"] == {"done": 1, "total": 2, "unit": "rows"}
    with database.read() as connection:
        heard = {each.audience for each in outbox.after(connection, stream, 0, 10).events}
    assert heard == {frozenset({"alice"})}


def test_job_that_is_cancelled_failed_or_released_has_one_event(database: Database, stream: str):
    with database.write() as connection:
        operations = Operation.VERIFY, Operation.VERIFY, Operation.COMPACT
        waiting, running, lost = (jobs.enqueue(connection, each, stream, "a", "r") for each in operations)
        jobs.cancel(connection, waiting.id)
        jobs.cancel(connection, waiting.id)
        claimed = [jobs.claim(connection, "w", 30, among=[each]) for each in (Operation.VERIFY, Operation.COMPACT)]
        jobs.cancel(connection, running.id)
        expired = {"heartbeat": now() - timedelta(hours=1)}
        connection.execute(update(jobs_table).where(jobs_table.c.id == running.id).values(**expired))
        connection.execute(update(jobs_table).where(jobs_table.c.id == lost.id).values(**expired, attempts=20))
        jobs.claim(connection, "w", 30, among=[])

    assert {job and job.id for job in claimed} == {running.id, lost.id}
    last = {job.id: read_events(database, stream, job=job.id)[-1]["kind"] for job in (waiting, running, lost)}
    assert last == {waiting.id: "job.cancelled", running.id: "job.cancelled", lost.id: "job.failed"}
    assert kinds(database, stream).count("job.cancelled") == 2


def test_job_on_several_datasets_has_its_own_stream_while_it_exists(database: Database, stream: str):
    with database.write() as connection:
        job = jobs.enqueue(connection, Operation.FLUSH, None, "alice", "r", {"dataset_ids": [stream]})
        jobs.cancel(connection, job.id)
    with database.write() as connection:
        outbox.trim(connection, job.id, 2)
        outbox.forget_jobs(connection)
        before = _heads(connection)
        jobs.delete_finished(connection, now() + timedelta(days=1))
        outbox.forget_jobs(connection)
        after = _heads(connection)

    assert read_events(database, stream) == []
    assert (before, after) == ({stream, job.id}, {stream})
    assert job.state is JobState.QUEUED


def _heads(connection: Any) -> set[str]:
    assert connection.execute(select(webhook_cursors)).first() is None
    return set(connection.execute(select(event_heads.c.stream)).scalars())
