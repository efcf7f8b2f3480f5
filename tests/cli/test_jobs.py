"""Flushing and jobs from the command line, on a server whose worker is the test's."""

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
    """The API alone: nothing is done unless a test works."""
    with running(folder, "api") as server:
        yield server


@pytest.fixture
def flusher(database: Database) -> SqlFlusher:
    return SqlFlusher(database)


@pytest.fixture
def at_work(settings: Settings, database: Database, flusher: SqlFlusher) -> AbstractContextManager[None]:
    """A worker, while the block runs."""
    return working(Worker(settings, database, Store(Connection.from_settings(settings)), flusher))


def run(tarn: Tarn, *args: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own: the worker in this one writes its log to standard output."""
    environment = clean_environment(TARN_URL=tarn.url, TARN_KEY=tarn.key)
    return subprocess.run([*TARN, *args], env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_flush_of_a_dataset_is_waited_for_and_shown(tarn: Tarn, dataset: str, at_work):
    with at_work:
        job = json.loads(run(tarn, "flush", dataset, "--json").stdout)

    assert (job["operation"], job["dataset"], job["state"]) == ("flush", dataset, "done")


def test_person_is_told_what_came_of_a_flush_and_not_how_it_was_asked_for(tarn: Tarn, dataset: str, at_work):
    with at_work:
        shown = run(tarn, "flush", dataset)

    fields = [line.split()[0] for line in shown.stdout.splitlines()]
    assert fields[:3] == ["operation", "dataset", "state"]
    assert "id" not in fields
    assert "waiting for the job" in shown.stderr


def test_flush_without_a_dataset_is_of_all_of_them(tarn: Tarn, dataset: str, at_work):
    tarn("datasets", "create", f"{dataset}_too")

    with at_work:
        job = json.loads(run(tarn, "flush", "--json").stdout)

    assert (job["dataset"], job["state"]) == (None, "done")
    assert len(job["arguments"]["dataset_ids"]) >= 2


def test_flush_that_is_not_waited_for_is_a_job_in_the_list(tarn: Tarn, dataset: str):
    job = tarn.json("flush", dataset, "--no-wait")

    listed = {line.split()[0]: line.split()[1:4] for line in tarn("jobs", "list").stdout.splitlines()}

    assert job["state"] == "queued"
    assert listed[job["id"]] == ["flush", dataset, "queued"]


def test_flush_of_what_is_not_there_fails(tarn: Tarn, name: str):
    assert "(dataset-not-found)" in tarn("flush", name, code=1).stderr


def test_flush_that_fails_says_why(tarn: Tarn, dataset: str, flusher: SqlFlusher, at_work):
    flusher.failing = {tarn.json("datasets", "show", dataset)["id"]: RuntimeError("broken")}

    with at_work:
        failed = run(tarn, "flush", dataset)

    assert (failed.returncode, failed.stdout) == (1, "")
    assert "the job failed; see the worker's log for the cause (internal)" in failed.stderr


def test_flush_that_somebody_cancels_while_it_is_waited_for_fails(tarn: Tarn, server: Server, dataset: str):
    with subprocess.Popen(
        [*TARN, "flush", dataset],
        env=clean_environment(TARN_URL=tarn.url, TARN_KEY=tarn.key),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        wait_until(lambda: bool(of_dataset(tarn, dataset)))
        [job] = of_dataset(tarn, dataset)
        tarn("jobs", "cancel", job["id"])
        stdout, stderr = waiting.communicate(timeout=60)

    assert (waiting.returncode, stdout) == (1, "")
    assert f"the job {job['id']} was cancelled" in stderr


def of_dataset(tarn: Tarn, dataset: str) -> list[dict]:
    return [job for job in json.loads(tarn("jobs", "list", "--json").stdout) if job["dataset"] == dataset]


def test_job_is_cancelled_and_tried_again(tarn: Tarn, dataset: str):
    job = tarn.json("flush", dataset, "--no-wait")

    cancelled = tarn.json("jobs", "cancel", job["id"])
    same = tarn.json("jobs", "cancel", job["id"])
    again = tarn.json("jobs", "retry", job["id"])
    refused = tarn("jobs", "retry", job["id"], code=1)

    assert (cancelled["state"], same, again["state"]) == ("cancelled", cancelled, "queued")
    assert "(job-conflict)" in refused.stderr
    assert ["state", "queued"] in [line.split() for line in tarn("jobs", "show", job["id"]).stdout.splitlines()]
