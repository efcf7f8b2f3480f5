"""CPU scheduling: reads yield to large bodies, and long queries to short ones."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from threading import Event

import psutil
import pytest
from tarn.api.http.reads.read_scheduling import THROTTLE_SECONDS, ReadScheduler
from tarn.datasets.registry import Dataset

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.query.test_duckdb_process import LINUX, MULTIPROCESSOR

pytestmark = pytest.mark.own_query_process


def run_case(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[ReadScheduler], Awaitable[None]], cores: int = 2, slots: int = 4
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)

    async def run() -> None:
        await case(ReadScheduler(slots))

    asyncio.run(run())


async def wait_for_throttling() -> None:
    """Sleep a little longer than the time for which reads yield after a body."""
    await asyncio.sleep(2 * THROTTLE_SECONDS)


def test_reads_yield_while_a_body_is_parsed_and_then_proceed(monkeypatch: pytest.MonkeyPatch):
    async def case(scheduler: ReadScheduler) -> None:
        with scheduler.body():
            with scheduler.body():
                assert scheduler.limit == 1
            await wait_for_throttling()
            assert scheduler.limit == 1
        assert scheduler.limit == 1
        await wait_for_throttling()
        assert scheduler.limit == 4

    run_case(monkeypatch, case)


def test_reads_proceed_while_a_body_waits_for_its_client(monkeypatch: pytest.MonkeyPatch):
    async def case(scheduler: ReadScheduler) -> None:
        with scheduler.body():
            with scheduler.waiting():
                await wait_for_throttling()
                assert scheduler.limit == 4
            assert scheduler.limit == 1
        await wait_for_throttling()
        assert scheduler.limit == 4

    run_case(monkeypatch, case)


@pytest.mark.parametrize(("cores", "slots", "limit"), [(1, 4, 1), (2, 4, 1), (8, 4, 4), (6, 4, 3), (64, 1, 1)])
def test_reads_keep_half_of_the_processors_on_large_machines(
    monkeypatch: pytest.MonkeyPatch, cores: int, slots: int, limit: int
):
    async def case(scheduler: ReadScheduler) -> None:
        with scheduler.body():
            assert scheduler.limit == limit

    run_case(monkeypatch, case, cores, slots)


def test_query_during_a_body_waits_for_the_previous_query(monkeypatch: pytest.MonkeyPatch):
    async def case(scheduler: ReadScheduler) -> None:
        begun, resume, second = Event(), Event(), Event()

        def first() -> None:
            begun.set()
            assert resume.wait(30)
            assert not second.is_set()

        with scheduler.body():
            one = asyncio.create_task(scheduler.query(first))
            await asyncio.to_thread(begun.wait, 30)
            other = asyncio.create_task(scheduler.query(second.set))
            await asyncio.sleep(0)
            resume.set()
            await asyncio.gather(one, other)
        assert second.is_set()

    run_case(monkeypatch, case)


def test_query_that_fails_or_is_cancelled_releases_its_slot(monkeypatch: pytest.MonkeyPatch):
    async def case(scheduler: ReadScheduler) -> None:
        with scheduler.body():
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    await scheduler.query(lambda: 1 // 0)
            cancelled = asyncio.create_task(scheduler.query(lambda: 1))
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            assert await scheduler.query(lambda: 2) == 2

    run_case(monkeypatch, case, slots=1)


def test_point_lookup_does_not_wait_for_queries(monkeypatch: pytest.MonkeyPatch):
    async def case(scheduler: ReadScheduler) -> None:
        resume = Event()
        queries = [asyncio.create_task(scheduler.query(lambda: resume.wait(30))) for _ in range(3)]
        await asyncio.sleep(0)
        assert await scheduler.look_up(lambda: 1) == 1
        assert not any(query.done() for query in queries)
        resume.set()
        assert await asyncio.gather(*queries) == [True] * 3

    run_case(monkeypatch, case, slots=2)


def _query_processes() -> set[psutil.Process]:
    return {
        process for process in psutil.Process().children() if "tarn.query.engine.duckdb_server" in process.cmdline()
    }


@LINUX
@MULTIPROCESSOR
@ONE_DATABASE
@pytest.mark.own_query_process
def test_queries_leave_processors_free_from_the_first_request_of_a_second_tenant_on(
    api: InProcessApi, dataset: Dataset
):
    path, query = f"/v1/datasets/{dataset.name}/entities/aggregate", {"metrics": ["count"]}
    before = _query_processes()
    assert api.admin.post(path, query).status_code == 200
    all_processors = os.sched_getaffinity(0)
    (child,) = _query_processes() - before
    assert set(child.cpu_affinity()) == all_processors

    alice = api.tenant("alice", test="read")
    assert alice.get("/v1/whoami").status_code == 200

    assert set(child.cpu_affinity()) < all_processors
