"""Maintenance over HTTP: options, permissions, and results."""

from typing import Any

import pytest
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.worker.workers import make_worker, working

BASE = "/v1/datasets/ours/operations"
PURGE = {"entity_ids": ["jane"], "confirm": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "compact": {"force": True},
    "optimize": {},
    "vacuum": {"retention_hours": 48, "dry_run": True},
    "verify": {"repair": False},
    "revert": {"to": "1", "message": "why"},
    "purge": PURGE,
}


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("ours")


@pytest.fixture
def worker(api: InProcessApi, kernels: DirectKernels) -> Worker:
    """Return a worker that flushes and maintains without Spark."""
    services = api.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    return make_worker(api, flusher, flusher.maintenance())


@pytest.mark.parametrize("operation", OPTIONS)
@pytest.mark.parametrize("level", [None, "read", "write", "maintain", "admin"])
def test_maintenance_requires_maintain_and_permanent_erasure_requires_admin(
    api: InProcessApi, operation: str, level: str | None
):
    alice = api.tenant("alice", **({"ours": level} if level else {}))

    response = alice.post(f"{BASE}/{operation}", OPTIONS[operation])

    enough = level == "admin" or (level == "maintain" and operation != "purge")
    assert response.status_code == (404 if level is None else 202 if enough else 403)


@pytest.mark.parametrize(
    ("operation", "body", "status"),
    [
        ("compact", {"force": "maybe"}, 422),
        ("compact", {"all": True}, 422),
        ("optimize", {"target": 1}, 422),
        ("vacuum", {"retention_hours": 1}, 422),
        ("vacuum", {"retention_hours": -1, "override_floor": True}, 422),
        ("vacuum", {"retention_hours": 1, "override_floor": True}, 202),
        ("verify", {"repair": 1.5}, 422),
        ("revert", {}, 422),
        ("revert", {"to": "1", "undo": "2"}, 422),
        ("revert", {"to": ""}, 422),
        ("revert", {"undo": "x" * 129}, 422),
        ("purge", {"entity_ids": ["jane"]}, 422),
        ("purge", {"entity_ids": ["jane"], "confirm": False}, 422),
        ("purge", {"entity_ids": [], "confirm": True}, 422),
        ("purge", {"entity_ids": ["x"] * 10_001, "confirm": True}, 422),
    ],
)
def test_invalid_options_are_refused_and_create_no_job(
    api: InProcessApi, operation: str, body: dict[str, Any], status: int
):
    response = api.admin.post(f"{BASE}/{operation}", body)

    assert response.status_code == status
    assert len(api.admin.get("/v1/jobs").json()["results"]) == (1 if status == 202 else 0)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_every_operation_is_done_and_reports_its_result(api: InProcessApi, worker: Worker):
    people = [{"id": name, "schema": "Person", "properties": {"name": [name]}} for name in ("jane", "john")]
    done: dict[str, dict[str, Any]] = {}
    with working(worker):
        for person in people:
            api.admin.post("/v1/datasets/ours/entities", [person])
            api.admin.post(f"{BASE}/flush?wait=60")
        for operation in ("optimize", "compact", "verify", "vacuum", "revert", "purge"):
            response = api.admin.post(f"{BASE}/{operation}?wait=60", OPTIONS[operation])
            assert (response.status_code, response.json()["state"]) == (200, "done"), response.text
            done[operation] = response.json()["result"]
        shown = [each["id"] for each in api.admin.get("/v1/datasets/ours/entities").json()["results"]]

    assert (done["optimize"]["removed"], done["optimize"]["added"]) == (4, 2)
    assert done["compact"]["rows"] == 4
    assert done["verify"]["found"] == 0
    assert (done["vacuum"]["dry_run"], done["vacuum"]["snapshot"]) == (True, None)
    assert (done["revert"]["added"], done["revert"]["ended"]) == (0, 2)
    assert done["purge"]["statements"] == 2
    assert shown == []
    log = api.admin.get("/v1/datasets/ours/snapshots").json()["results"]
    assert [each["operation"] for each in log] == ["vacuum", "purge"]
    actions = [entry for entry in api.admin.get("/v1/admin/audit").json()["results"] if "purge" in entry["action"]]
    assert [entry["outcome"] for entry in actions] == ["done"]
    assert "jane" not in str(actions)


def test_revert_to_a_missing_snapshot_fails_with_its_problem(api: InProcessApi, worker: Worker):
    with working(worker):
        job = api.admin.post(f"{BASE}/revert?wait=60", {"to": "7"}).json()

    assert (job["state"], job["problem"]["type"].rpartition("/")[2]) == ("failed", "snapshot-not-found")
