"""Concurrent jobs: tenants share the slots of a worker, and a dataset has one running job at a time."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.model.work.job import Job, Operation, Report, VerifyResult

from tests.in_process_api import InProcessApi
from tests.waiting import wait_until
from tests.worker.flushers import SqlFlusher, id_of
from tests.worker.workers import make_worker, working

pytestmark = pytest.mark.both_databases

NOTHING = VerifyResult(operation="verify", snapshots=0, files=0, size=0, findings=[], found=0, harmless=0, repaired=0)


class BlockingMaintainer:
    """Runs each job until the test releases the jobs of its tenant."""

    operations = (Operation.VERIFY, Operation.OPTIMIZE)

    def __init__(self) -> None:
        self.started: list[Job] = []
        self.most_running: dict[str, int] = {}
        """Maximum of concurrent jobs by tenant."""
        self._running: list[Job] = []
        self._lock = threading.Lock()
        self._released: set[str] = set()
        self._changed = threading.Condition(self._lock)

    def release(self, *tenants: str) -> None:
        with self._changed:
            self._released |= set(tenants)
            self._changed.notify_all()

    def run(self, job: Job, report: Report) -> dict[str, Any]:
        report(None)
        with self._changed:
            self.started.append(job)
            self._running.append(job)
            running = sum(each.tenant == job.tenant for each in self._running)
            self.most_running[job.tenant] = max(running, self.most_running.get(job.tenant, 0))
            assert self._changed.wait_for(lambda: job.tenant in self._released, 60)
            self._running.remove(job)
        return NOTHING.model_dump(mode="json")


@pytest.fixture
def maintainer() -> Iterator[BlockingMaintainer]:
    maintainer = BlockingMaintainer()
    yield maintainer
    maintainer.release("alice", "bob", "carol")


def enqueue(api: InProcessApi, tenant: str, dataset: str, operation: Operation = Operation.VERIFY) -> str:
    with api.services.database.write() as connection:
        return jobs.enqueue(connection, operation, id_of(api, dataset), tenant, "r").id


def state(api: InProcessApi, job: str) -> str:
    return str(api.admin.get(f"/v1/jobs/{job}").json()["state"])


def make_datasets(api: InProcessApi, count: int) -> list[str]:
    names = [f"d{number}" for number in range(count)]
    for name in names:
        api.dataset(name)
    return names


def test_tenant_with_many_long_jobs_does_not_delay_others(api: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(api, 6)
    long = [enqueue(api, "alice", name) for name in names[:5]]
    with working(make_worker(api, maintainer=maintainer)):
        wait_until(lambda: len(maintainer.started) == 2)
        maintainer.release("bob")
        short = [enqueue(api, "bob", names[5]) for _ in range(3)]
        wait_until(lambda: all(state(api, job) == "done" for job in short))
        states = [state(api, job) for job in long]
        maintainer.release("alice")
        wait_until(lambda: all(state(api, job) == "done" for job in long))

    assert states == ["running", "running", "queued", "queued", "queued"]
    assert maintainer.most_running == {"alice": 2, "bob": 1}


def test_third_tenant_gets_a_slot_while_two_others_have_queued_jobs(api: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(api, 5)
    for number, name in enumerate(names[:4]):
        enqueue(api, "alice" if number % 2 else "bob", name)
    with working(make_worker(api, maintainer=maintainer)):
        wait_until(lambda: {job.tenant for job in maintainer.started} == {"alice", "bob"})
        maintainer.release("carol")
        job = enqueue(api, "carol", names[4])
        wait_until(lambda: state(api, job) == "done")
        maintainer.release("alice", "bob")


def test_jobs_of_a_dataset_run_one_after_the_other(api: InProcessApi, maintainer: BlockingMaintainer):
    [name, other] = make_datasets(api, 2)
    own_jobs = [enqueue(api, tenant, name) for tenant in ("alice", "bob", "alice")]
    elsewhere = enqueue(api, "carol", other)
    with working(make_worker(api, maintainer=maintainer)):
        wait_until(lambda: len(maintainer.started) == 2)
        first = {job.id for job in maintainer.started}
        maintainer.release("alice", "bob", "carol")
        wait_until(lambda: all(state(api, job) == "done" for job in (*own_jobs, elsewhere)))

    assert first == {own_jobs[0], elsewhere}
    assert [job.id for job in maintainer.started if job.dataset == name].index(own_jobs[0]) == 0


def test_flush_runs_while_every_slot_is_taken(api: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(api, 4)
    for tenant, name in zip(("alice", "bob", "carol"), names, strict=False):
        enqueue(api, tenant, name)
    flusher = SqlFlusher(api.services.database)
    with working(make_worker(api, flusher, maintainer)):
        wait_until(lambda: len(maintainer.started) == 3)
        job = enqueue(api, "alice", names[3], Operation.FLUSH)
        wait_until(lambda: state(api, job) == "done")
        maintainer.release("alice", "bob", "carol")


def test_worker_with_one_slot_runs_all_jobs_of_the_only_tenant(api: InProcessApi, maintainer: BlockingMaintainer):
    names = make_datasets(api, 2)
    maintainer.release("alice")
    own_jobs = [enqueue(api, "alice", name) for name in names]
    with working(make_worker(api, maintainer=maintainer, job_slots=1)):
        wait_until(lambda: all(state(api, job) == "done" for job in own_jobs))

    assert maintainer.most_running == {"alice": 1}


def test_tenant_with_the_fewest_running_jobs_is_next_and_excluded_tenants_get_no_job(
    api: InProcessApi, database: Database
):
    names = make_datasets(api, 4)
    alice, bob, carol = (
        enqueue(api, tenant, name) for tenant, name in zip(("alice", "bob", "carol"), names, strict=False)
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


def test_next_job_of_a_dataset_is_claimed_when_the_worker_of_the_running_one_has_died(
    api: InProcessApi, database: Database
):
    [name] = make_datasets(api, 1)
    first, second = enqueue(api, "alice", name), enqueue(api, "alice", name)
    among = [Operation.VERIFY]

    with database.write() as connection:
        claimed = jobs.claim(connection, "w", 30, among)
        waiting = jobs.claim(connection, "w2", 30, among)
        # With a negative limit, every heartbeat is too old.
        reclaimed = jobs.claim(connection, "w2", -1, among)

    assert (claimed and claimed.id, waiting) == (first, None)
    assert reclaimed is not None
    assert reclaimed.id in (first, second)
