"""Webhooks: signed, in order, at least once, and nobody harmed by a receiver that does not answer."""

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
from tarn.archive.addresses import resolve_by_system
from tarn.archive.dns import Resolve
from tarn.db import outbox as events
from tarn.db.tables import webhooks as table
from tarn.model.event import EventKind
from tarn.model.ids import now
from tarn.settings import Settings
from tarn.worker import deliveries
from tarn.worker.deliveries import Deliveries

from tests.archive.web import listening
from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.server import clean_environment
from tests.waiting import wait_until
from tests.worker.receiver import SECRET, Post, Receiver, receiving
from tests.worker.workers import make_worker, working


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"fetch_private_hosts": ("127.0.0.1",), "webhook_patience": 5.0})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def alice(house: InProcessApi, receiver: Receiver) -> Any:
    """A reader of `donations`, with a webhook."""
    house.dataset("donations")
    caller = house.tenant("alice", donations="read")
    assert set_webhook(house, "alice", receiver).status_code == 200
    return caller


def set_webhook(house: InProcessApi, tenant: str, receiver: Receiver, secret: str | None = SECRET, **more: Any) -> Any:
    given = {} if secret is None else {"secret": secret}
    return house.admin.put(f"/v1/admin/tenants/{tenant}/webhooks", {"url": receiver.url, **given, **more})


def shown(house: InProcessApi, tenant: str = "alice") -> dict[str, Any]:
    found: dict[str, Any] = house.admin.get(f"/v1/admin/tenants/{tenant}/webhooks").json()
    return found


def stream_of(house: InProcessApi, name: str) -> str:
    with house.services.database.read() as connection:
        return str(connection.exec_driver_sql(f"SELECT id FROM datasets WHERE name = '{name}'").scalar_one())


def publish(house: InProcessApi, times: int = 1, name: str = "donations", **options: Any) -> None:
    for seq in range(times):
        with house.services.database.write() as connection:
            events.record(
                connection,
                stream_of(house, name),
                EventKind.SNAPSHOT_PUBLISHED,
                snapshot="s",
                seq=seq,
                content=seq,
                operation="flush",
                **options,
            )


def deliver(house: InProcessApi, worker: str = "w", resolve: Resolve = resolve_by_system, **settings: Any) -> None:
    changed = house.services.settings.model_copy(update=settings)
    Deliveries(changed, house.services.database, worker, resolve).step()


def let_time_pass(house: InProcessApi) -> None:
    """Every wait and every lease is over."""
    past = now() - timedelta(hours=1)
    with house.services.database.write() as connection:
        connection.execute(update(table).where(table.c.next_try.is_not(None)).values(next_try=past))
        connection.execute(update(table).where(table.c.leased_until.is_not(None)).values(leased_until=past))


def test_events_arrive_once_each_in_order_and_signed(house: InProcessApi, alice, receiver: Receiver):
    publish(house, 3)

    deliver(house)
    deliver(house)

    assert receiver.numbers() == [2, 3, 4]
    assert all(post.is_signed() for post in receiver.posts)
    assert not any(post.is_signed("another secret of length") for post in receiver.posts)
    assert [post.id for post in receiver.posts] == [f"{stream_of(house, 'donations')}.{number}" for number in (2, 3, 4)]
    state = shown(house)
    assert (state["state"], state["delivered"], state["failed"], state["problem"]) == ("active", 3, 0, None)


@pytest.mark.parametrize("status", [301, 400, 500])
@ONE_DATABASE
def test_event_that_is_not_taken_holds_up_those_behind_it_and_is_sent_again(
    house: InProcessApi, alice, receiver: Receiver, status: int
):
    publish(house, 2)
    receiver.answer = lambda _: status if len(receiver.posts) < 3 else 200

    deliver(house)
    too_early = len(receiver.posts), shown(house)
    deliver(house)
    for _ in range(2):
        let_time_pass(house)
        deliver(house)

    assert receiver.numbers() == [2, 2, 2, 3]
    assert len({post.id for post in receiver.posts}) == 2
    attempts, state = too_early
    assert (attempts, state["state"], state["attempts"]) == (1, "failing", 1)
    assert state["problem"] == f"{receiver.url.removesuffix('/hook')} answers {status}"
    assert (shown(house)["state"], shown(house)["failed"]) == ("active", 2)


@ONE_DATABASE
def test_webhook_is_given_up_after_so_many_attempts_and_goes_on_when_it_is_set_again(
    house: InProcessApi, alice, receiver: Receiver
):
    publish(house)
    receiver.answer = lambda _: 500
    for _ in range(4):
        deliver(house, webhook_attempts=3)
        let_time_pass(house)
    given_up = len(receiver.posts), shown(house)

    receiver.answer = lambda _: 200
    set_webhook(house, "alice", receiver, secret=None)
    deliver(house)

    attempts, state = given_up
    assert (attempts, state["state"], state["attempts"], state["next_try"]) == (3, "given_up", 3, None)
    assert (receiver.numbers(), shown(house)["state"]) == ([2, 2, 2, 2], "active")
    assert receiver.posts[-1].is_signed()


@ONE_DATABASE
def test_tenant_is_sent_only_what_it_chose_and_may_read(house: InProcessApi, alice, receiver: Receiver):
    house.dataset("secrets")
    house.dataset("donations_old")
    set_webhook(house, "alice", receiver, kinds=["snapshot.published"], datasets=["donations", "secrets"])
    publish(house, 1, "secrets")
    publish(house, 1, "donations_old")
    publish(house, 1, audience=["bob"])
    house.admin.post("/v1/datasets/donations/operations/flush")
    publish(house, 1, audience=["alice"])
    publish(house, 1)

    deliver(house)
    grants = house.admin.get("/v1/admin/tenants/alice/grants").json()["results"]
    house.admin.delete(f"/v1/admin/grants/{grants[0]['id']}")
    publish(house, 1)
    deliver(house)

    assert [(post.event["dataset"], post.event["id"]) for post in receiver.posts] == [
        ("donations", 4),
        ("donations", 5),
    ]


@ONE_DATABASE
def test_tenant_that_is_disabled_is_sent_nothing_until_it_is_enabled(house: InProcessApi, alice, receiver: Receiver):
    house.admin.patch("/v1/admin/tenants/alice", {"disabled": True})
    publish(house)
    deliver(house)
    while_disabled = len(receiver.posts)
    house.admin.patch("/v1/admin/tenants/alice", {"disabled": False})
    deliver(house)

    assert (while_disabled, receiver.numbers()) == (0, [2])


@ONE_DATABASE
def test_new_datasets_are_told_from_their_beginning(house: InProcessApi, receiver: Receiver):
    house.dataset("before")
    house.tenant("alice", any="read")
    set_webhook(house, "alice", receiver)
    house.dataset("behind")

    deliver(house)

    assert [(post.event["dataset"], post.event["kind"]) for post in receiver.posts] == [("behind", "dataset.created")]


@ONE_DATABASE
def test_webhook_that_was_behind_for_too_long_is_told_what_it_missed(house: InProcessApi, alice, receiver: Receiver):
    publish(house, 3)
    with house.services.database.write() as connection:
        events.trim(connection, stream_of(house, "donations"), 3)

    deliver(house)

    assert [(post.event["kind"], post.event["id"]) for post in receiver.posts] == [
        ("missed", 3),
        ("snapshot.published", 4),
    ]
    assert len({post.id for post in receiver.posts}) == 2


def test_worker_killed_between_sending_and_recording_leads_to_the_same_delivery_again(
    house: InProcessApi, alice, receiver: Receiver
):
    publish(house)
    command = [sys.executable, "-m", "tests.worker.delivery_process", house.services.settings.database_url]

    def kill(_: Post) -> int:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        return 200

    receiver.answer = kill
    process = subprocess.Popen(command, env=clean_environment(PYTHONPATH=os.getcwd()))
    process.wait(120)
    receiver.answer = lambda _: 200
    deliver(house)
    while_leased = len(receiver.posts)
    let_time_pass(house)
    deliver(house)
    deliver(house)

    assert process.returncode == -signal.SIGKILL
    assert while_leased == 1
    first, second = receiver.posts
    assert (first.id, first.body) == (second.id, second.body)
    assert shown(house)["delivered"] == 1


def test_two_workers_send_each_event_once(house: InProcessApi, alice, receiver: Receiver):
    publish(house, 20)
    threads = [threading.Thread(target=deliver, args=[house, worker]) for worker in ("w1", "w2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    deliver(house)

    assert receiver.numbers() == list(range(2, 22))


@ONE_DATABASE
def test_worker_that_lost_its_webhook_moves_nothing(house: InProcessApi, alice, receiver: Receiver):
    publish(house)

    def lose(_: Post) -> int:
        receiver.answer = lambda _: 500
        let_time_pass(house)
        deliver(house, "other")
        return 200

    receiver.answer = lose
    deliver(house)

    assert (receiver.numbers(), shown(house)["delivered"], shown(house)["attempts"]) == ([2, 2], 0, 1)


@ONE_DATABASE
def test_receiver_that_is_dead_or_slow_keeps_no_other_tenant_waiting(house: InProcessApi, alice, receiver: Receiver):
    released = threading.Event()
    with listening() as silent, receiving() as slow:
        slow.answer = lambda _: 200 if released.wait(20) else 500
        for number in range(deliveries.THREADS):
            name = f"slow{number}"
            house.tenant(name, donations="read")
            set_webhook(house, name, slow)
        house.tenant("dead", donations="read")
        dead = {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/", "secret": SECRET}
        house.admin.put("/v1/admin/tenants/dead/webhooks", dead)
        with house.services.database.write() as connection:
            failing = {"attempts": 1, "state": "failing"}
            connection.execute(update(table).where(table.c.tenant != "alice").values(**failing))
        publish(house, 2)
        with working(make_worker(house)):
            wait_until(lambda: len(receiver.posts) == 2)
            job = house.admin.delete("/v1/datasets/donations?confirm=donations").json()["id"]
            done = house.admin.get(f"/v1/jobs/{job}?wait=20").json()["state"]
            released.set()

    assert (receiver.numbers()[:2], done) == ([2, 3], "done")


@pytest.mark.parametrize("addresses", [["127.0.0.2"], ["169.254.169.254"], ["10.0.0.1", "127.0.0.1"]])
@ONE_DATABASE
def test_name_that_leads_inside_is_refused_with_each_delivery(
    house: InProcessApi, alice, receiver: Receiver, addresses: list[str]
):
    rebound = receiver.url.replace("127.0.0.1", "rebound.test")
    with house.services.database.write() as connection:
        connection.execute(update(table).values(url=rebound))
    publish(house)

    deliver(house, resolve=lambda *_: addresses)

    assert receiver.posts == []
    assert shown(house)["problem"] == "the host rebound.test is not at a public address"


@ONE_DATABASE
def test_worker_gives_up_events_that_are_more_than_are_kept(house: InProcessApi):
    house.dataset("donations")
    publish(house, 5)
    stream = stream_of(house, "donations")

    def kept() -> list[int]:
        with house.services.database.read() as connection:
            return [told.number for told in events.after(connection, stream, 0, 100).told]

    with working(make_worker(house, event_most=2)):
        wait_until(lambda: len(kept()) == 2)

    assert kept() == [5, 6]
