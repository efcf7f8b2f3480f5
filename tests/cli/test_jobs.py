"""Flushes and jobs from the command line, on a server whose worker runs in the test."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store
from tarn.worker.loop import Worker

from tests.cli.conftest import TARN, Tarn
from tests.server import Server, clean_environment, running
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher
from tests.worker.workers import working


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def settings(folder: Path) -> Settings:
    return load_settings(
        database_url=f"sqlite:///{folder}/data/tarn.db", lake_uri=str(folder / "data" / "lake"), worker_poll=0.01
    )


@pytest.fixture(scope="module")
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    migrate.upgrade(database)
    yield database
    database.close()


@pytest.fixture(scope="module")
def server(folder: Path, database: Database) -> Iterator[Server]:
    """Start the API alone: jobs are run only by workers that a test starts."""
    with running(folder, "api") as server:
        yield server


@pytest.fixture
def flusher(database: Database) -> SqlFlusher:
    return SqlFlusher(database)


@pytest.fixture
def running_worker(settings: Settings, database: Database, flusher: SqlFlusher) -> AbstractContextManager[None]:
    """Return a context manager that runs a worker during its block."""
    return working(Worker(settings, database, Store(Connection.from_settings(settings)), flusher))


def run(tarn: Tarn, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in another process: the worker in this one logs to standard output."""
    environment = clean_environment(TARN_URL=tarn.url, TARN_KEY=tarn.key)
    return subprocess.run([*TARN, *args], env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_flush_waits_for_its_job_and_prints_it(tarn: Tarn, dataset: str, running_worker):
    with running_worker:
        job = json.loads(run(tarn, "flush", dataset, "--json").stdout)

    assert (job["operation"], job["dataset"], job["state"]) == ("flush", dataset, "done")


def test_flush_prints_its_result_without_the_request(tarn: Tarn, dataset: str, running_worker):
    with running_worker:
        shown = run(tarn, "flush", dataset)

    fields = [line.split()[0] for line in shown.stdout.splitlines()]
    assert fields[:3] == ["operation", "dataset", "state"]
    assert "id" not in fields
    assert "waiting for the job" in shown.stderr


def test_flush_without_a_dataset_flushes_all(tarn: Tarn, dataset: str, running_worker):
    tarn("datasets", "create", f"{dataset}_too")

    with running_worker:
        job = json.loads(run(tarn, "flush", "--json").stdout)

    assert (job["dataset"], job["state"]) == (None, "done")
    assert len(job["arguments"]["dataset_ids"]) >= 2


def test_flush_without_waiting_is_a_queued_job(tarn: Tarn, dataset: str):
    job = tarn.json("flush", dataset, "--no-wait")

    listed = {line.split()[0]: line.split()[1:4] for line in tarn("jobs", "list").stdout.splitlines()}

    assert job["state"] == "queued"
    assert listed[job["id"]] == ["flush", dataset, "queued"]


def test_flush_of_a_missing_dataset_is_a_problem(tarn: Tarn, name: str):
    assert "(dataset-not-found)" in tarn("flush", name, code=1).stderr


def test_failed_flush_exits_with_the_problem_of_its_job(tarn: Tarn, dataset: str, flusher: SqlFlusher, running_worker):
    flusher.failing = {tarn.json("datasets", "show", dataset)["id"]: RuntimeError("broken")}

    with running_worker:
        failed = run(tarn, "flush", dataset)

    assert (failed.returncode, failed.stdout) == (1, "")
    assert "the job failed; see the worker's log for the cause (internal)" in failed.stderr


def test_flush_that_is_cancelled_during_the_wait_fails(tarn: Tarn, server: Server, dataset: str):
    with subprocess.Popen(
        [*TARN, "flush", dataset],
        env=clean_environment(TARN_URL=tarn.url, TARN_KEY=tarn.key),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        wait_until(lambda: bool(jobs_of(tarn, dataset)))
        [job] = jobs_of(tarn, dataset)
        tarn("jobs", "cancel", job["id"])
        stdout, stderr = waiting.communicate(timeout=60)

    assert (waiting.returncode, stdout) == (1, "")
    assert f"the job {job['id']} was cancelled" in stderr


def jobs_of(tarn: Tarn, dataset: str) -> list[dict]:
    return [job for job in json.loads(tarn("jobs", "list", "--json").stdout) if job["dataset"] == dataset]


def test_job_is_cancelled_and_retried(tarn: Tarn, dataset: str):
    job = tarn.json("flush", dataset, "--no-wait")

    cancelled = tarn.json("jobs", "cancel", job["id"])
    same = tarn.json("jobs", "cancel", job["id"])
    again = tarn.json("jobs", "retry", job["id"])
    refused = tarn("jobs", "retry", job["id"], code=1)

    assert (cancelled["state"], same, again["state"]) == ("cancelled", cancelled, "queued")
    assert "(job-conflict)" in refused.stderr
    assert ["state", "queued"] in [line.split() for line in tarn("jobs", "show", job["id"]).stdout.splitlines()]
