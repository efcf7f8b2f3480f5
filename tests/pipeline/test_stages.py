"""Stages committed on a named snapshot, and writes that wait for a snapshot, with a concurrent worker."""

from typing import Any

import pytest
from tarn.worker.loop import Worker

from tests.in_process_api import InProcessApi
from tests.worker.workers import working

DATASET = "/v1/datasets/test"
JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}


@pytest.fixture(autouse=True)
def _dataset(dataset: object) -> None:
    """Create the dataset."""


def filled_stage(api: InProcessApi, *entities: dict[str, Any], **note: Any) -> str:
    stage: str = api.admin.post(f"{DATASET}/stages", {"origin": "bulk", **note}).json()["id"]
    assert api.admin.post(f"{DATASET}/stages/{stage}/entities", list(entities)).status_code == 200
    return stage


def commit(api: InProcessApi, stage: str, expected: str) -> Any:
    return api.admin.post(f"{DATASET}/stages/{stage}/commit", headers={"If-Match": f'"{expected}"'})


@pytest.mark.both_databases
def test_write_that_forces_a_flush_is_answered_with_its_snapshot(api: InProcessApi, worker: Worker):
    with working(worker):
        written = api.admin.post(f"{DATASET}/entities?commit=force", [JANE])
        second = api.admin.post(f"{DATASET}/entities?commit=force", [JANE])

    assert (written.status_code, written.json()["snapshot"]["seq"], second.json()["snapshot"]["seq"]) == (200, 1, 2)
    manifest = api.admin.get(f"{DATASET}/snapshots/1").json()
    assert manifest["id"] == written.json()["snapshot"]["id"]
    assert (manifest["author"], manifest["metadata"]) == ("lakehouse", {})


@pytest.mark.contract("H4", "D2")
def test_stage_on_the_head_becomes_a_snapshot_of_its_own(api: InProcessApi, worker: Worker):
    with working(worker):
        first = api.admin.post(f"{DATASET}/entities?commit=force", [JANE]).json()["snapshot"]
        stage = filled_stage(api, JANE | {"id": "john"}, message="July", metadata={"source": "x"})
        response = commit(api, stage, first["id"])

    assert response.status_code == 200
    snapshot = api.admin.get(f"{DATASET}/snapshots/{response.json()['snapshot']['id']}").json()
    assert (snapshot["parent"], snapshot["author"], snapshot["message"], snapshot["metadata"]) == (
        first["id"],
        "admin",
        "July",
        {"source": "x"},
    )
    assert [batch["commit"] for batch in snapshot["batches"]] == [response.json()["commit"]]
    stage_document = api.admin.get(f"{DATASET}/stages/{stage}").json()
    assert (stage_document["state"], stage_document["statements"], stage_document["entities"]) == ("committed", 2, 1)


@pytest.mark.contract("H3", "H4")
def test_stage_on_an_outdated_snapshot_is_refused_and_can_still_be_committed(api: InProcessApi, worker: Worker):
    with working(worker):
        first = api.admin.post(f"{DATASET}/entities?commit=force", [JANE]).json()["snapshot"]
        second = api.admin.post(f"{DATASET}/entities?commit=force", [JANE | {"id": "zoe"}]).json()["snapshot"]
        stage = filled_stage(api, JANE | {"id": "john"})
        stale = commit(api, stage, first["id"])
        unknown = commit(api, stage, "no-such-snapshot")
        fresh = commit(api, stage, second["id"])

    assert (stale.status_code, unknown.status_code, fresh.status_code) == (412, 412, 200)
    assert (stale.json()["expected"], stale.json()["head"]) == (f'"{first["id"]}"', second["id"])
    assert fresh.json()["snapshot"]["seq"] == 3


def test_stage_on_the_head_is_refused_while_a_later_write_is_unflushed(api: InProcessApi, worker: Worker):
    with working(worker):
        first = api.admin.post(f"{DATASET}/entities?commit=force", [JANE]).json()["snapshot"]
    api.admin.post(f"{DATASET}/entities", [JANE | {"id": "zoe"}])
    stage = filled_stage(api, JANE | {"id": "john"})

    refused = commit(api, stage, first["id"])

    assert (refused.status_code, refused.json()["head"]) == (412, first["id"])
    assert api.admin.get(f"{DATASET}/stages/{stage}").json()["state"] == "open"


def test_flush_job_reports_new_statements_and_its_snapshots(api: InProcessApi, worker: Worker):
    api.admin.post(f"{DATASET}/entities", [JANE])
    with working(worker):
        job = api.admin.post(f"{DATASET}/operations/flush?wait=30")
        nothing = api.admin.post("/v1/operations/flush?wait=30")

    assert (job.status_code, job.json()["state"], job.json()["result"]["statements"]) == (200, "done", 2)
    assert job.json()["progress"] == {"done": 2, "total": 2, "unit": "rows"}
    assert [snapshot["seq"] for snapshot in job.json()["result"]["snapshots"]] == [1]
    assert nothing.json()["result"] == {"operation": "flush", "statements": 0, "snapshots": []}
    runs = list(api.services.store.list("test/jobs/runs"))
    assert len(runs) == 1
