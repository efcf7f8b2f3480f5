"""Webhook deliveries: signed, in order, at least once; a receiver that does not respond affects no other tenant."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update
from tarn.archive.fetching.addresses import resolve_by_system
from tarn.archive.fetching.dns import Resolve
from tarn.db import outbox
from tarn.db.tables import webhooks as table
from tarn.model.ids import now
from tarn.model.work.event import EventKind
from tarn.settings import Settings
from tarn.worker import deliveries
from tarn.worker.deliveries import Deliveries

from tests.archive.web import listening
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.server import clean_environment
from tests.waiting import wait_until
from tests.worker.receiver import SECRET, Post, Receiver, receiving
from tests.worker.workers import make_worker, working

pytestmark = pytest.mark.both_databases


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"fetch_private_hosts": ("127.0.0.1",), "webhook_timeout": 5.0})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def alice(api: InProcessApi, receiver: Receiver) -> Any:
    """Return a reader of `donations` that has a webhook."""
    api.dataset("donations")
    caller = api.tenant("alice", donations="read")
    assert set_webhook(api, "alice", receiver).status_code == 200
    return caller


def set_webhook(api: InProcessApi, tenant: str, receiver: Receiver, secret: str | None = SECRET, **more: Any) -> Any:
    values = {} if secret is None else {"secret": secret}
    return api.admin.put(f"/v1/admin/tenants/{tenant}/webhooks", {"url": receiver.url, **values, **more})


def shown(api: InProcessApi, tenant: str = "alice") -> dict[str, Any]:
    webhook: dict[str, Any] = api.admin.get(f"/v1/admin/tenants/{tenant}/webhooks").json()
    return webhook


def stream_of(api: InProcessApi, name: str) -> str:
    with api.services.database.read() as connection:
        return str(connection.exec_driver_sql(f"SELECT id FROM datasets WHERE name = '{name}'").scalar_one())


def publish(api: InProcessApi, times: int = 1, name: str = "donations", **options: Any) -> None:
    for seq in range(times):
        with api.services.database.write() as connection:
            outbox.record(
                connection,
                stream_of(api, name),
                EventKind.SNAPSHOT_PUBLISHED,
                snapshot="s",
                seq=seq,
                content=seq,
                operation="flush",
                **options,
            )


def deliver(api: InProcessApi, worker: str = "w", resolve: Resolve = resolve_by_system, **settings: Any) -> None:
    changed = api.services.settings.model_copy(update=settings)
    Deliveries(changed, api.services.database, worker, resolve).step()


def expire_retries_and_leases(api: InProcessApi) -> None:
    """Move all retry times and lease expiries into the past."""
    past = now() - timedelta(hours=1)
    with api.services.database.write() as connection:
        connection.execute(update(table).where(table.c.next_try.is_not(None)).values(next_try=past))
        connection.execute(update(table).where(table.c.leased_until.is_not(None)).values(leased_until=past))


def test_events_are_delivered_once_in_order_and_signed(api: InProcessApi, alice, receiver: Receiver):
    publish(api, 3)

    deliver(api)
    deliver(api)

    assert receiver.numbers() == [2, 3, 4]
    assert all(post.is_signed() for post in receiver.posts)
    assert not any(post.is_signed("another secret of length") for post in receiver.posts)
    assert [post.id for post in receiver.posts] == [f"{stream_of(api, 'donations')}.{number}" for number in (2, 3, 4)]
    state = shown(api)
    assert (state["state"], state["delivered"], state["failed"], state["problem"]) == ("active", 3, 0, None)


@pytest.mark.parametrize("status", [301, 400, 500])
@ONE_DATABASE
def test_rejected_event_blocks_later_events_and_is_sent_again(
    api: InProcessApi, alice, receiver: Receiver, status: int
):
    publish(api, 2)
    receiver.status_of = lambda _: status if len(receiver.posts) < 3 else 200

    deliver(api)
    too_early = len(receiver.posts), shown(api)
    deliver(api)
    for _ in range(2):
        expire_retries_and_leases(api)
        deliver(api)

    assert receiver.numbers() == [2, 2, 2, 3]
    assert len({post.id for post in receiver.posts}) == 2
    attempts, state = too_early
    assert (attempts, state["state"], state["attempts"]) == (1, "failing", 1)
    assert state["problem"] == f"{receiver.url.removesuffix('/hook')} responded with status {status}"
    assert (shown(api)["state"], shown(api)["failed"]) == ("active", 2)


@ONE_DATABASE
def test_webhook_is_given_up_after_the_configured_attempts_and_resumes_when_it_is_set_again(
    api: InProcessApi, alice, receiver: Receiver
):
    publish(api)
    receiver.status_of = lambda _: 500
    for _ in range(4):
        deliver(api, webhook_attempts=3)
        expire_retries_and_leases(api)
    after_failures = len(receiver.posts), shown(api)

    receiver.status_of = lambda _: 200
    set_webhook(api, "alice", receiver, secret=None)
    deliver(api)

    attempts, state = after_failures
    assert (attempts, state["state"], state["attempts"], state["next_try"]) == (3, "given_up", 3, None)
    assert (receiver.numbers(), shown(api)["state"]) == ([2, 2, 2, 2], "active")
    assert receiver.posts[-1].is_signed()


@ONE_DATABASE
def test_tenant_receives_only_events_that_it_selected_and_may_read(api: InProcessApi, alice, receiver: Receiver):
    api.dataset("secrets")
    api.dataset("donations_old")
    set_webhook(api, "alice", receiver, kinds=["snapshot.published"], datasets=["donations", "secrets"])
    publish(api, 1, "secrets")
    publish(api, 1, "donations_old")
    publish(api, 1, audience=["bob"])
    api.admin.post("/v1/datasets/donations/operations/flush")
    publish(api, 1, audience=["alice"])
    publish(api, 1)

    deliver(api)
    grants = api.admin.get("/v1/admin/tenants/alice/grants").json()["results"]
    api.admin.delete(f"/v1/admin/grants/{grants[0]['id']}")
    publish(api, 1)
    deliver(api)

    assert [(post.event["dataset"], post.event["id"]) for post in receiver.posts] == [
        ("donations", 4),
        ("donations", 5),
    ]


@ONE_DATABASE
def test_disabled_tenant_receives_nothing_until_it_is_enabled(api: InProcessApi, alice, receiver: Receiver):
    api.admin.patch("/v1/admin/tenants/alice", {"disabled": True})
    publish(api)
    deliver(api)
    while_disabled = len(receiver.posts)
    api.admin.patch("/v1/admin/tenants/alice", {"disabled": False})
    deliver(api)

    assert (while_disabled, receiver.numbers()) == (0, [2])


@ONE_DATABASE
def test_events_of_new_datasets_are_delivered_from_the_first(api: InProcessApi, receiver: Receiver):
    api.dataset("before")
    api.tenant("alice", any="read")
    set_webhook(api, "alice", receiver)
    api.dataset("behind")

    deliver(api)

    assert [(post.event["dataset"], post.event["kind"]) for post in receiver.posts] == [("behind", "dataset.created")]


@ONE_DATABASE
def test_webhook_that_lags_behind_retention_receives_the_number_of_missed_events(
    api: InProcessApi, alice, receiver: Receiver
):
    publish(api, 3)
    with api.services.database.write() as connection:
        outbox.trim(connection, stream_of(api, "donations"), 3)

    deliver(api)

    assert [(post.event["kind"], post.event["id"]) for post in receiver.posts] == [
        ("missed", 3),
        ("snapshot.published", 4),
    ]
    assert len({post.id for post in receiver.posts}) == 2


def test_worker_killed_between_sending_and_recording_causes_the_same_delivery_again(
    api: InProcessApi, alice, receiver: Receiver
):
    publish(api)
    command = [sys.executable, "-m", "tests.worker.delivery_process", api.services.settings.database_url]

    def kill(_: Post) -> int:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        return 200

    receiver.status_of = kill
    process = subprocess.Popen(command, env=clean_environment(PYTHONPATH=os.getcwd()))
    process.wait(120)
    receiver.status_of = lambda _: 200
    deliver(api)
    while_leased = len(receiver.posts)
    expire_retries_and_leases(api)
    deliver(api)
    deliver(api)

    assert process.returncode == -signal.SIGKILL
    assert while_leased == 1
    first, second = receiver.posts
    assert (first.id, first.body) == (second.id, second.body)
    assert shown(api)["delivered"] == 1


def test_two_workers_send_each_event_once(api: InProcessApi, alice, receiver: Receiver):
    publish(api, 20)
    threads = [threading.Thread(target=deliver, args=[api, worker]) for worker in ("w1", "w2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    deliver(api)

    assert receiver.numbers() == list(range(2, 22))


@ONE_DATABASE
def test_worker_that_lost_its_webhook_lease_records_nothing(api: InProcessApi, alice, receiver: Receiver):
    publish(api)

    def lose(_: Post) -> int:
        receiver.status_of = lambda _: 500
        expire_retries_and_leases(api)
        deliver(api, "other")
        return 200

    receiver.status_of = lose
    deliver(api)

    assert (receiver.numbers(), shown(api)["delivered"], shown(api)["attempts"]) == ([2, 2], 0, 1)


@ONE_DATABASE
def test_dead_or_slow_receivers_do_not_delay_other_tenants(api: InProcessApi, alice, receiver: Receiver):
    released = threading.Event()
    with listening() as unresponsive, receiving() as slow:
        slow.status_of = lambda _: 200 if released.wait(20) else 500
        for number in range(deliveries.THREADS):
            name = f"slow{number}"
            api.tenant(name, donations="read")
            set_webhook(api, name, slow)
        api.tenant("dead", donations="read")
        dead = {"url": f"http://127.0.0.1:{unresponsive.getsockname()[1]}/", "secret": SECRET}
        api.admin.put("/v1/admin/tenants/dead/webhooks", dead)
        with api.services.database.write() as connection:
            failing = {"attempts": 1, "state": "failing"}
            connection.execute(update(table).where(table.c.tenant != "alice").values(**failing))
        publish(api, 2)
        with working(make_worker(api)):
            wait_until(lambda: len(receiver.posts) == 2)
            job = api.admin.delete("/v1/datasets/donations?confirm=donations").json()["id"]
            done = api.admin.get(f"/v1/jobs/{job}?wait=20").json()["state"]
            released.set()

    assert (receiver.numbers()[:2], done) == ([2, 3], "done")


@pytest.mark.parametrize("addresses", [["127.0.0.2"], ["169.254.169.254"], ["10.0.0.1", "127.0.0.1"]])
@ONE_DATABASE
def test_host_that_resolves_to_a_private_address_is_refused_at_each_delivery(
    api: InProcessApi, alice, receiver: Receiver, addresses: list[str]
):
    rebound = receiver.url.replace("127.0.0.1", "rebound.test")
    with api.services.database.write() as connection:
        connection.execute(update(table).values(url=rebound))
    publish(api)

    deliver(api, resolve=lambda *_: addresses)

    assert receiver.posts == []
    assert shown(api)["problem"] == "the host rebound.test is not at a public address"


@ONE_DATABASE
def test_worker_trims_events_over_the_limit(api: InProcessApi):
    api.dataset("donations")
    publish(api, 5)
    stream = stream_of(api, "donations")

    def numbers() -> list[int]:
        with api.services.database.read() as connection:
            return [event.number for event in outbox.after(connection, stream, 0, 100).events]

    with working(make_worker(api, event_max_retained=2)):
        wait_until(lambda: len(numbers()) == 2)

    assert numbers() == [5, 6]
