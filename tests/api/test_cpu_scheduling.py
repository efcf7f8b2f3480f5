"""Turns: reads stand back for large bodies, and queries for what is brief."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from threading import Event

import psutil
import pytest
from tarn.api.http.reads.read_scheduling import THROTTLE_SECONDS, ReadScheduler
from tarn.datasets.registry import Dataset

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.query.test_duckdb_process import LINUX, MANY


def run_case(
    monkeypatch: pytest.MonkeyPatch, case: Callable[[ReadScheduler], Awaitable[None]], cores: int = 2, slots: int = 4
):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)

    async def play() -> None:
        await case(ReadScheduler(slots))

    asyncio.run(play())


async def wait_for_throttling() -> None:
    """The time for which reads stand back after a body, and a little more."""
    await asyncio.sleep(2 * THROTTLE_SECONDS)


def test_reads_stand_back_while_any_body_is_worked_on_and_then_go_on(monkeypatch: pytest.MonkeyPatch):
    async def case(turns: ReadScheduler) -> None:
        with turns.body():
            with turns.body():
                assert turns.at_once == 1
            await wait_for_throttling()
            assert turns.at_once == 1
        assert turns.at_once == 1
        await wait_for_throttling()
        assert turns.at_once == 4

    run_case(monkeypatch, case)


def test_reads_go_on_while_a_body_waits_for_its_client(monkeypatch: pytest.MonkeyPatch):
    async def case(turns: ReadScheduler) -> None:
        with turns.body():
            with turns.waiting():
                await wait_for_throttling()
                assert turns.at_once == 4
            assert turns.at_once == 1
        await wait_for_throttling()
        assert turns.at_once == 4

    run_case(monkeypatch, case)


@pytest.mark.parametrize(("cores", "slots", "left"), [(1, 4, 1), (2, 4, 1), (8, 4, 4), (6, 4, 3), (64, 1, 1)])
def test_reads_keep_half_of_the_processors_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch, cores: int, slots: int, left: int
):
    async def case(turns: ReadScheduler) -> None:
        with turns.body():
            assert turns.at_once == left

    run_case(monkeypatch, case, cores, slots)


def test_query_beside_a_body_waits_until_the_one_before_it_is_over(monkeypatch: pytest.MonkeyPatch):
    async def case(turns: ReadScheduler) -> None:
        begun, go_on, second = Event(), Event(), Event()

        def first() -> None:
            begun.set()
            assert go_on.wait(30)
            assert not second.is_set()

        with turns.body():
            one = asyncio.create_task(turns.query(first))
            await asyncio.to_thread(begun.wait, 30)
            other = asyncio.create_task(turns.query(second.set))
            await asyncio.sleep(0)
            go_on.set()
            await asyncio.gather(one, other)
        assert second.is_set()

    run_case(monkeypatch, case)


def test_query_that_fails_or_is_given_up_leaves_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch):
    async def case(turns: ReadScheduler) -> None:
        with turns.body():
            for _ in range(3):
                with pytest.raises(ZeroDivisionError):
                    await turns.query(lambda: 1 // 0)
            given_up = asyncio.create_task(turns.query(lambda: 1))
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            assert await turns.query(lambda: 2) == 2

    run_case(monkeypatch, case, slots=1)


def test_look_at_one_entity_waits_for_no_query(monkeypatch: pytest.MonkeyPatch):
    async def case(turns: ReadScheduler) -> None:
        go_on = Event()
        queries = [asyncio.create_task(turns.query(lambda: go_on.wait(30))) for _ in range(3)]
        await asyncio.sleep(0)
        assert await turns.look(lambda: 1) == 1
        assert not any(query.done() for query in queries)
        go_on.set()
        assert await asyncio.gather(*queries) == [True] * 3

    run_case(monkeypatch, case, slots=2)


@LINUX
@MANY
@ONE_DATABASE
def test_queries_leave_processors_to_others_from_the_first_request_of_a_second_tenant_on(
    house: InProcessApi, dataset: Dataset
):
    path, asked = f"/v1/datasets/{dataset.name}/entities/aggregate", {"metrics": ["count"]}
    assert house.admin.post(path, asked).status_code == 200
    everywhere = os.sched_getaffinity(0)
    (child,) = [process for process in psutil.Process().children() if "tarn.query.duckdb_server" in process.cmdline()]
    assert set(child.cpu_affinity()) == everywhere

    alice = house.tenant("alice", test="read")
    assert alice.get("/v1/whoami").status_code == 200

    assert set(child.cpu_affinity()) < everywhere
