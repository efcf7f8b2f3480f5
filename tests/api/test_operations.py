"""Operations over HTTP."""

import pytest

from tests.in_process_api import InProcessApi
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import make_worker, working

FLUSH = "/v1/datasets/ours/operations/flush"
JSON = {"Content-Type": "application/json"}
ENTITY = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture(autouse=True)
def dataset(house: InProcessApi):
    house.dataset("ours")


def test_flush_answers_a_job_and_where_to_look(house: InProcessApi):
    answer = house.admin.post(FLUSH)

    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert (job["operation"], job["dataset"], job["state"], job["result"]) == ("flush", "ours", "queued", None)
    assert house.admin.get(answer.headers["Location"]).json() == job


def test_flush_that_is_waited_for_answers_when_it_is_over_with_its_snapshot(house: InProcessApi):
    house.admin.post("/v1/datasets/ours/entities", ENTITY)

    with working(make_worker(house, SqlFlusher(house.services.database))):
        answer = house.admin.post(f"{FLUSH}?wait=20")

    job = answer.json()
    assert (answer.status_code, job["state"]) == (200, "done")
    assert job["result"]["operation"] == "flush"
    assert job["result"]["statements"] == 2
    assert [(each["dataset"], each["seq"]) for each in job["result"]["snapshots"]] == [("ours", 1)]


@pytest.mark.parametrize(("level", "status"), [(None, 404), ("read", 403), ("write", 403), ("maintain", 202)])
def test_flush_of_a_dataset_needs_maintain(house: InProcessApi, level: str | None, status: int):
    alice = house.tenant("alice", **({"ours": level} if level else {}))

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
def test_flush_takes_no_body_or_an_empty_object(
    house: InProcessApi, path: str, body: bytes, headers: dict, status: int
):
    answer = house.admin("POST", path, headers, content=body)

    assert answer.status_code == status
    assert len(house.admin.get("/v1/jobs").json()["results"]) == (1 if status == 202 else 0)


def test_unknown_field_of_a_flush_is_named(house: InProcessApi):
    answer = house.admin.post(FLUSH, {"force": True}).json()

    assert answer["type"] == "/problems/schema-violation"
    assert answer["errors"][0]["field"] == "force"


def test_flush_of_everything_is_of_what_the_caller_may_maintain_when_it_asks(house: InProcessApi):
    house.dataset("theirs")
    house.dataset("read_only")
    alice = house.tenant("alice", ours="maintain", read_only="write")

    answer = alice.post("/v1/operations/flush")
    house.admin.post("/v1/admin/tenants/alice/grants", {"dataset": "theirs", "level": "maintain"})

    job = alice.get(answer.headers["Location"]).json()
    assert answer.status_code == 202
    assert (job["dataset"], job["dataset_id"], job["tenant"]) == (None, None, "alice")
    assert job["arguments"] == {"dataset_ids": [id_of(house, "ours")]}


def test_flush_of_everything_by_a_caller_who_maintains_nothing_does_nothing(house: InProcessApi):
    bob = house.tenant("bob", ours="write")
    flusher = SqlFlusher(house.services.database)

    with working(make_worker(house, flusher)):
        job = bob.post("/v1/operations/flush?wait=20").json()

    assert (job["state"], job["result"]["snapshots"], flusher.rounds) == ("done", [], [])


def test_flush_under_the_same_idempotency_key_is_one_job(house: InProcessApi):
    first, again = (house.admin.post(FLUSH, headers={"Idempotency-Key": "k"}) for _ in range(2))

    assert first.json() == again.json()
    assert again.headers["Location"] == first.headers["Location"]
    assert len(house.admin.get("/v1/jobs").json()["results"]) == 1


def test_flush_is_in_the_audit_log_with_its_job(house: InProcessApi):
    job = house.admin.post(FLUSH).json()["id"]

    entries = house.admin.get("/v1/admin/audit").json()["results"]

    assert [entry["detail"] for entry in entries if entry["action"] == "flush_dataset"] == [{"job": job}]
