"""The lease module, on both databases and for every kind of lease that is stored."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Row, insert, select, update
from tarn.coordination import locks, queue, webhooks
from tarn.db import database_clock, jobs, tables
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.lease import LeaseColumns
from tarn.lake.leases import lease_columns
from tarn.model import ids
from tarn.model.ids import new_id, now
from tarn.model.timestamps import EPOCH

pytestmark = pytest.mark.both_databases

MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class Kind:
    """One kind of lease, and a row without a holder."""

    columns: LeaseColumns
    row: Mapping[str, Any]


DATASET = new_id()
DATASET_LEASE = {"dataset_id": DATASET, "owner": "nobody", "token": 0, "expires": EPOCH}
KINDS = {
    "leases": Kind(lease_columns(tables.leases), DATASET_LEASE),
    "export_leases": Kind(lease_columns(tables.export_leases), DATASET_LEASE),
    "queue_leases": Kind(lease_columns(tables.queue_leases), DATASET_LEASE),
    "locks": Kind(
        locks.LEASE,
        {
            "dataset_id": DATASET,
            "tenant": "alice",
            "name": "crawl",
            "id": new_id(),
            "holder": "",
            "fence": 0,
            "taken": now(),
            "expires": EPOCH,
        },
    ),
    "queue": Kind(
        queue.LEASE,
        {
            "id": new_id(),
            "dataset_id": DATASET,
            "tenant": "alice",
            "recipient": "alice",
            "shared": False,
            "action": "upsert",
            "resource": "entity",
            "payload": {},
            "request": "r",
            "state": "pending",
            "attempts": 0,
            "created": now(),
        },
    ),
    "webhooks": Kind(
        webhooks.LEASE,
        {
            "tenant": "alice",
            "id": new_id(),
            "url": "http://127.0.0.1",
            "secret": "secret",
            "kinds": [],
            "datasets": [],
            "created": now(),
            "updated": now(),
            "state": "active",
            "attempts": 0,
            "delivered": 0,
            "failed": 0,
        },
    ),
    "jobs": Kind(
        jobs.LEASE,
        {
            "id": new_id(),
            "operation": "flush",
            "arguments": {},
            "tenant": "alice",
            "request": "r",
            "state": "queued",
            "created": now(),
            "attempts": 0,
        },
    ),
}


class OneLease:
    """A row with a lease, acquired and released in transactions of its own."""

    def __init__(self, database: Database, columns: LeaseColumns) -> None:
        self._database = database
        self._columns = columns

    def acquire(self, holder: str, after: timedelta = timedelta(), *, reentrant: bool = False) -> Row[Any] | None:
        """Acquire the lease for a minute, after some time."""
        with self._database.write() as connection:
            moment = database_time(connection) + after
            acquire = self._columns.acquire(holder, moment, moment + MINUTE, reentrant=reentrant)
            return connection.execute(acquire.returning(self._columns.expires.table)).first()

    def renew(self, holder: str, number: int | None = None) -> bool:
        with self._database.write() as connection:
            renew = self._columns.renew(holder, database_time(connection) + 2 * MINUTE, number)
            return connection.execute(renew).rowcount == 1

    def release(self, holder: str, number: int | None = None) -> bool:
        with self._database.write() as connection:
            return connection.execute(self._columns.release(holder, number)).rowcount == 1

    def is_held_by(self, holder: str) -> bool:
        return self._is(self._columns.is_held_by(holder))

    def is_free(self, after: timedelta = timedelta()) -> bool:
        return self._is(self._columns.is_free(self._time() + after))

    def is_abandoned(self, after: timedelta = timedelta()) -> bool:
        return self._is(self._columns.is_abandoned(self._time() + after))

    @property
    def number(self) -> int:
        assert self._columns.number is not None
        with self._database.read() as connection:
            return int(connection.execute(select(self._columns.number)).scalar_one())

    def _time(self) -> datetime:
        with self._database.read() as connection:
            return database_time(connection)

    def _is(self, condition: Any) -> bool:
        with self._database.read() as connection:
            return connection.execute(select(self._columns.expires).where(condition)).first() is not None


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def lease(database: Database, kind: Kind) -> OneLease:
    with database.write() as connection:
        dataset = {"id": DATASET, "name": "donations", "state": "active", "created": now(), "revision": 0}
        connection.execute(insert(tables.datasets).values(dataset))
        tenant = {"name": "alice", "title": "", "created": now(), "disabled": False}
        connection.execute(insert(tables.tenants).values(**tenant, used_statements=0, used_bytes=0))
        connection.execute(insert(kind.columns.expires.table).values(**kind.row))
    return OneLease(database, kind.columns)


def test_free_lease_is_acquired_by_one_holder(lease: OneLease):
    assert lease.is_free()

    assert lease.acquire("first") is not None
    assert lease.acquire("second") is None
    assert lease.acquire("first") is None
    assert lease.is_held_by("first")
    assert not lease.is_held_by("second")
    assert not lease.is_free()


def test_reentrant_acquisition_is_allowed_only_for_the_holder(lease: OneLease):
    lease.acquire("first")

    assert lease.acquire("second", reentrant=True) is None
    assert lease.acquire("first", reentrant=True) is not None


def test_expired_lease_is_acquired_by_another_and_its_first_holder_can_neither_renew_nor_release_it(lease: OneLease):
    lease.acquire("first")
    assert not lease.is_abandoned(after=0.9 * MINUTE)
    assert lease.is_abandoned(after=1.1 * MINUTE)

    assert lease.acquire("second", after=0.9 * MINUTE) is None
    assert lease.acquire("second", after=1.1 * MINUTE) is not None
    assert not lease.renew("first")
    assert not lease.release("first")
    assert lease.is_held_by("second")


def test_renewed_lease_expires_later_even_if_it_had_expired(lease: OneLease):
    lease.acquire("first", after=-2 * MINUTE)
    assert lease.is_abandoned()

    assert lease.renew("first")
    assert lease.acquire("second", after=1.9 * MINUTE) is None
    assert lease.acquire("second", after=2.1 * MINUTE) is not None


def test_released_lease_is_free_and_cannot_be_renewed(lease: OneLease):
    lease.acquire("first")

    assert lease.release("first")
    assert lease.is_free()
    assert not lease.is_abandoned(after=MINUTE)
    assert not lease.is_held_by("first")
    assert not lease.renew("first")
    assert not lease.release("first")
    assert lease.acquire("second") is not None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].columns.number is not None], indirect=True)
def test_number_rises_with_every_holder_and_fences_the_ones_before(lease: OneLease):
    numbers = []
    for holder in ("first", "second", "first"):
        lease.acquire(holder)
        numbers.append(lease.number)
        lease.release(holder)
    lease.acquire("first")

    assert numbers == [1, 2, 3]
    assert lease.number == 4
    assert not lease.renew("first", number=3)
    assert not lease.release("first", number=3)
    assert lease.renew("first", number=4)
    assert lease.number == 4


def test_clock_of_a_process_does_not_expire_a_lease(lease: OneLease, monkeypatch):
    lease.acquire("first")
    monkeypatch.setattr(database_clock, "now", lambda: ids.now() + timedelta(hours=1))

    assert not lease.is_free()
    assert lease.acquire("second") is None


def test_one_of_concurrent_connections_acquires_a_lease(lease: OneLease):
    acquired: list[str] = []
    start = threading.Barrier(4)

    def acquire(holder: str) -> None:
        start.wait()
        if lease.acquire(holder) is not None:
            acquired.append(holder)

    threads = [threading.Thread(target=acquire, args=(f"holder-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (holder,) = acquired
    assert lease.is_held_by(holder)


@pytest.mark.parametrize("kind", ["leases"], indirect=True)
def test_connection_that_waits_for_a_holder_which_acquires_the_lease_does_not_acquire_it(
    database: Database, lease: OneLease, kind: Kind
):
    waiting = threading.Thread(target=lambda: outcome.append(lease.acquire("second")))
    outcome: list[Row[Any] | None] = []
    with database.write() as connection:
        moment = database_time(connection)
        connection.execute(kind.columns.acquire("first", moment, moment + MINUTE))
        waiting.start()
    waiting.join()

    assert outcome == [None]
    assert lease.is_held_by("first")


@pytest.mark.parametrize("kind", ["leases"], indirect=True)
def test_row_is_created_held_and_only_once(database: Database, lease: OneLease, kind: Kind):
    with database.write() as connection:
        connection.execute(tables.leases.delete())
        until = database_time(connection) + MINUTE
        first = kind.columns.create(connection, "first", until, {"dataset_id": DATASET})
        second = kind.columns.create(connection, "second", until, {"dataset_id": DATASET})

    assert first is not None
    assert (first.owner, first.token, first.expires) == ("first", 1, until)
    assert second is None
    assert lease.is_held_by("first")


@pytest.mark.parametrize("kind", ["leases"], indirect=True)
def test_lease_with_a_time_in_the_past_is_judged_by_the_database(database: Database, lease: OneLease):
    lease.acquire("first")
    with database.write() as connection:
        past = database_time(connection) - timedelta(microseconds=1)
        connection.execute(update(tables.leases).values(expires=past))

    assert lease.is_abandoned()
    assert lease.acquire("second") is not None
