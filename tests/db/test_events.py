"""The outbox: kept with its transaction, numbered in the order of commits, given up from its old end."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import insert, select, text, update
from tarn.db import jobs
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.db.outbox import RecordedEvent
from tarn.db.tables import datasets, event_heads, webhook_cursors
from tarn.db.tables import events as table
from tarn.db.tables import jobs as jobs_table
from tarn.model.event import EventKind
from tarn.model.ids import new_id, now
from tarn.model.job import JobState, Operation, Progress
from tarn.model.names import DatasetName

from tests.waiting import wait_until

PROBLEM = {"type": "t", "title": "t", "status": 503, "detail": "d", "instance": "i", "retryable": True}


def make_dataset(database: Database, name: str = "donations", state: str = "active") -> str:
    dataset_id = new_id()
    with database.write() as connection:
        connection.execute(insert(datasets).values(id=dataset_id, name=name, state=state, created=now(), revision=0))
        events.start_stream(connection, dataset_id, DatasetName(name))
    return dataset_id


@pytest.fixture
def stream(database: Database) -> str:
    return make_dataset(database)


def record(database: Database, stream: str, kind: EventKind = EventKind.DATASET_CREATED, **data: Any) -> None:
    with database.write() as connection:
        events.record(connection, stream, kind, **data)


def read_events(
    database: Database, stream: str, above: int = 0, limit: int = 1000, job: str | None = None
) -> list[Any]:
    with database.read() as connection:
        return [json.loads(each.body) for each in events.after(connection, stream, above, limit, job).told]


def kinds(database: Database, stream: str) -> list[str]:
    return [each["kind"] for each in read_events(database, stream)]


def numbers(database: Database, stream: str, above: int = 0) -> list[int]:
    return [each["id"] for each in read_events(database, stream, above)]


def test_event_is_there_exactly_if_its_transaction_is(database: Database, stream: str):
    record(database, stream)
    with pytest.raises(RuntimeError), database.write() as connection:
        events.record(connection, stream, EventKind.DATASET_DELETED)
        raise RuntimeError
    record(database, stream, EventKind.DATASET_DELETED)

    assert [(each["id"], each["kind"], each["dataset"]) for each in read_events(database, stream)] == [
        (1, "dataset.created", "donations"),
        (2, "dataset.deleted", "donations"),
    ]


@pytest.mark.parametrize("data", [{}, {"count": 1}, {"count": 1, "files": [{"id": "x"}]}])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_event_that_does_not_say_what_its_kind_does_is_refused_where_it_is_made(database: Database, stream: str, data):
    with pytest.raises(ValidationError), database.write() as connection:
        events.record(connection, stream, EventKind.FILES_PUT, **data)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_second_committer_waits_for_the_first_so_that_no_number_appears_below_one_that_was_seen(
    database: Database, stream: str
):
    first = RecordedEvent(stream, EventKind.DATASET_CREATED, None, None, {})
    second = threading.Thread(target=record, args=[database, stream])
    with database.engine.connect() as connection, connection.begin():
        events.number(connection, [first])
        second.start()
        wait_until(lambda: _waits(database))
        seen_meanwhile = numbers(database, stream)
    second.join(20)

    assert seen_meanwhile == []
    assert numbers(database, stream) == [1, 2]


def _waits(database: Database) -> bool:
    with database.read() as connection:
        return bool(connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar())


def test_reader_that_goes_on_from_the_last_number_it_saw_misses_none_of_many_writers(database: Database):
    streams = [make_dataset(database, f"d{number}") for number in range(2)]

    def write() -> None:
        for place in range(8):
            with database.write() as connection:
                # Both heads in one transaction, in either order: nobody may wait in a circle.
                for stream in streams[:: 1 if place % 2 else -1]:
                    events.record(connection, stream, EventKind.DATASET_CREATED)

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


def test_page_says_how_far_it_goes(database: Database, stream: str):
    for _ in range(3):
        record(database, stream)

    with database.read() as connection:
        cut, whole, none = (events.after(connection, stream, above, 2) for above in (0, 1, 3))

    assert [(len(page.told), page.through, page.last) for page in (cut, whole, none)] == [
        (2, 2, 3),
        (2, 3, 3),
        (0, 3, 3),
    ]


def test_events_are_given_up_from_the_old_end_by_age_and_by_number(database: Database, stream: str, monkeypatch):
    monkeypatch.setattr(events, "TRIM_EVENTS", 2)
    other = make_dataset(database, "other")
    for _ in range(6):
        record(database, stream)
    record(database, other)
    with database.write() as connection:
        connection.execute(update(table).where(table.c.number <= 3).values(at=now() - timedelta(days=9)))

    with database.read() as connection:
        by_age = events.expired_numbers(connection, now() - timedelta(days=7), most=100)
        by_number = events.expired_numbers(connection, now() - timedelta(days=70), most=2)
    with database.write() as connection:
        steps = [events.trim(connection, stream, by_number[stream]) for _ in range(2)]

    assert by_age == {stream: 3, other: 1}
    assert by_number == {stream: 4}
    assert steps == [True, False]
    with database.read() as connection:
        page = events.after(connection, stream, 0, 10)
    assert ([each.number for each in page.told], page.tail, page.last) == ([5, 6], 4, 6)


def test_numbers_of_a_dataset_made_again_go_on_above_those_of_the_former(database: Database):
    former = make_dataset(database, state="deleted")
    record(database, former)
    record(database, former)

    stream = make_dataset(database)
    record(database, stream)

    assert numbers(database, stream) == [3]
    with database.read() as connection:
        assert events.after(connection, stream, 2, 10).tail == 2


def test_job_tells_its_tenant_of_every_state_it_comes_to(database: Database, stream: str):
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

    found = read_events(database, stream, job=job.id)
    assert [each["kind"].removeprefix("job.") for each in found] == [
        "queued", "started", "queued", "started", "progress", "done",
    ]  # fmt: skip
    assert [each["attempts"] for each in found] == [0, 1, 1, 2, 2, 2]
    assert found[2]["problem"]["status"] == 503
    assert found[4]["progress"] == {"done": 1, "total": 2, "unit": "rows"}
    with database.read() as connection:
        heard = {each.audience for each in events.after(connection, stream, 0, 10).told}
    assert heard == {frozenset({"alice"})}


def test_job_that_is_cancelled_given_up_or_let_go_tells_so_once(database: Database, stream: str):
    with database.write() as connection:
        operations = Operation.VERIFY, Operation.VERIFY, Operation.COMPACT
        waiting, running, lost = (jobs.enqueue(connection, each, stream, "a", "r") for each in operations)
        jobs.cancel(connection, waiting.id)
        jobs.cancel(connection, waiting.id)
        taken = [jobs.claim(connection, "w", 30, among=[each]) for each in (Operation.VERIFY, Operation.COMPACT)]
        jobs.cancel(connection, running.id)
        silent = {"heartbeat": now() - timedelta(hours=1)}
        connection.execute(update(jobs_table).where(jobs_table.c.id == running.id).values(**silent))
        connection.execute(update(jobs_table).where(jobs_table.c.id == lost.id).values(**silent, attempts=20))
        jobs.claim(connection, "w", 30, among=[])

    assert {job and job.id for job in taken} == {running.id, lost.id}
    last = {job.id: read_events(database, stream, job=job.id)[-1]["kind"] for job in (waiting, running, lost)}
    assert last == {waiting.id: "job.cancelled", running.id: "job.cancelled", lost.id: "job.failed"}
    assert kinds(database, stream).count("job.cancelled") == 2


def test_job_on_several_datasets_has_a_stream_of_its_own_as_long_as_it_is_known(database: Database, stream: str):
    with database.write() as connection:
        job = jobs.enqueue(connection, Operation.FLUSH, None, "alice", "r", {"dataset_ids": [stream]})
        jobs.cancel(connection, job.id)
    with database.write() as connection:
        events.trim(connection, job.id, 2)
        events.forget_jobs(connection)
        kept = _heads(connection)
        jobs.delete_finished(connection, now() + timedelta(days=1))
        events.forget_jobs(connection)
        left = _heads(connection)

    assert read_events(database, stream) == []
    assert (kept, left) == ({stream, job.id}, {stream})
    assert job.state is JobState.QUEUED


def _heads(connection: Any) -> set[str]:
    assert connection.execute(select(webhook_cursors)).first() is None
    return set(connection.execute(select(event_heads.c.stream)).scalars())
