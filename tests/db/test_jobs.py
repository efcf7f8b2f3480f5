"""The jobs table: claimed once, kept by a heartbeat, taken over when that stops."""

import threading
from datetime import timedelta

import pytest
from alembic import command
from sqlalchemy import insert, text, update

from app.db import jobs, migrate
from app.db.engine import Database
from app.db.tables import datasets
from app.db.tables import jobs as table
from app.errors import Unavailable
from app.model.ids import new_id, now
from app.model.job import LONG_WAIT, MOST_ATTEMPTS, Job, JobState, Operation, Progress


@pytest.fixture
def dataset_id(database: Database) -> str:
    dataset_id = new_id()
    with database.write() as connection:
        connection.execute(
            insert(datasets).values(id=dataset_id, name="donations", state="active", created=now(), revision=0)
        )
    return dataset_id


def enqueue(database: Database, dataset_id: str) -> Job:
    with database.write() as connection:
        return jobs.enqueue(connection, Operation.DELETE, dataset_id, "alice", "request-1")


def claim(database: Database, worker: str) -> Job | None:
    with database.write() as connection:
        return jobs.claim(connection, worker, silent_after=30)


def test_oldest_job_is_claimed_first_and_only_once(database: Database, dataset_id: str):
    first, second = enqueue(database, dataset_id), enqueue(database, dataset_id)

    claimed = [claim(database, worker) for worker in ("w1", "w2", "w3")]

    assert [job and job.id for job in claimed] == [first.id, second.id, None]
    assert claimed[0] is not None
    assert (claimed[0].state, claimed[0].attempts) == (JobState.RUNNING, 1)


def test_of_many_workers_each_job_goes_to_one(database: Database, dataset_id: str):
    wanted = {enqueue(database, dataset_id).id for _ in range(10)}
    taken: list[str] = []

    def work(worker: str) -> None:
        while (job := claim(database, worker)) is not None:
            taken.append(job.id)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while (job := claim(database, "late")) is not None:
        taken.append(job.id)

    assert sorted(taken) == sorted(wanted)


def test_job_of_a_silent_worker_is_taken_over_and_the_old_one_cannot_finish_it(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "dead")
    with database.write() as connection:
        connection.execute(update(table).values(heartbeat=now() - timedelta(minutes=1)))

    taken = claim(database, "alive")
    with database.write() as connection:
        late = [
            jobs.beat(connection, job.id, "dead", None),
            jobs.finish(connection, job.id, "dead", {}),
            jobs.fail(connection, job.id, "dead", {}, None),
        ]
        finished = jobs.finish(connection, job.id, "alive", {"files": 1})

    assert taken is not None
    assert taken.attempts == 2
    assert taken.disturbed is not None
    assert late == [False, False, False]
    assert finished


def test_job_that_beats_is_left_alone(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    with database.write() as connection:
        connection.execute(update(table).values(heartbeat=now() - timedelta(minutes=1)))
        jobs.beat(connection, job.id, "w1", Progress(done=5, total=10, unit="files"))

    assert claim(database, "w2") is None
    with database.read() as connection:
        found = jobs.find(connection, job.id)
    assert found is not None
    assert found.progress == Progress(done=5, total=10, unit="files")


def test_job_that_is_handed_back_is_queued_again(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    with database.write() as connection:
        jobs.hand_back(connection, job.id, "w1")

    again = claim(database, "w2")

    assert again is not None
    assert (again.id, again.attempts, again.disturbed) == (job.id, 2, None)


def test_job_that_failed_is_claimed_when_its_time_has_come_and_not_before(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    claim(database, "w1")
    with database.write() as connection:
        jobs.fail(connection, job.id, "w1", PROBLEM, now() + timedelta(minutes=1))

    early = claim(database, "w2")
    with database.write() as connection:
        connection.execute(update(table).values(not_before=now()))
    again = claim(database, "w2")
    with database.write() as connection:
        jobs.finish(connection, job.id, "w2", {})
        done = jobs.find(connection, job.id)

    assert early is None
    assert again is not None
    assert done is not None
    assert again.problem is not None
    assert again.disturbed is not None
    assert (done.state, done.problem, done.not_before) == (JobState.DONE, None, None)


def test_job_that_ends_every_worker_is_not_claimed_for_ever(database: Database, dataset_id: str, monkeypatch):
    monkeypatch.setattr(Operation, "never_given_up", property(lambda _: False))
    job = enqueue(database, dataset_id)
    for _ in range(MOST_ATTEMPTS):
        assert claim(database, "dies") is not None
        fall_silent(database)

    assert claim(database, "lives") is None
    with database.read() as connection:
        found = jobs.find(connection, job.id)
    assert found is not None
    assert found.problem is not None
    assert (found.state, found.problem.detail) == (JobState.FAILED, "20 workers fell silent over this job")


def test_delete_that_ends_every_worker_waits_long_between_tries(database: Database, dataset_id: str):
    job = enqueue(database, dataset_id)
    for _ in range(MOST_ATTEMPTS):
        claim(database, "dies")
        fall_silent(database)

    assert claim(database, "lives") is None
    with database.read() as connection:
        found = jobs.find(connection, job.id)
    assert found is not None
    assert found.not_before is not None
    assert found.state is JobState.QUEUED
    assert found.not_before > now() + LONG_WAIT / 2


def test_deletes_that_failed_under_an_older_version_are_taken_up_again(tmp_path):
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


PROBLEM = Unavailable("for now").problem("/v1/jobs/1").model_dump(mode="json")


def fall_silent(database: Database) -> None:
    with database.write() as connection:
        connection.execute(update(table).values(heartbeat=now() - timedelta(minutes=1)))
