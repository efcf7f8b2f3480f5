"""Operations over HTTP: flush of one dataset, and of all."""

import pytest

from tests.in_process_api import InProcessApi
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import make_worker, working

FLUSH = "/v1/datasets/ours/operations/flush"
JSON = {"Content-Type": "application/json"}
ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("ours")


def test_flush_returns_a_job_and_its_location(api: InProcessApi):
    response = api.admin.post(FLUSH)

    job = response.json()
    assert response.status_code == 202
    assert response.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert (job["operation"], job["dataset"], job["state"], job["result"]) == ("flush", "ours", "queued", None)
    assert api.admin.get(response.headers["Location"]).json() == job


def test_flush_that_is_waited_for_returns_the_finished_job_with_its_snapshot(api: InProcessApi):
    api.admin.post("/v1/datasets/ours/entities", ENTITY)

    with working(make_worker(api, SqlFlusher(api.services.database))):
        response = api.admin.post(f"{FLUSH}?wait=20")

    job = response.json()
    assert (response.status_code, job["state"]) == (200, "done")
    assert job["result"]["operation"] == "flush"
    assert job["result"]["statements"] == 2
    assert [(each["dataset"], each["seq"]) for each in job["result"]["snapshots"]] == [("ours", 1)]


@pytest.mark.parametrize(("level", "status"), [(None, 404), ("read", 403), ("write", 403), ("maintain", 202)])
def test_flush_of_a_dataset_requires_maintain(api: InProcessApi, level: str | None, status: int):
    alice = api.tenant("alice", **({"ours": level} if level else {}))

    assert alice.post(FLUSH).status_code == status


@pytest.mark.parametrize("path", [FLUSH, "/v1/operations/flush"])
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 202),
        (b"", JSON, 202),
        (b"{}", JSON, 202),
        (b'{"force": true}', JSON, 422),
        (b"[]", JSON, 422),
        (b"{", JSON, 400),
        (b" ", JSON, 400),
        (b"{}", {"Content-Type": "text/plain"}, 415),
    ],
)
def test_flush_accepts_no_body_or_an_empty_object(
    api: InProcessApi, path: str, body: bytes, headers: dict, status: int
):
    response = api.admin("POST", path, headers, content=body)

    assert response.status_code == status
    assert len(api.admin.get("/v1/jobs").json()["results"]) == (1 if status == 202 else 0)


def test_unknown_field_of_a_flush_is_named(api: InProcessApi):
    response = api.admin.post(FLUSH, {"force": True}).json()

    assert response["type"] == "/problems/schema-violation"
    assert response["errors"][0]["field"] == "force"


def test_flush_of_all_covers_the_datasets_that_the_caller_may_maintain(api: InProcessApi):
    api.dataset("theirs")
    api.dataset("read_only")
    alice = api.tenant("alice", ours="maintain", read_only="write")

    response = alice.post("/v1/operations/flush")
    api.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "theirs", "level": "maintain"})

    job = alice.get(response.headers["Location"]).json()
    assert response.status_code == 202
    assert (job["dataset"], job["dataset_id"], job["tenant"]) == (None, None, "alice")
    assert job["arguments"] == {"dataset_ids": [id_of(api, "ours")]}


def test_flush_of_all_by_a_caller_without_maintain_does_nothing(api: InProcessApi):
    bob = api.tenant("bob", ours="write")
    flusher = SqlFlusher(api.services.database)

    with working(make_worker(api, flusher)):
        job = bob.post("/v1/operations/flush?wait=20").json()

    assert (job["state"], job["result"]["snapshots"], flusher.rounds) == ("done", [], [])


def test_flush_under_the_same_idempotency_key_is_one_job(api: InProcessApi):
    first, again = (api.admin.post(FLUSH, headers={"Idempotency-Key": "k"}) for _ in range(2))

    assert first.json() == again.json()
    assert again.headers["Location"] == first.headers["Location"]
    assert len(api.admin.get("/v1/jobs").json()["results"]) == 1


def test_flush_is_in_the_audit_log_with_its_job(api: InProcessApi):
    job = api.admin.post(FLUSH).json()["id"]

    entries = api.admin.get("/v1/admin/audit").json()["results"]

    assert [entry["detail"] for entry in entries if entry["action"] == "flush_dataset"] == [{"job": job}]
