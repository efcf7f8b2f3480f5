"""Webhooks of tenants over HTTP."""

import pytest
from sqlalchemy import select
from tarn.db.tables import audit, idempotency, webhook_cursors, webhooks
from tarn.model.work.event import EventKind
from tarn.settings import Settings

from tests.in_process_api import ONE_DATABASE, InProcessApi

SECRET = "canary-of-a-webhook-secret"
URL = "http://127.0.0.1:9/hook?token=abc"
WEBHOOKS = "/v1/admin/tenants/alice/webhooks"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"fetch_private_hosts": ("127.0.0.1",)})


def test_webhook_is_set_shown_without_its_secret_and_deleted(api: InProcessApi):
    api.tenant("alice")
    api.dataset("donations")
    missing = api.admin.get(WEBHOOKS)
    created = api.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET, "kinds": ["snapshot.published"]})
    shown = api.admin.get(WEBHOOKS)
    changed = api.admin.put(WEBHOOKS, {"url": f"{URL}2", "datasets": ["donations"]})
    deleted, again = api.admin.delete(WEBHOOKS), api.admin.delete(WEBHOOKS)

    assert (missing.status_code, missing.json()["type"]) == (404, "/problems/webhook-not-found")
    assert created.status_code == 200
    assert shown.json() == created.json()
    assert (created.json()["url"], created.json()["kinds"], created.json()["datasets"]) == (
        URL,
        ["snapshot.published"],
        ["*"],
    )
    assert (changed.json()["id"], changed.json()["kinds"]) == (created.json()["id"], [])
    assert (deleted.status_code, again.status_code) == (204, 404)
    assert not any(SECRET in response.text for response in (created, shown, changed))


@ONE_DATABASE
def test_secret_is_stored_only_in_its_row(api: InProcessApi, capfd):
    api.tenant("alice")
    api.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET}, headers={"Idempotency-Key": "once"})
    api.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET, "kinds": ["nothing"]})

    with api.services.database.read() as connection:
        rows = [str(row) for table in (audit, idempotency) for row in connection.execute(select(table))]
        stored = connection.execute(select(webhooks.c.secret)).scalar_one()
    assert stored == SECRET
    assert rows
    assert not any(SECRET in row for row in rows)
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": URL}, "secret"),
        ({"url": URL, "secret": "short"}, "secret"),
        ({"url": "ftp://127.0.0.1/", "secret": SECRET}, "url"),
        ({"url": "http://user:pass@127.0.0.1/", "secret": SECRET}, "url"),
        ({"url": "http://127.0.0.2/", "secret": SECRET}, "url"),
        ({"url": "http://[::1]/", "secret": SECRET}, "url"),
        ({"url": "http://169.254.169.254/latest", "secret": SECRET}, "url"),
        ({"url": URL, "secret": SECRET, "kinds": ["everything"]}, "kinds.0"),
        ({"url": URL, "secret": SECRET, "datasets": ["Not A Pattern"]}, "datasets.0"),
    ],
)
@ONE_DATABASE
def test_invalid_webhook_is_refused_with_its_field(api: InProcessApi, body, field: str):
    api.tenant("alice")

    refused = api.admin.put(WEBHOOKS, body)

    assert refused.status_code == 422
    assert [fault["field"] for fault in refused.json()["errors"]] == [field]
    assert api.admin.get(WEBHOOKS).status_code == 404


@ONE_DATABASE
def test_webhook_is_deleted_with_its_tenant(api: InProcessApi):
    api.dataset("donations")
    api.tenant("alice")
    api.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET})

    assert api.admin.delete("/v1/admin/tenants/alice").status_code == 204

    assert api.admin.get(WEBHOOKS).json()["type"] == "/problems/tenant-not-found"
    with api.services.database.read() as connection:
        assert [connection.execute(select(table)).all() for table in (webhooks, webhook_cursors)] == [[], []]


@ONE_DATABASE
def test_webhooks_require_the_administrator(api: InProcessApi):
    alice = api.tenant("alice", any="write")

    responses = [alice.get(WEBHOOKS), alice.put(WEBHOOKS, {"url": URL, "secret": SECRET}), alice.delete(WEBHOOKS)]

    assert [response.status_code for response in responses] == [403, 403, 403]


@ONE_DATABASE
def test_metrics_count_webhooks_and_deliveries(api: InProcessApi):
    api.tenant("alice")
    api.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET})

    lines = api.anonymous.get("/metrics").text.splitlines()

    assert 'tarn_webhooks{state="active"} 1.0' in lines
    assert 'tarn_webhook_deliveries_total{outcome="delivered"} 0.0' in lines
    assert "tarn_event_streams 0.0" in lines


@ONE_DATABASE
def test_openapi_describes_events_of_streams_and_webhooks_by_kind(api: InProcessApi):
    document = api.anonymous.get("/openapi.json").json()
    followed = [document["paths"][path]["get"] for path in ("/v1/datasets/{dataset}/events", "/v1/jobs/{job}/events")]
    streams = [operation["responses"]["200"]["content"]["text/event-stream"]["schema"] for operation in followed]
    sent = document["webhooks"]["event"]["post"]["requestBody"]["content"]["application/json"]["schema"]

    assert [stream["type"] for stream in streams] == ["string", "string"]
    assert [stream["contentSchema"] for stream in streams] == [sent, sent]
    assert sent["discriminator"]["mapping"].keys() == set(EventKind)
    assert all(
        ref.rsplit("/", 1)[1] in document["components"]["schemas"] for ref in sent["discriminator"]["mapping"].values()
    )
