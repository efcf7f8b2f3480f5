"""Rolling upgrade: processes of the last release and of this one run concurrently on one PostgreSQL and one lake."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from tarn.db.engine import Database
from tarn.db.tables import jobs, readers, workers

from tests.conftest import copied_postgresql
from tests.server import WITHOUT_SPARK, clean_environment, running

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "upgrade" / "worker_without_spark.py"
KEY = "an-administrator-of-both"
WRITES, ENTITIES_PER_WRITE = 8, 5
"""Requests of each writer, and entities per request."""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check out the code of the last release from this repository's history."""
    released = (ROOT / "migrations" / "released.txt").read_text().strip()
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the last release is in the repository's history: git is not installed, or this is no repository")
    if _git("cat-file", "-e", f"{released}^{{commit}}").returncode:
        pytest.skip(f"the last release, {released}, is not in this clone, which is shallow: `git fetch --unshallow`")
    folder = tmp_path_factory.mktemp("previous")
    archive = _git("archive", released, "app", "migrations")
    assert archive.returncode == 0, archive.stderr
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _git(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)


class Scene:
    """A database and a lake, and processes of either version on them."""

    def __init__(self, folder: Path, url: str, previous: Path) -> None:
        self.folder = folder
        self.code = {"old": previous, "new": ROOT / "app"}
        self.package = {"old": "app", "new": "tarn"}
        self.settings = {
            "TARN_DATABASE_URL": url,
            "TARN_LAKE_URI": str(folder / "lake"),
            "TARN_ADMIN_KEY": KEY,
            "TARN_FLUSH_AGE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self, version: str, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", f"{self.package[version]}.cli", command],
            cwd=self._place(version, command),
            env=self._environment(version),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @contextmanager
    def api(self, version: str) -> Iterator[httpx.Client]:
        environment = self.settings | {"PYTHONPATH": str(self.code[version])}
        with running(self._place(version, "api"), "api", self.package[version], **environment) as server:
            client = server.client(KEY)
            client.timeout = httpx.Timeout(180)
            try:
                yield client
            finally:
                client.close()

    @contextmanager
    def worker(self, version: str) -> Iterator["subprocess.Popen[bytes]"]:
        place = self._place(version, "worker")
        with (place / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(WORKER), self.package[version]],
                cwd=place,
                env=self._environment(version),
                stderr=log,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)

    def _place(self, version: str, what: str) -> Path:
        place = self.folder / f"{version} {what}"
        place.mkdir(exist_ok=True)
        return place

    def _environment(self, version: str) -> dict[str, str]:
        without_spark = WITHOUT_SPARK[self.package[version]]
        return clean_environment(**self.settings, **without_spark, PYTHONPATH=str(self.code[version]))


def entity(name: str) -> dict[str, object]:
    return {"id": name, "schema": "Person", "properties": {"name": [name]}}


def write_entities(client: httpx.Client, writer: str) -> list[str]:
    """Write some entities, and assert that each is visible at once on the API that wrote it."""
    ids: list[str] = []
    for number in range(WRITES):
        some = [f"{writer}-{number}-{each}" for each in range(ENTITIES_PER_WRITE)]
        answer = client.post("/v1/datasets/shared/entities?origin=test", json=[entity(one) for one in some])
        assert answer.status_code in (200, 201), answer.text
        assert client.get(f"/v1/datasets/shared/entities/{some[-1]}").status_code == 200
        ids += some
    return ids


def ids_of(client: httpx.Client) -> list[str]:
    answer = client.get("/v1/datasets/shared/entities/stream")
    assert answer.status_code == 200, answer.text
    return sorted(json.loads(line)["id"] for line in answer.text.splitlines())


def run_job(client: httpx.Client, operation: str) -> dict[str, object]:
    """Request a job from this API, wait until it is done, and return it."""
    job = client.post(f"/v1/datasets/shared/operations/{operation}", json={}).json()
    while job["state"] in ("queued", "running"):
        job = client.get(f"/v1/jobs/{job['id']}?wait=10").json()
    assert job["state"] == "done", job
    return dict(job)


def worker_of(database: Database, job: dict[str, object]) -> str:
    with database.read() as connection:
        worker: str = connection.execute(select(jobs.c.worker).where(jobs.c.id == job["id"])).scalar_one()
    return worker


def registered_id(database: Database, process: "subprocess.Popen[bytes]") -> str:
    """Wait until a worker has registered, and return its id."""
    while process.poll() is None:
        with database.read() as connection:
            worker = connection.execute(select(workers.c.id).where(workers.c.pid == process.pid)).scalar()
        if worker is not None:
            return str(worker)
        time.sleep(0.1)
    raise AssertionError("the worker ended before it registered")


def test_old_and_new_processes_share_the_work_without_losing_or_duplicating_rows(
    previous: Path, postgresql: str, tmp_path: Path
):
    with (
        copied_postgresql(postgresql, template="template0") as url,
        closing(Database(url)) as database,
        ExitStack() as new,
        ExitStack() as old,
    ):
        scene = Scene(tmp_path, url, previous)
        assert scene.run("old", "migrate").returncode == 0

        # The last release is running.
        old_api = old.enter_context(scene.api("old"))
        assert old_api.post("/v1/datasets", json={"name": "shared"}).status_code == 201
        old_worker = old.enter_context(scene.worker("old"))
        expected = write_entities(old_api, "before")
        assert run_job(old_api, "flush")["state"] == "done"

        # The database is migrated under it and an API of this version starts: its jobs are done by the old worker.
        migrated = scene.run("new", "migrate")
        assert migrated.returncode == 0, migrated.stderr
        new_api = new.enter_context(scene.api("new"))
        assert ids_of(new_api) == sorted(expected)
        by_old = run_job(new_api, "verify")
        assert worker_of(database, by_old) == registered_id(database, old_worker)

        # Both APIs write and read concurrently, while workers of both versions flush.
        new_worker = new.enter_context(scene.worker("new"))
        new_id = registered_id(database, new_worker)
        with ThreadPoolExecutor(2) as pool:
            writing = [pool.submit(write_entities, *each) for each in ((old_api, "old"), (new_api, "new"))]
            expected += [one for each in writing for one in each.result()]
        assert ids_of(old_api) == ids_of(new_api) == sorted(expected)
        run_job(new_api, "flush")
        with database.read() as connection:
            formats = connection.execute(select(readers.c.speaks)).scalars().all()
        assert sorted(each is None for each in formats) == [False, False, True, True]

        # The old worker stops, and the old API's jobs are done by the new worker.
        old_worker.terminate()
        assert old_worker.wait(60) == 0
        by_new = run_job(old_api, "compact")
        assert worker_of(database, by_new) == new_id
        expected += write_entities(old_api, "last")
        assert ids_of(old_api) == ids_of(new_api) == sorted(expected)

        # The old API stops and cannot start again: its version requires its own schema revision.
        old.close()
        with database.read() as connection:
            assert None not in connection.execute(select(readers.c.speaks)).scalars().all()
        refused = scene.run("old", "api")
        assert (refused.returncode, "newer version" in refused.stderr) == (2, True)

        run_job(new_api, "flush")
        assert ids_of(new_api) == sorted(expected)
        report = run_job(new_api, "verify")["result"]
        assert isinstance(report, dict)
        assert report["findings"] == []

    manifests = [json.loads(path.read_text()) for path in (tmp_path / "lake" / "shared" / "snapshots").glob("0*.json")]
    batches = [batch for manifest in manifests for batch in manifest["batches"]]
    assert len({batch["id"] for batch in batches}) == len(batches) == 4 * WRITES
    assert sum(batch["entities"] for batch in batches) == len(expected) == 4 * WRITES * ENTITIES_PER_WRITE
