"""Webhooks of tenants over HTTP."""

import pytest
from sqlalchemy import select
from tarn.db.tables import audit, idempotency, webhook_cursors, webhooks
from tarn.model.event import EventKind
from tarn.settings import Settings

from tests.in_process_api import ONE_DATABASE, InProcessApi

SECRET = "canary-of-a-webhook-secret"
URL = "http://127.0.0.1:9/hook?token=abc"
WEBHOOKS = "/v1/admin/tenants/alice/webhooks"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"fetch_private_hosts": ("127.0.0.1",)})


def test_webhook_is_set_shown_without_its_secret_and_deleted(house: InProcessApi):
    house.tenant("alice")
    house.dataset("donations")
    missing = house.admin.get(WEBHOOKS)
    made = house.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET, "kinds": ["snapshot.published"]})
    shown = house.admin.get(WEBHOOKS)
    changed = house.admin.put(WEBHOOKS, {"url": f"{URL}2", "datasets": ["donations"]})
    deleted, again = house.admin.delete(WEBHOOKS), house.admin.delete(WEBHOOKS)

    assert (missing.status_code, missing.json()["type"]) == (404, "/problems/webhook-not-found")
    assert made.status_code == 200
    assert shown.json() == made.json()
    assert (made.json()["url"], made.json()["kinds"], made.json()["datasets"]) == (URL, ["snapshot.published"], ["*"])
    assert (changed.json()["id"], changed.json()["kinds"]) == (made.json()["id"], [])
    assert (deleted.status_code, again.status_code) == (204, 404)
    assert not any(SECRET in answer.text for answer in (made, shown, changed))


@ONE_DATABASE
def test_secret_is_nowhere_but_in_its_row(house: InProcessApi, capfd):
    house.tenant("alice")
    house.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET}, headers={"Idempotency-Key": "once"})
    house.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET, "kinds": ["nothing"]})

    with house.services.database.read() as connection:
        rows = [str(row) for table in (audit, idempotency) for row in connection.execute(select(table))]
        kept = connection.execute(select(webhooks.c.secret)).scalar_one()
    assert kept == SECRET
    assert rows
    assert not any(SECRET in row for row in rows)
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("given", "field"),
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
def test_webhook_that_cannot_be_served_is_refused_with_its_field(house: InProcessApi, given, field: str):
    house.tenant("alice")

    refused = house.admin.put(WEBHOOKS, given)

    assert refused.status_code == 422
    assert [fault["field"] for fault in refused.json()["errors"]] == [field]
    assert house.admin.get(WEBHOOKS).status_code == 404


@ONE_DATABASE
def test_webhook_goes_with_its_tenant(house: InProcessApi):
    house.dataset("donations")
    house.tenant("alice")
    house.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET})

    assert house.admin.delete("/v1/admin/tenants/alice").status_code == 204

    assert house.admin.get(WEBHOOKS).json()["type"] == "/problems/tenant-not-found"
    with house.services.database.read() as connection:
        assert [connection.execute(select(table)).all() for table in (webhooks, webhook_cursors)] == [[], []]


@ONE_DATABASE
def test_webhooks_are_the_administrators_alone(house: InProcessApi):
    alice = house.tenant("alice", any="write")

    answers = [alice.get(WEBHOOKS), alice.put(WEBHOOKS, {"url": URL, "secret": SECRET}), alice.delete(WEBHOOKS)]

    assert [answer.status_code for answer in answers] == [403, 403, 403]


@ONE_DATABASE
def test_metrics_tell_of_webhooks_and_deliveries(house: InProcessApi):
    house.tenant("alice")
    house.admin.put(WEBHOOKS, {"url": URL, "secret": SECRET})

    lines = house.nobody.get("/metrics").text.splitlines()

    assert 'tarn_webhooks{state="active"} 1.0' in lines
    assert 'tarn_webhook_deliveries_total{outcome="delivered"} 0.0' in lines
    assert "tarn_event_streams 0.0" in lines


@ONE_DATABASE
def test_openapi_tells_what_streams_and_webhooks_hold_by_kind(house: InProcessApi):
    document = house.nobody.get("/openapi.json").json()
    followed = [document["paths"][path]["get"] for path in ("/v1/datasets/{dataset}/events", "/v1/jobs/{job}/events")]
    streams = [operation["responses"]["200"]["content"]["text/event-stream"]["schema"] for operation in followed]
    sent = document["webhooks"]["event"]["post"]["requestBody"]["content"]["application/json"]["schema"]

    assert [stream["type"] for stream in streams] == ["string", "string"]
    assert [stream["contentSchema"] for stream in streams] == [sent, sent]
    assert sent["discriminator"]["mapping"].keys() == set(EventKind)
    assert all(
        ref.rsplit("/", 1)[1] in document["components"]["schemas"] for ref in sent["discriminator"]["mapping"].values()
    )
