"""The queue over HTTP: add, list, pop, acknowledge, retry and delete items; isolation between tenants."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import UUID

import orjson
import pytest
import uuid_utils
from sqlalchemy import update
from tarn.coordination import queue
from tarn.datasets.registry import Dataset
from tarn.db import database_clock
from tarn.db.tables import events
from tarn.db.tables import queue as queue_table
from tarn.model import ids
from tarn.model.work.job import MOST_ATTEMPTS

from tests.in_process_api import ONE_DATABASE, Caller, InProcessApi

pytestmark = pytest.mark.both_databases

BASE = "/v1/datasets/test/queue"
JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane"]}}
UPSERT = {"action": "UPSERT", "resource": "entity", "payload": JANE}


@pytest.fixture
def alice(api: InProcessApi, dataset: Dataset) -> Caller:
    return api.tenant("alice", test="write")


@pytest.fixture
def bob(api: InProcessApi, dataset: Dataset) -> Caller:
    return api.tenant("bob", test="read")


def add(caller: Caller, **changes) -> dict:
    response = caller.post(BASE, UPSERT | changes)
    assert response.status_code == 201, response.text
    return response.json()


def pop(caller: Caller, **body) -> dict | None:
    response = caller.post(f"{BASE}/pop", body or None)
    assert response.status_code in (200, 204), response.text
    return response.json() if response.status_code == 200 else None


def ack(caller: Caller, popped: dict, **more):
    return caller.post(f"{BASE}/{popped['id']}/ack", {"token": popped["token"]} | more)


def listed(caller: Caller, query: str = "") -> list[str]:
    return [item["id"] for item in caller.get(f"{BASE}{query}").json()["results"]]


def advance_time(api: InProcessApi, **columns: float) -> None:
    """Move a column of every item into the past by so many seconds."""
    with api.services.database.write() as connection:
        for row in connection.execute(queue_table.select()).all():
            earlier = {
                name: row._mapping[name] - timedelta(seconds=seconds)
                for name, seconds in columns.items()
                if row._mapping[name] is not None
            }
            if earlier:
                connection.execute(update(queue_table).where(queue_table.c.id == row.id).values(**earlier))


def test_item_is_accepted_shown_and_mirrored(api: InProcessApi, dataset: Dataset, alice: Caller):
    response = alice.post(BASE, UPSERT)
    item = response.json()

    assert UUID(item["id"]).version == 7
    assert (item["tenant"], item["to"], item["state"], item["attempts"]) == ("alice", None, "pending", 0)
    assert alice.get(response.headers["Location"]).json() == item
    shown = orjson.loads(api.services.store.get(dataset.layout.queue_item("alice", item["id"])))
    assert (shown["id"], shown["payload"]) == (item["id"], JANE)
    entry = api.admin.get("/v1/admin/audit?tenant=alice").json()["results"][0]
    assert (entry["action"], entry["target"]) == ("add_queue_item", f"{BASE}/{item['id']}")


@pytest.mark.parametrize("hours", [-1, 1])
def test_ids_increase_in_order_of_acceptance_although_the_clock_jumps(
    api: InProcessApi, dataset: Dataset, alice: Caller, monkeypatch, hours: int
):
    before = [add(alice)["id"] for _ in range(3)]
    shift = hours * 3600 * 10**9
    monkeypatch.setattr(queue, "new_id", lambda: str(uuid_utils.uuid7(nanoseconds=time.time_ns() + shift)))
    during = [add(alice)["id"] for _ in range(3)]
    monkeypatch.setattr(queue, "new_id", ids.new_id)
    after = [add(alice)["id"] for _ in range(3)]

    expected = before + during + after
    assert sorted(expected) == expected
    assert {UUID(each).version for each in expected} == {7}
    assert listed(alice) == expected


@ONE_DATABASE
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"action": "PATCH"}, "action"),
        ({"resource": "mapping"}, "resource"),
        ({"payload": []}, "payload"),
        ({"payload": {"id": "x", "schema": "Parson"}}, "payload.schema"),
        ({"payload": {"id": "x", "schema": "Person", "properties": {"nom": ["x"]}}}, "payload.properties.nom"),
        ({"payload": {"schema": "Person"}}, "payload.id"),
        ({"action": "DELETE", "payload": {}}, "payload.id"),
        ({"action": "DELETE", "payload": {"id": "x", "schema": "Person"}}, "payload.schema"),
        ({"resource": "file", "payload": {"path": "a"}}, "payload.uri"),
        ({"resource": "file", "payload": {"uri": "https://example.org/a", "path": "../a"}}, "payload.path"),
        ({"resource": "file", "payload": {"uri": "ftp://example.org/a"}}, "uri"),
        ({"action": "DELETE", "resource": "file", "payload": {"checksum": "x", "id": "y"}}, "payload.checksum"),
        ({"to": "nobody"}, "to"),
        ({"to": "unrelated"}, "to"),
        ({"to": "lakehouse"}, "to"),
        ({"origin": "a/b"}, "origin"),
        ({"more": 1}, "more"),
    ],
)
def test_item_that_no_worker_can_process_is_refused_with_its_field(
    api: InProcessApi, alice: Caller, changes, field: str
):
    api.tenant("unrelated")
    response = alice.post(BASE, UPSERT | changes)

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)
    assert listed(alice) == []


def test_reader_may_send_items_to_tenants_but_not_to_the_worker(api: InProcessApi, alice: Caller, bob: Caller):
    refused = bob.post(BASE, UPSERT)

    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/forbidden")
    assert bob.post(BASE, UPSERT | {"to": "alice", "payload": {"anything": [1]}}).status_code == 201


@ONE_DATABASE
def test_replayed_request_is_one_item(api: InProcessApi, alice: Caller):
    key = {"Idempotency-Key": "once"}
    with ThreadPoolExecutor(4) as pool:
        responses = [
            response.json() for response in pool.map(lambda _: alice.post(BASE, UPSERT, headers=key), range(4))
        ]
    other = alice.post(BASE, UPSERT | {"shared": True}, headers=key)

    assert [response["id"] for response in responses] == 4 * listed(alice)
    assert other.json()["type"] == "/problems/idempotency-mismatch"


@ONE_DATABASE
def test_item_over_the_limit_of_its_tenant_is_refused_with_retry_after(
    api: InProcessApi, dataset: Dataset, alice: Caller
):
    small = api.with_settings(queue_max_items=2)
    caller = small.with_key(str(alice.key))
    add(caller)
    add(caller)
    refused = caller.post(BASE, UPSERT)

    assert (refused.status_code, refused.json()["type"]) == (429, "/problems/backpressure")
    assert "Retry-After" in refused.headers


# Items for tenants


def test_item_for_a_tenant_is_popped_acknowledged_and_done(api: InProcessApi, alice: Caller, bob: Caller):
    sent = [add(alice, to="bob", payload={"number": number}) for number in range(2)]
    add(alice)
    first, second = pop(bob), pop(bob, lease=5)

    assert first is not None
    assert second is not None
    assert [first["id"], second["id"]] == [item["id"] for item in sent]
    assert pop(bob) is None
    assert pop(alice) is None
    assert ack(bob, first).json()["state"] == "done"
    assert ack(bob, first).json()["state"] == "done", "a repeated acknowledgement changes nothing"
    assert alice.get(f"{BASE}/{first['id']}").json()["state"] == "done"
    assert listed(alice, "?state=done") == [first["id"]]
    assert "token" not in alice.get(f"{BASE}/{first['id']}").text


def test_item_with_an_expired_lease_is_redelivered_and_done_once(api: InProcessApi, alice: Caller, bob: Caller):
    add(alice, to="bob")
    first = pop(bob, lease=60)
    assert first is not None
    advance_time(api, leased_until=61)
    second = pop(bob)
    assert second is not None

    assert (second["id"], second["attempts"]) == (first["id"], 2)
    assert ack(bob, first).json()["type"] == "/problems/lock-lost"
    assert ack(bob, second).json()["state"] == "done"
    assert pop(bob) is None


def test_item_with_an_expired_lease_may_be_acknowledged_until_it_is_redelivered(
    api: InProcessApi, alice: Caller, bob: Caller
):
    add(alice, to="bob")
    popped = pop(bob)
    assert popped is not None
    advance_time(api, leased_until=61)

    assert ack(bob, popped).json()["state"] == "done"


@pytest.mark.parametrize("hours", [-1, 1])
def test_lease_of_an_item_is_not_affected_by_a_clock_that_jumps(
    api: InProcessApi, alice: Caller, bob: Caller, monkeypatch, hours: int
):
    add(alice, to="bob")
    popped = pop(bob, lease=600)
    assert popped is not None
    real = ids.now
    monkeypatch.setattr(database_clock, "now", lambda: real() + timedelta(hours=hours))

    assert pop(bob) is None
    advance_time(api, leased_until=601)
    again = pop(bob)
    assert again is not None
    assert again["id"] == popped["id"]


def test_failed_item_is_retried_with_increasing_delay_and_dies_with_its_problem(
    api: InProcessApi, alice: Caller, bob: Caller
):
    add(alice, to="bob")
    waits = []
    for _ in range(MOST_ATTEMPTS):
        popped = pop(bob)
        assert popped is not None
        response = ack(bob, popped, error="the archive is closed").json()
        assert pop(bob) is None
        waits.append(response["not_before"])
        advance_time(api, not_before=400)

    assert (response["state"], response["problem"]["type"]) == ("dead", "/problems/queue-item-failed")
    assert response["problem"]["detail"] == "the archive is closed"
    assert waits[-1] is None
    assert None not in waits[:-1]
    assert popped is not None
    assert ack(bob, popped).json()["type"] == "/problems/lock-lost"


def test_item_that_is_popped_and_never_acknowledged_dies(api: InProcessApi, alice: Caller, bob: Caller):
    item = add(alice, to="bob")
    for _ in range(MOST_ATTEMPTS):
        assert pop(bob) is not None
        advance_time(api, leased_until=61)

    assert pop(bob) is None
    assert alice.get(f"{BASE}/{item['id']}").json()["state"] == "dead"
    again = bob.post(f"{BASE}/{item['id']}/retry").json()
    assert (again["state"], again["attempts"]) == ("pending", 0)
    assert pop(bob) is not None


@ONE_DATABASE
def test_retry_of_an_item_that_is_not_dead_is_refused(api: InProcessApi, alice: Caller):
    item = add(alice)

    response = alice.post(f"{BASE}/{item['id']}/retry")
    assert (response.status_code, response.json()["type"], response.json()["state"]) == (
        409, "/problems/queue-item-conflict", "pending",
    )  # fmt: skip


def test_item_deleted_by_its_sender_is_never_done(api: InProcessApi, dataset: Dataset, alice: Caller, bob: Caller):
    item = add(alice, to="bob")
    popped = pop(bob)
    assert popped is not None

    assert bob.delete(f"{BASE}/{item['id']}").status_code == 403
    assert alice.delete(f"{BASE}/{item['id']}").status_code == 204
    assert ack(bob, popped).json()["type"] == "/problems/queue-item-not-found"
    assert api.services.store.head(dataset.layout.queue_item("alice", item["id"])) is None


def test_concurrent_pops_return_different_items(api: InProcessApi, alice: Caller, bob: Caller):
    sent = [add(alice, to="bob")["id"] for _ in range(6)]
    with ThreadPoolExecutor(8) as pool:
        popped = [item for item in pool.map(lambda _: pop(bob), range(8)) if item is not None]

    assert sorted(item["id"] for item in popped) == sent


# Visibility


def test_items_of_other_tenants_are_not_found(api: InProcessApi, dataset: Dataset, alice: Caller, bob: Caller):
    unrelated = api.tenant("unrelated", other="admin")
    item = add(alice)
    path = f"{BASE}/{item['id']}"

    for response in (
        bob.get(path),
        bob.delete(path),
        bob.post(f"{path}/retry"),
        bob.post(f"{path}/ack", {"token": "x"}),
        api.admin.get(path),
    ):
        assert (response.status_code, response.json()["type"]) == (404, "/problems/queue-item-not-found")
    assert listed(bob) == listed(bob, "?from=alice") == []
    assert unrelated.get(path).json()["type"] == "/problems/dataset-not-found"
    api.dataset("other")
    assert unrelated.get(f"/v1/datasets/other/queue/{item['id']}").status_code == 404


def test_tenant_reads_the_shared_items_of_another(api: InProcessApi, alice: Caller, bob: Caller):
    first = add(alice, shared=True)["id"]
    add(alice)
    addressed = add(alice, to="bob")["id"]
    assert listed(bob, "?from=alice") == [first, addressed]

    last = add(alice, shared=True)["id"]
    assert listed(bob, f"?from=alice&after={addressed}") == [last]
    assert bob.get(f"{BASE}/{first}").json()["payload"] == JANE
    assert listed(bob) == [addressed], "shared items are not in its own list"
    assert bob.delete(f"{BASE}/{first}").status_code == 403
    assert bob.post(f"{BASE}/{first}/retry").status_code == 404


@ONE_DATABASE
def test_list_is_paged_in_order(api: InProcessApi, alice: Caller):
    sent = [add(alice)["id"] for _ in range(5)]
    page = alice.get(f"{BASE}?limit=2&after={sent[0]}").json()
    rest = alice.get(f"{BASE}?limit=3&after={sent[0]}&cursor={page['next']}").json()

    assert [item["id"] for item in page["results"] + rest["results"]] == sent[1:]
    assert rest["next"] is None


@pytest.mark.parametrize(
    ("sent", "audience"), [({"to": "bob"}, ["alice", "bob"]), ({}, ["alice"]), ({"shared": True}, None)]
)
def test_outcome_of_an_item_is_an_event_for_those_who_may_read_it(
    api: InProcessApi, dataset: Dataset, alice: Caller, bob: Caller, sent: dict, audience: list[str] | None
):
    item = add(alice, **sent)

    with api.services.database.read() as connection:
        rows = connection.execute(events.select().where(events.c.kind == "queue.item")).all()
    assert [(row.stream, row.data["item"], row.data["state"], row.audience) for row in rows] == [
        (dataset.id, item["id"], "pending", audience)
    ]
