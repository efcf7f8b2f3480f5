"""Stages committed on a named snapshot, and writes that wait for theirs, with a worker beside them."""

from typing import Any

import pytest
from tarn.worker.loop import Worker

from tests.in_process_api import InProcessApi
from tests.worker.workers import working

DATASET = "/v1/datasets/test"
JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}


@pytest.fixture(autouse=True)
def _dataset(dataset: object) -> None:
    """The dataset is there."""


def filled_stage(house: InProcessApi, *entities: dict[str, Any], **note: Any) -> str:
    stage: str = house.admin.post(f"{DATASET}/stages", {"origin": "bulk", **note}).json()["id"]
    assert house.admin.post(f"{DATASET}/stages/{stage}/entities", list(entities)).status_code == 200
    return stage


def commit(house: InProcessApi, stage: str, expected: str) -> Any:
    return house.admin.post(f"{DATASET}/stages/{stage}/commit", headers={"If-Match": f'"{expected}"'})


def test_write_that_forces_a_flush_is_answered_with_its_snapshot(house: InProcessApi, worker: Worker):
    with working(worker):
        written = house.admin.post(f"{DATASET}/entities?commit=force", [JANE])
        again = house.admin.post(f"{DATASET}/entities?commit=force", [JANE])

    assert (written.status_code, written.json()["snapshot"]["seq"], again.json()["snapshot"]["seq"]) == (200, 1, 2)
    manifest = house.admin.get(f"{DATASET}/snapshots/1").json()
    assert manifest["id"] == written.json()["snapshot"]["id"]
    assert (manifest["author"], manifest["metadata"]) == ("lakehouse", {})


@pytest.mark.contract("H4", "D2")
def test_stage_on_the_head_becomes_a_snapshot_of_its_own(house: InProcessApi, worker: Worker):
    with working(worker):
        first = house.admin.post(f"{DATASET}/entities?commit=force", [JANE]).json()["snapshot"]
        stage = filled_stage(house, JANE | {"id": "john"}, message="July", metadata={"source": "x"})
        answer = commit(house, stage, first["id"])

    assert answer.status_code == 200
    made = house.admin.get(f"{DATASET}/snapshots/{answer.json()['snapshot']['id']}").json()
    assert (made["parent"], made["author"], made["message"], made["metadata"]) == (
        first["id"],
        "admin",
        "July",
        {"source": "x"},
    )
    assert [batch["commit"] for batch in made["batches"]] == [answer.json()["commit"]]
    shown = house.admin.get(f"{DATASET}/stages/{stage}").json()
    assert (shown["state"], shown["statements"], shown["entities"]) == ("committed", 2, 1)


@pytest.mark.contract("H3", "H4")
def test_stage_on_a_snapshot_that_data_has_passed_is_refused_and_can_still_be_committed(
    house: InProcessApi, worker: Worker
):
    with working(worker):
        first = house.admin.post(f"{DATASET}/entities?commit=force", [JANE]).json()["snapshot"]
        second = house.admin.post(f"{DATASET}/entities?commit=force", [JANE | {"id": "zoe"}]).json()["snapshot"]
        stage = filled_stage(house, JANE | {"id": "john"})
        stale = commit(house, stage, first["id"])
        unknown = commit(house, stage, "no-such-snapshot")
        fresh = commit(house, stage, second["id"])

    assert (stale.status_code, unknown.status_code, fresh.status_code) == (412, 412, 200)
    assert (stale.json()["expected"], stale.json()["head"]) == (f'"{first["id"]}"', second["id"])
    assert fresh.json()["snapshot"]["seq"] == 3


def test_stage_on_the_head_is_refused_while_a_write_waits_above_it(house: InProcessApi, worker: Worker):
    with working(worker):
        first = house.admin.post(f"{DATASET}/entities?commit=force", [JANE]).json()["snapshot"]
    house.admin.post(f"{DATASET}/entities", [JANE | {"id": "zoe"}])
    stage = filled_stage(house, JANE | {"id": "john"})

    refused = commit(house, stage, first["id"])

    assert (refused.status_code, refused.json()["head"]) == (412, first["id"])
    assert house.admin.get(f"{DATASET}/stages/{stage}").json()["state"] == "open"


def test_flush_job_reports_new_statements_and_its_snapshots(house: InProcessApi, worker: Worker):
    house.admin.post(f"{DATASET}/entities", [JANE])
    with working(worker):
        job = house.admin.post(f"{DATASET}/operations/flush?wait=30")
        nothing = house.admin.post("/v1/operations/flush?wait=30")

    assert (job.status_code, job.json()["state"], job.json()["result"]["statements"]) == (200, "done", 2)
    assert job.json()["progress"] == {"done": 2, "total": 2, "unit": "rows"}
    assert [made["seq"] for made in job.json()["result"]["snapshots"]] == [1]
    assert nothing.json()["result"] == {"operation": "flush", "statements": 0, "snapshots": []}
    runs = list(house.services.store.list("test/jobs/runs"))
    assert len(runs) == 1
