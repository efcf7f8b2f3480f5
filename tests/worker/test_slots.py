"""Several jobs at once: tenants share the slots of a worker, and a dataset has one job at a time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.model.job import Job, Operation, Report, VerifyResult

from tests.in_process_api import InProcessApi
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import make_worker, working

NOTHING = VerifyResult(operation="verify", snapshots=0, files=0, size=0, findings=[], found=0, harmless=0, repaired=0)


class BlockingMaintainer:
    """Jobs that run until the test lets those of their tenant go on."""

    operations = (Operation.VERIFY, Operation.OPTIMIZE)

    def __init__(self) -> None:
        self.begun: list[Job] = []
        self.most: dict[str, int] = {}
        """Jobs of a tenant that ran at the same time, at most."""
        self._running: list[Job] = []
        self._lock = threading.Lock()
        self._going_on: set[str] = set()
        self._changed = threading.Condition(self._lock)

    def let_go(self, *tenants: str) -> None:
        with self._changed:
            self._going_on |= set(tenants)
            self._changed.notify_all()

    def run(self, job: Job, report: Report) -> dict[str, Any]:
        report(None)
        with self._changed:
            self.begun.append(job)
            self._running.append(job)
            own = sum(each.tenant == job.tenant for each in self._running)
            self.most[job.tenant] = max(own, self.most.get(job.tenant, 0))
            assert self._changed.wait_for(lambda: job.tenant in self._going_on, 60)
            self._running.remove(job)
        return NOTHING.model_dump(mode="json")


@pytest.fixture
def maintainer() -> Iterator[BlockingMaintainer]:
    maintainer = BlockingMaintainer()
    yield maintainer
    maintainer.let_go("alice", "bob", "carol")


def enqueue(house: InProcessApi, tenant: str, dataset: str, operation: Operation = Operation.VERIFY) -> str:
    with house.services.database.write() as connection:
        return jobs.enqueue(connection, operation, id_of(house, dataset), tenant, "r").id


def state(house: InProcessApi, job: str) -> str:
    return str(house.admin.get(f"/v1/jobs/{job}").json()["state"])


def make_datasets(house: InProcessApi, count: int) -> list[str]:
    names = [f"d{number}" for number in range(count)]
    for name in names:
        house.dataset(name)
    return names


def test_tenant_with_many_long_jobs_keeps_no_other_waiting(house: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(house, 6)
    long = [enqueue(house, "alice", name) for name in names[:5]]
    with working(make_worker(house, maintainer=maintainer)):
        wait_until(lambda: len(maintainer.begun) == 2)
        maintainer.let_go("bob")
        short = [enqueue(house, "bob", names[5]) for _ in range(3)]
        wait_until(lambda: all(state(house, job) == "done" for job in short))
        still = [state(house, job) for job in long]
        maintainer.let_go("alice")
        wait_until(lambda: all(state(house, job) == "done" for job in long))

    assert still == ["running", "running", "queued", "queued", "queued"]
    assert maintainer.most == {"alice": 2, "bob": 1}


def test_third_tenant_finds_a_slot_beside_two_that_have_more_to_do(house: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(house, 5)
    for number, name in enumerate(names[:4]):
        enqueue(house, "alice" if number % 2 else "bob", name)
    with working(make_worker(house, maintainer=maintainer)):
        wait_until(lambda: {job.tenant for job in maintainer.begun} == {"alice", "bob"})
        maintainer.let_go("carol")
        job = enqueue(house, "carol", names[4])
        wait_until(lambda: state(house, job) == "done")
        maintainer.let_go("alice", "bob")


def test_jobs_of_a_dataset_run_one_after_the_other(house: InProcessApi, maintainer: BlockingMaintainer):
    [name, other] = make_datasets(house, 2)
    own = [enqueue(house, tenant, name) for tenant in ("alice", "bob", "alice")]
    elsewhere = enqueue(house, "carol", other)
    with working(make_worker(house, maintainer=maintainer)):
        wait_until(lambda: len(maintainer.begun) == 2)
        first = {job.id for job in maintainer.begun}
        maintainer.let_go("alice", "bob", "carol")
        wait_until(lambda: all(state(house, job) == "done" for job in (*own, elsewhere)))

    assert first == {own[0], elsewhere}
    assert [job.id for job in maintainer.begun if job.dataset == name].index(own[0]) == 0


def test_flush_is_done_while_every_slot_is_taken(house: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(house, 4)
    for tenant, name in zip(("alice", "bob", "carol"), names, strict=False):
        enqueue(house, tenant, name)
    flusher = SqlFlusher(house.services.database)
    with working(make_worker(house, flusher, maintainer)):
        wait_until(lambda: len(maintainer.begun) == 3)
        job = enqueue(house, "alice", names[3], Operation.FLUSH)
        wait_until(lambda: state(house, job) == "done")
        maintainer.let_go("alice", "bob", "carol")


def test_worker_with_one_slot_does_the_jobs_of_a_tenant_that_is_alone(
    house: InProcessApi, maintainer: BlockingMaintainer
):
    names = make_datasets(house, 2)
    maintainer.let_go("alice")
    own = [enqueue(house, "alice", name) for name in names]
    with working(make_worker(house, maintainer=maintainer, job_slots=1)):
        wait_until(lambda: all(state(house, job) == "done" for job in own))

    assert maintainer.most == {"alice": 1}


def test_tenant_with_the_fewest_running_jobs_is_next_and_those_without_are_left_out(
    house: InProcessApi, database: Database
):
    names = make_datasets(house, 4)
    alice, bob, carol = (
        enqueue(house, tenant, name) for tenant, name in zip(("alice", "bob", "carol"), names, strict=False)
    )
    among = [Operation.VERIFY]

    with database.write() as connection:
        first = jobs.claim(connection, "w", 30, among, running={"alice": 2, "bob": 1})
        second = jobs.claim(connection, "w", 30, among, running={"alice": 2, "bob": 1})
        none = jobs.claim(connection, "w", 30, among, without=["alice"])
        any_free = jobs.is_any_free(connection, 30, among, ["alice"]), jobs.is_any_free(connection, 30, among)
        last = jobs.claim(connection, "w", 30, among)

    assert [each and each.id for each in (first, second, none, last)] == [carol, bob, None, alice]
    assert any_free == (False, True)


def test_job_of_a_dataset_is_claimed_when_the_worker_of_the_running_one_has_died(
    house: InProcessApi, database: Database
):
    [name] = make_datasets(house, 1)
    first, second = enqueue(house, "alice", name), enqueue(house, "alice", name)
    among = [Operation.VERIFY]

    with database.write() as connection:
        taken = jobs.claim(connection, "w", 30, among)
        waiting = jobs.claim(connection, "w2", 30, among)
        # Nobody has given a sign of life for less than no time at all.
        again = jobs.claim(connection, "w2", -1, among)

    assert (taken and taken.id, waiting) == (first, None)
    assert again is not None
    assert again.id in (first, second)
