"""Crawls: what lies below a place, taken into the archive once, whatever happens on the way."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings, load_settings
from app.worker.flusher import SparkFlusher
from app.worker.loop import Worker
from tests.faults.scene import ONE_DATABASE
from tests.house import House
from tests.pipeline.kernels import DirectKernels
from tests.worker.workers import make_worker

FILES = {"a.txt": b"first", "b/c.pdf": b"%PDF-1.4 \xff", "b/d/e.csv": b"x,y\n1,2\n", "b/d/f.txt": b"first"}


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """A folder that is open to crawls."""
    folder = tmp_path / "drop"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(database_url: str, tmp_path: Path, drop: Path) -> Settings:
    return load_settings(
        database_url=database_url,
        lake_uri=str(tmp_path / "lake"),
        admin_key_file=tmp_path / "admin.key",
        fetch_roots=(drop,),
        fetch_private_hosts=("127.0.0.1",),
        fetch_max_bytes=3 << 20,
    )


@pytest.fixture
def worker(house: House, kernels: DirectKernels) -> Worker:
    return worker_of(house, kernels)


def worker_of(house: House, kernels: Any, reached: Callable[[str], None] = lambda _: None) -> Worker:
    services = house.services
    flusher = SparkFlusher(
        services.settings, services.database, services.store, "tester", reached, kernels=lambda: kernels
    )
    return make_worker(house, flusher, flusher.maintenance())


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)


def crawl(house: House, worker: Worker, uri: str | Path, **options: Any) -> dict[str, Any]:
    asked = house.admin.post("/v1/datasets/test/operations/crawl", {"uri": str(uri), **options})
    assert asked.status_code == 202, asked.text
    assert worker.step()
    job: dict[str, Any] = house.admin.get(asked.headers["Location"]).json()
    return job


def listed(house: House) -> dict[str, dict[str, Any]]:
    found = house.admin.get("/v1/datasets/test/files?limit=1000").json()["results"]
    return {file["path"]: file for file in found}


def entities(house: House) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = house.admin.get("/v1/datasets/test/entities?limit=1000").json()["results"]
    return found


def test_folder_is_crawled_with_documents_and_folders(house: House, worker: Worker, dataset: Any, drop: Path):
    fill(drop, FILES)

    job = crawl(house, worker, drop)

    assert job["problem"] is None
    assert job["result"] == {
        "operation": "crawl",
        "files": 4,
        "size": sum(map(len, FILES.values())),
        "skipped": 0,
        "failed": 0,
        "first_failures": [],
    }
    assert {path: file["origin"] for path, file in listed(house).items()} == dict.fromkeys(FILES, "crawl")
