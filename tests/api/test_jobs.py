"""Jobs over HTTP: given up and tried again."""

from typing import Any

import pytest
from sqlalchemy import update
from tarn.db.tables import jobs as table
from tarn.errors import Internal
from tarn.model.ids import now
from tarn.model.job import Operation

from tests.in_process_api import InProcessApi
from tests.worker.flushers import SqlFlusher
from tests.worker.workers import make_worker, working

FLUSH = "/v1/datasets/ours/operations/flush"
FAILED = {"state": "failed", "problem": Internal("broken").problem("/v1/jobs/1").model_dump(mode="json")}


@pytest.fixture(autouse=True)
def dataset(house: InProcessApi):
    house.dataset("ours")


def set_columns(house: InProcessApi, **values: Any) -> None:
    """Make every job be like this."""
    with house.services.database.write() as connection:
        connection.execute(update(table).values(finished=now(), **values))


def test_job_that_waits_is_cancelled_at_once(house: InProcessApi):
    job = house.admin.post(FLUSH).json()["id"]

    answer = house.admin.delete(f"/v1/jobs/{job}")

    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert answer.json()["cancelled"] == answer.json()["finished"]
    assert house.admin.get(f"/v1/jobs/{job}").json() == answer.json()


def test_job_that_is_over_stays_as_it_is_when_it_is_cancelled(house: InProcessApi):
    with working(make_worker(house, SqlFlusher(house.services.database))):
        done = house.admin.post(f"{FLUSH}?wait=20").json()

    answer = house.admin.delete(f"/v1/jobs/{done['id']}")

    assert (answer.status_code, answer.json()) == (200, done)


def test_delete_of_a_dataset_cannot_be_cancelled(house: InProcessApi):
    job = house.admin.delete("/v1/datasets/ours?confirm=ours").json()["id"]

    answer = house.admin.delete(f"/v1/jobs/{job}")

    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/job-conflict")
    assert answer.json()["state"] == "queued"


def test_job_that_failed_is_tried_again_and_waited_for(house: InProcessApi):
    job = house.admin.post(FLUSH).json()["id"]
    set_columns(house, **FAILED, attempts=20)

    queued = house.admin.post(f"/v1/jobs/{job}/retry")
    set_columns(house, **FAILED)
    with working(make_worker(house, SqlFlusher(house.services.database))):
        done = house.admin.post(f"/v1/jobs/{job}/retry?wait=20")

    assert (queued.status_code, queued.json()["state"], queued.json()["attempts"]) == (202, "queued", 0)
    assert queued.headers["Location"] == f"/v1/jobs/{job}"
    assert queued.json()["problem"]["detail"] == "broken"
    assert (done.status_code, done.json()["state"], done.json()["problem"]) == (200, "done", None)


def test_job_that_waits_is_not_tried_again(house: InProcessApi):
    job = house.admin.post(FLUSH).json()["id"]

    answer = house.admin.post(f"/v1/jobs/{job}/retry")

    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/job-conflict")


def test_job_of_others_is_open_to_the_administrator(house: InProcessApi):
    job = house.tenant("alice", ours="maintain").post(FLUSH).json()["id"]

    answers = [house.admin.delete(f"/v1/jobs/{job}"), house.admin.post(f"/v1/jobs/{job}/retry")]

    assert [answer.status_code for answer in answers] == [200, 202]


@pytest.mark.parametrize("path", [FLUSH, "/v1/operations/flush"])
def test_job_is_tried_again_only_while_its_tenant_may_do_what_it_does(house: InProcessApi, path: str):
    alice = house.tenant("alice", ours="maintain")
    job = alice.post(path).json()["id"]
    alice.delete(f"/v1/jobs/{job}")
    [grant] = house.admin.get("/v1/admin/tenants/alice/grants").json()["results"]
    house.admin.delete(f"/v1/admin/grants/{grant['id']}")

    answer = alice.post(f"/v1/jobs/{job}/retry")

    assert answer.status_code == 403
    assert alice.get(f"/v1/jobs/{job}").json()["state"] == "cancelled"


def test_cancelling_and_trying_again_are_in_the_audit_log(house: InProcessApi):
    job = house.admin.post(FLUSH).json()["id"]
    house.admin.delete(f"/v1/jobs/{job}")
    house.admin.post(f"/v1/jobs/{job}/retry")

    entries = house.admin.get("/v1/admin/audit").json()["results"]

    assert {(entry["action"], entry["target"]) for entry in entries if job in entry["target"]} == {
        ("cancel_job", f"/v1/jobs/{job}"),
        ("retry_job", f"/v1/jobs/{job}/retry"),
    }


def test_results_are_told_apart_by_operation_in_the_openapi_document(house: InProcessApi):
    schemas = house.nobody.get("/openapi.json").json()["components"]["schemas"]

    [union, null] = schemas["Job"]["properties"]["result"]["anyOf"]
    assert null == {"type": "null"}
    assert union["discriminator"]["propertyName"] == "operation"
    assert set(union["discriminator"]["mapping"]) == set(Operation)
    assert "operation" in schemas["FlushResult"]["required"]
