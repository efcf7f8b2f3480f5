"""The jobs table: each job is claimed once, kept by heartbeats, and taken over when they stop."""

import threading
from datetime import timedelta

import pytest
from alembic import command
from sqlalchemy import insert, text, update
from tarn.db import jobs, migrate
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import datasets
from tarn.db.tables import jobs as table
from tarn.errors import JobConflict, JobNotFound, Unavailable
from tarn.model.ids import new_id, now
from tarn.model.work.job import LONG_WAIT, MOST_ATTEMPTS, DeleteResult, FlushResult, Job, JobState, Operation, Progress

pytestmark = pytest.mark.both_databases


@pytest.fixture
def dataset_id(database: Database) -> str:
    dataset_id = new_id()
    with database.write() as connection:
        connection.execute(
            insert(datasets).values(id=dataset_id, name="donations", state="active", created=now(), revision=0)
        )
    return dataset_id


def enqueue(database: Database, dataset_id: str | None, operation: Operation = Operation.DELETE, **arguments) -> Job:
    with database.write() as connection:
        return jobs.enqueue(connection, operation, dataset_id, "alice", "request-1", arguments)


def claim(database: Database, worker: str, among: tuple[Operation, ...] = tuple(Operation)) -> Job | None:
    with database.write() as connection:
        return jobs.claim(connection, worker, silent_after=30, among=among)


def claim_all(database: Database, worker: str) -> list[Job]:
    with database.write() as connection:
        return jobs.claim_all(connection, worker, Operation.FLUSH, silent_after=30)


def show(database: Database, job: Job) -> Job:
    with database.read() as connection:
        return jobs.get(connection, job.id)


def test_oldest_job_is_claimed_first_and_only_once(database: Database):
    first, second = enqueue(database, None), enqueue(database, None)

    claimed = [claim(database, worker) for worker in ("w1", "w2", "w3")]

    assert [job and job.id for job in claimed] == [first.id, second.id, None]
    assert claimed[0] is not None
    assert (claimed[0].state, claimed[0].attempts) == (JobState.RUNNING, 1)


def test_concurrent_workers_claim_each_job_once(database: Database):
    ids = {enqueue(database, None).id for _ in range(10)}
    claimed: list[str] = []

    def work(worker: str) -> None:
        while (job := claim(database, worker)) is not None:
            claimed.append(job.id)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while (job := claim(database, "late")) is not None:
        claimed.append(job.id)

    assert sorted(claimed) == sorted(ids)


def test_job_of_a_worker_without_heartbeat_is_taken_over_and_the_old_one_cannot_finish_it(
    database: Database, dataset_id: str
):
    job = enqueue(database, dataset_id)
    claim(database, "dead")
    with database.write() as connection:
        connection.execute(update(table).values(heartbeat=now() - timedelta(minutes=1)))

    taken_over = claim(database, "alive")
    with database.write() as connection:
        late = [
            jobs.beat(connection, job.id, "dead", None),
            jobs.finish(connection, job.id, "dead", {}),
            jobs.fail(connection, job.id, "dead", {}, None),
        ]
        finished = jobs.finish(connection, job.id, "alive", {"files": 1})

    assert taken_over is not None
    assert taken_over.attempts == 2
    assert taken_over.disturbed is not None
    assert late == [False, False, False]
    assert finished


def test_job_with_a_heartbeat_is_not_taken_over(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    with database.write() as connection:
        connection.execute(update(table).values(heartbeat=now() - timedelta(minutes=1)))
        jobs.beat(connection, job.id, "w1", Progress(done=5, total=10, unit="files"))

    assert claim(database, "w2") is None
    with database.read() as connection:
        stored = jobs.find(connection, job.id)
    assert stored is not None
    assert stored.progress == Progress(done=5, total=10, unit="files")


def test_released_job_is_queued_again(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    with database.write() as connection:
        jobs.requeue(connection, job.id, "w1")

    again = claim(database, "w2")

    assert again is not None
    assert (again.id, again.attempts, again.disturbed) == (job.id, 2, None)


def test_job_to_be_retried_is_claimed_at_its_time_and_not_before(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    with database.write() as connection:
        jobs.fail(connection, job.id, "w1", PROBLEM, now() + timedelta(minutes=1))

    early = claim(database, "w2")
    with database.write() as connection:
        connection.execute(update(table).values(not_before=now()))
    again = claim(database, "w2")
    with database.write() as connection:
        jobs.finish(connection, job.id, "w2", {"files": 0})
        done = jobs.find(connection, job.id)

    assert early is None
    assert again is not None
    assert done is not None
    assert again.problem is not None
    assert again.disturbed is not None
    assert (done.state, done.problem, done.not_before) == (JobState.DONE, None, None)


@pytest.mark.parametrize("hours", [-1, 1])
@pytest.mark.parametrize("is_failed", [True, False])
def test_wait_of_a_job_does_not_depend_on_the_worker_s_clock(
    database: Database, dataset_id: str, monkeypatch: pytest.MonkeyPatch, hours: int, is_failed: bool
):
    skew = timedelta(hours=hours)
    monkeypatch.setattr(jobs, "now", lambda: now() + skew)
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    until = now() + skew + timedelta(minutes=1)
    with database.write() as connection:
        if is_failed:
            jobs.fail(connection, job.id, "w1", PROBLEM, until)
        else:
            jobs.requeue(connection, job.id, "w1", until)
        not_before, moment = jobs.get(connection, job.id).not_before, database_time(connection)

    assert claim(database, "w2") is None
    assert not_before is not None
    assert timedelta(seconds=50) < not_before - moment <= timedelta(minutes=1)


def test_times_of_a_job_are_in_order_whatever_the_clocks_of_its_processes(
    database: Database, dataset_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jobs, "now", lambda: now() + timedelta(hours=1))
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    monkeypatch.setattr(jobs, "now", lambda: now() - timedelta(hours=1))
    with database.write() as connection:
        jobs.finish(connection, job.id, "w1", {"files": 0})
        done = jobs.get(connection, job.id)

    assert done.started is not None
    assert done.finished is not None
    assert done.created <= done.started <= done.finished


def test_job_that_crashes_every_worker_is_claimed_a_limited_number_of_times(
    database: Database, dataset_id: str, monkeypatch
):
    monkeypatch.setattr(Operation, "never_given_up", property(lambda _: False))
    job = enqueue(database, dataset_id)
    for _ in range(MOST_ATTEMPTS):
        assert claim(database, "dies") is not None
        expire_heartbeats(database)

    assert claim(database, "lives") is None
    with database.read() as connection:
        stored = jobs.find(connection, job.id)
    assert stored is not None
    assert stored.problem is not None
    assert (stored.state, stored.problem.detail) == (
        JobState.FAILED,
        "20 workers stopped sending heartbeats while running this job",
    )


def test_delete_that_crashes_every_worker_has_long_delays_between_attempts(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    for _ in range(MOST_ATTEMPTS):
        claim(database, "dies")
        expire_heartbeats(database)

    assert claim(database, "lives") is None
    with database.read() as connection:
        stored = jobs.find(connection, job.id)
    assert stored is not None
    assert stored.not_before is not None
    assert stored.state is JobState.QUEUED
    assert stored.not_before > now() + LONG_WAIT / 2


def test_deletes_that_failed_under_an_older_version_are_resumed(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/old.db")
    config = migrate.alembic_config()
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0003")
        connection.execute(
            text("INSERT INTO datasets VALUES ('d', 'donations', 'deleting', '2030-01-01 00:00:00.000000', 0)")
        )
        connection.execute(
            text(
                "INSERT INTO jobs (id, operation, dataset_id, tenant, request, state, created, attempts) "
                "VALUES ('j', 'delete', 'd', 'alice', 'r', 'failed', '2030-01-01 00:00:00.000000', 1)"
            )
        )

    migrate.upgrade(database)

    assert claim(database, "w1") is not None
    database.close()


# Jobs of several datasets


def test_job_of_several_datasets_names_them(database: Database, dataset_id: str):
    several = enqueue(database, None, Operation.FLUSH, dataset_ids=[dataset_id])
    one = enqueue(database, dataset_id, Operation.FLUSH)

    with database.read() as connection:
        listed = jobs.newest(connection, "alice", None, 10)

    assert (several.dataset, several.dataset_id, several.dataset_ids) == (None, None, [dataset_id])
    assert (one.dataset, one.dataset_ids) == ("donations", [dataset_id])
    assert [job.id for job in listed] == [one.id, several.id]


def test_result_is_typed_by_operation_even_if_an_older_version_stored_it_untyped(database: Database, dataset_id: str):
    deleted, flushed = enqueue(database, dataset_id), enqueue(database, dataset_id, Operation.FLUSH)
    snapshot = {"dataset": "donations", "seq": 1, "id": "s"}
    claim(database, "w1")
    claim_all(database, "w1")
    with database.write() as connection:
        jobs.finish(connection, deleted.id, "w1", {"files": 3})
        jobs.finish(connection, flushed.id, "w1", {"operation": "flush", "statements": 7, "snapshots": [snapshot]})

    results = show(database, deleted).result, show(database, flushed).result

    assert isinstance(results[0], DeleteResult)
    assert isinstance(results[1], FlushResult)
    assert (results[0].files, results[1].statements, results[1].snapshots[0].seq) == (3, 7, 1)


def test_excluded_operation_is_not_claimed_singly(database: Database, dataset_id: str):
    enqueue(database, dataset_id, Operation.FLUSH)
    other = enqueue(database, dataset_id)

    claimed = [claim(database, "w1", (Operation.DELETE,)) for _ in range(2)]

    assert [job and job.id for job in claimed] == [other.id, None]


def test_every_due_job_of_one_operation_is_claimed_at_once(database: Database, dataset_id: str):
    flushes = [enqueue(database, dataset_id, Operation.FLUSH) for _ in range(3)]
    later, other = enqueue(database, dataset_id, Operation.FLUSH), enqueue(database, dataset_id)
    with database.write() as connection:
        connection.execute(update(table).where(table.c.id == later.id).values(not_before=now() + timedelta(hours=1)))

    claimed, again = claim_all(database, "w1"), claim_all(database, "w2")

    assert [job.id for job in claimed] == [job.id for job in flushes]
    assert {(job.state, job.attempts) for job in claimed} == {(JobState.RUNNING, 1)}
    assert again == []
    assert show(database, other).state is JobState.QUEUED


def test_concurrent_workers_that_claim_all_jobs_claim_each_once(database: Database, dataset_id: str):
    ids = sorted(enqueue(database, dataset_id, Operation.FLUSH).id for _ in range(40))
    claimed: list[str] = []
    start = threading.Barrier(4)

    def work(worker: str) -> None:
        start.wait()
        for _ in range(5):
            claimed.extend(job.id for job in claim_all(database, worker))

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(claimed) == ids


def test_jobs_of_a_worker_without_heartbeat_are_taken_over_together(database: Database, dataset_id: str):
    ids = [enqueue(database, dataset_id, Operation.FLUSH).id for _ in range(2)]
    claim_all(database, "dead")
    expire_heartbeats(database)

    claimed = claim_all(database, "alive")
    with database.write() as connection:
        confirmed = jobs.beat_all(connection, ids, "dead"), jobs.beat_all(connection, ids, "alive")

    assert [job.id for job in claimed] == ids
    assert all(job.disturbed is not None for job in claimed)
    assert confirmed == (set(), set(ids))


# Cancelled and retried


def cancel(database: Database, job: Job) -> Job:
    with database.write() as connection:
        return jobs.cancel(connection, job.id)


def retry(database: Database, job: Job) -> Job:
    with database.write() as connection:
        return jobs.retry(connection, job.id)


def test_queued_job_ends_when_it_is_cancelled(database: Database, dataset_id: str):
    cancelled = cancel(database, enqueue(database, dataset_id, Operation.FLUSH))

    assert cancelled.state is JobState.CANCELLED
    assert cancelled.cancelled == cancelled.finished is not None
    assert claim_all(database, "w1") == []


def test_running_job_is_cancelled_at_the_next_heartbeat_of_its_worker(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    claim_all(database, "w1")

    cancelled = cancel(database, job)
    with database.write() as connection:
        continues = jobs.beat(connection, job.id, "w1", None)
        settled = jobs.requeue(connection, job.id, "w1")

    after = show(database, job)
    assert (cancelled.state, cancelled.finished) == (JobState.RUNNING, None)
    assert cancelled.cancelled is not None
    assert (continues, settled, after.state) == (False, True, JobState.CANCELLED)
    assert after.finished is not None


def test_job_that_is_cancelled_while_it_fails_is_not_retried(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    claim_all(database, "w1")
    cancel(database, job)
    with database.write() as connection:
        jobs.fail(connection, job.id, "w1", PROBLEM, now())

    after = show(database, job)

    assert (after.state, after.not_before) == (JobState.CANCELLED, None)
    assert after.problem is not None


def test_job_that_finishes_before_its_worker_sees_the_cancellation_is_done(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    claim_all(database, "w1")
    cancel(database, job)
    with database.write() as connection:
        finished = jobs.finish(connection, job.id, "w1", {"statements": 0, "snapshots": []})

    assert finished
    assert show(database, job).state is JobState.DONE
    assert cancel(database, job).state is JobState.DONE


def test_cancelled_job_of_a_worker_without_heartbeat_ends_and_is_not_taken_over(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    claim_all(database, "dead")
    cancel(database, job)
    expire_heartbeats(database)

    assert claim_all(database, "alive") == []
    assert show(database, job).state is JobState.CANCELLED


def test_delete_cannot_be_cancelled_whether_queued_or_running(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)

    with pytest.raises(JobConflict, match="must run to its end"):
        cancel(database, job)
    claim(database, "w1")
    with pytest.raises(JobConflict):
        cancel(database, job)

    assert show(database, job).cancelled is None


def test_failed_job_is_retried_from_the_beginning_and_keeps_its_problem_until_it_ends(
    database: Database, dataset_id: str
):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    claim_all(database, "w1")
    with database.write() as connection:
        jobs.fail(connection, job.id, "w1", PROBLEM, None)

    again = retry(database, job)
    [claimed] = claim_all(database, "w2")
    with database.write() as connection:
        jobs.finish(connection, job.id, "w2", {"statements": 0, "snapshots": []})

    done = show(database, job)
    assert (again.state, again.attempts, again.finished) == (JobState.QUEUED, 0, None)
    assert again.problem is not None
    assert (claimed.attempts, done.state, done.problem) == (1, JobState.DONE, None)


def test_cancelled_job_is_retried_as_if_it_was_not_cancelled(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    cancel(database, job)

    again = retry(database, job)

    assert (again.state, again.cancelled) == (JobState.QUEUED, None)
    assert [claimed.id for claimed in claim_all(database, "w1")] == [job.id]


def test_queued_running_or_finished_job_is_not_retried(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id, Operation.FLUSH)
    refused = []
    for act in (lambda: claim_all(database, "w1"), lambda: finish(database, job), lambda: None):
        with pytest.raises(JobConflict) as conflict:
            retry(database, job)
        refused.append(conflict.value.members["state"])
        act()

    assert refused == ["queued", "running", "done"]


def test_absent_job_is_neither_cancelled_nor_retried(database: Database):
    with database.write() as connection, pytest.raises(JobNotFound):
        jobs.cancel(connection, "none")
    with database.write() as connection, pytest.raises(JobNotFound):
        jobs.retry(connection, "none")


def finish(database: Database, job: Job) -> None:
    with database.write() as connection:
        jobs.finish(connection, job.id, "w1", {"statements": 0, "snapshots": []})


PROBLEM = Unavailable("for now").problem("/v1/jobs/1").model_dump(mode="json")


def expire_heartbeats(database: Database) -> None:
    with database.write() as connection:
        connection.execute(update(table).values(heartbeat=now() - timedelta(minutes=1)))
