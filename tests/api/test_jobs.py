"""Jobs over HTTP: cancel and retry."""

from typing import Any

import pytest
from sqlalchemy import update
from tarn.db.tables import jobs as table
from tarn.errors import Internal
from tarn.model.ids import now
from tarn.model.work.job import Operation

from tests.in_process_api import InProcessApi
from tests.worker.flushers import SqlFlusher
from tests.worker.workers import make_worker, working

FLUSH = "/v1/datasets/ours/operations/flush"
FAILED = {"state": "failed", "problem": Internal("broken").problem("/v1/jobs/1").model_dump(mode="json")}


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("ours")


def set_columns(api: InProcessApi, **values: Any) -> None:
    """Set these columns on every job."""
    with api.services.database.write() as connection:
        connection.execute(update(table).values(finished=now(), **values))


def test_queued_job_is_cancelled_at_once(api: InProcessApi):
    job = api.admin.post(FLUSH).json()["id"]

    response = api.admin.delete(f"/v1/jobs/{job}")

    assert (response.status_code, response.json()["state"]) == (200, "cancelled")
    assert response.json()["cancelled"] == response.json()["finished"]
    assert api.admin.get(f"/v1/jobs/{job}").json() == response.json()


def test_finished_job_is_not_changed_by_cancel(api: InProcessApi):
    with working(make_worker(api, SqlFlusher(api.services.database))):
        done = api.admin.post(f"{FLUSH}?wait=20").json()

    response = api.admin.delete(f"/v1/jobs/{done['id']}")

    assert (response.status_code, response.json()) == (200, done)


def test_delete_of_a_dataset_cannot_be_cancelled(api: InProcessApi):
    job = api.admin.delete("/v1/datasets/ours?confirm=ours").json()["id"]

    response = api.admin.delete(f"/v1/jobs/{job}")

    assert (response.status_code, response.json()["type"]) == (409, "/problems/job-conflict")
    assert response.json()["state"] == "queued"


def test_failed_job_is_retried_and_waited_for(api: InProcessApi):
    job = api.admin.post(FLUSH).json()["id"]
    set_columns(api, **FAILED, attempts=20)

    queued = api.admin.post(f"/v1/jobs/{job}/retry")
    set_columns(api, **FAILED)
    with working(make_worker(api, SqlFlusher(api.services.database))):
        done = api.admin.post(f"/v1/jobs/{job}/retry?wait=20")

    assert (queued.status_code, queued.json()["state"], queued.json()["attempts"]) == (202, "queued", 0)
    assert queued.headers["Location"] == f"/v1/jobs/{job}"
    assert queued.json()["problem"]["detail"] == "broken"
    assert (done.status_code, done.json()["state"], done.json()["problem"]) == (200, "done", None)


def test_queued_job_is_not_retried(api: InProcessApi):
    job = api.admin.post(FLUSH).json()["id"]

    response = api.admin.post(f"/v1/jobs/{job}/retry")

    assert (response.status_code, response.json()["type"]) == (409, "/problems/job-conflict")


def test_administrator_may_cancel_and_retry_jobs_of_other_tenants(api: InProcessApi):
    job = api.tenant("alice", ours="maintain").post(FLUSH).json()["id"]

    responses = [api.admin.delete(f"/v1/jobs/{job}"), api.admin.post(f"/v1/jobs/{job}/retry")]

    assert [response.status_code for response in responses] == [200, 202]


@pytest.mark.parametrize("path", [FLUSH, "/v1/operations/flush"])
def test_job_is_retried_only_while_its_tenant_has_the_permission(api: InProcessApi, path: str):
    alice = api.tenant("alice", ours="maintain")
    job = alice.post(path).json()["id"]
    alice.delete(f"/v1/jobs/{job}")
    [grant] = api.admin.get("/v1/admin/tenants/alice/grants").json()["results"]
    api.admin.delete(f"/v1/admin/grants/{grant['id']}")

    response = alice.post(f"/v1/jobs/{job}/retry")

    assert response.status_code == 403
    assert alice.get(f"/v1/jobs/{job}").json()["state"] == "cancelled"


def test_cancel_and_retry_are_in_the_audit_log(api: InProcessApi):
    job = api.admin.post(FLUSH).json()["id"]
    api.admin.delete(f"/v1/jobs/{job}")
    api.admin.post(f"/v1/jobs/{job}/retry")

    entries = api.admin.get("/v1/admin/audit").json()["results"]

    assert {(entry["action"], entry["target"]) for entry in entries if job in entry["target"]} == {
        ("cancel_job", f"/v1/jobs/{job}"),
        ("retry_job", f"/v1/jobs/{job}/retry"),
    }


def test_results_are_distinguished_by_operation_in_the_openapi_document(api: InProcessApi):
    schemas = api.anonymous.get("/openapi.json").json()["components"]["schemas"]

    [union, null] = schemas["Job"]["properties"]["result"]["anyOf"]
    assert null == {"type": "null"}
    assert union["discriminator"]["propertyName"] == "operation"
    assert set(union["discriminator"]["mapping"]) == set(Operation)
    assert "operation" in schemas["FlushResult"]["required"]
