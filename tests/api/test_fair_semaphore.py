"""The per-tenant fair semaphore: no tenant is delayed by the number of another's requests."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tarn.api.http.limits.tenant_semaphore import (
    ACTIVE_SECONDS,
    REQUESTS_WHILE_SHARED,
    YIELD_SECONDS,
    FairSemaphore,
    request_slot,
)
from tarn.db.connection_semaphore import TENANT

pytestmark = pytest.mark.own_query_process


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    """Let the event loop run until all requests are made and all grants are delivered."""
    for _ in range(3):
        await asyncio.sleep(0)


class Slots:
    """Four slots, and the tenants that were granted one, in order."""

    def __init__(self, most: int = 4) -> None:
        self.clock = Clock()
        self.semaphore = FairSemaphore(most, clock=self.clock)
        self.granted: list[str] = []

    async def request(self, *tenants: str) -> list[asyncio.Task[None]]:
        """Request a slot for each of these tenants in order; granted slots are kept."""
        tasks = [asyncio.create_task(self._request(tenant)) for tenant in tenants]
        await settle()
        return tasks

    async def release(self, tenant: str) -> None:
        self.semaphore.release(tenant)
        await settle()

    async def _request(self, tenant: str) -> None:
        TENANT.set(tenant)
        self.granted.append(await self.semaphore.acquire())


def run_case(case: Callable[[Slots], Awaitable[None]]) -> None:
    async def run() -> None:
        await case(Slots())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())


def test_last_slot_is_kept_for_a_tenant_without_any_however_long_another_was_alone():
    async def case(slots: Slots) -> None:
        await slots.request(*"aaaaa")
        assert slots.granted == [*"aaa"]
        slots.clock.now = ACTIVE_SECONDS * 10
        await slots.request("a")
        assert slots.granted == [*"aaa"]
        await slots.request("b")
        assert slots.granted == [*"aaab"]

    run_case(case)


def test_last_slot_is_kept_for_the_next_tenant_however_many_others_wait():
    async def case(slots: Slots) -> None:
        await slots.request(*"aabb")
        assert slots.granted == [*"aab"]
        await slots.request("c")
        assert slots.granted == [*"aabc"]

    run_case(case)


def test_only_slot_goes_to_the_first_request():
    async def case(slots: Slots) -> None:
        slots.semaphore = FairSemaphore(1, clock=slots.clock)
        await slots.request(*"ab")
        assert slots.granted == ["a"]
        await slots.release("a")
        assert slots.granted == ["a", "b"]

    run_case(case)


def test_released_slot_goes_to_the_tenant_with_the_fewest_and_not_to_the_first_in_line():
    async def case(slots: Slots) -> None:
        await slots.request(*"aaaaaaaaa")
        await slots.request(*"bbc")
        slots.granted.clear()
        for _ in range(3):
            await slots.release("a")
        await slots.release("c")
        assert slots.granted == [*"cab"]

    run_case(case)


def test_slots_are_shared_while_more_than_one_tenant_was_active_within_a_minute():
    async def case(slots: Slots) -> None:
        assert not slots.semaphore.is_shared
        await slots.request(*"aa")
        assert not slots.semaphore.is_shared
        await slots.request("b")
        assert slots.semaphore.is_shared
        slots.clock.now = ACTIVE_SECONDS + 1
        await slots.request("a")
        assert not slots.semaphore.is_shared

    run_case(case)


def test_cancelled_wait_takes_no_slot_and_released_slot_is_free():
    async def case(slots: Slots) -> None:
        await slots.request(*"aaa")
        [waiting] = await slots.request("a")
        waiting.cancel()
        [late] = await slots.request("a")
        slots.semaphore.release("a")
        late.cancel()  # after the slot was given, and before the waiter was notified
        await settle()
        await slots.request("a")
        assert slots.granted == [*"aaaa"]

    run_case(case)


def test_request_without_waiting_is_refused_when_no_slot_is_free():
    async def case(slots: Slots) -> None:
        TENANT.set("b")
        assert slots.semaphore.acquire_now() == "b"
        TENANT.set("a")
        granted = [slots.semaphore.acquire_now() for _ in range(4)]
        assert granted == ["a", "a", None, None]
        TENANT.set("c")
        assert slots.semaphore.acquire_now() == "c"

    run_case(case)


def test_smaller_limit_takes_effect_as_slots_are_released_and_a_larger_one_at_once():
    async def case(slots: Slots) -> None:
        await slots.request(*"aaa")
        slots.semaphore.limit = 1
        await slots.request("a")
        for _ in range(2):
            await slots.release("a")
        assert len(slots.granted) == 3
        slots.semaphore.limit = 4
        await settle()
        assert len(slots.granted) == 4

    run_case(case)


def test_tenant_without_a_slot_gets_one_although_others_hold_more_than_the_limit():
    async def case(slots: Slots) -> None:
        await slots.request(*"aaa")
        slots.semaphore.limit = 1
        await slots.request("b")
        assert slots.granted == [*"aaab"]

    run_case(case)


def test_tenant_next_to_another_may_hold_as_many_slots_as_configured():
    async def case(slots: Slots) -> None:
        slots.semaphore = FairSemaphore(100, limit_while_shared=2, clock=slots.clock)
        await slots.request(*"aaaaa")
        await slots.request(*"bbb")
        assert slots.granted == [*"aaaaabb"]
        for _ in range(4):
            await slots.release("a")
        await slots.request(*"aa")
        assert slots.granted == [*"aaaaabba"]

    run_case(case)


def test_tenant_with_waiting_requests_is_not_served_twice_in_a_row():
    async def case(slots: Slots) -> None:
        slots.semaphore = FairSemaphore(100, limit_while_shared=1, clock=slots.clock)
        await slots.request(*"baaa")
        assert slots.granted == [*"ba"]
        await slots.release("a")
        assert slots.granted == [*"ba"]
        await slots.release("b")
        assert slots.granted == [*"baa"]
        # A tenant without waiting requests is not delayed: it sends one request after the other.
        await slots.request("b")
        assert slots.granted == [*"baab"]

    run_case(case)


def test_long_request_of_another_tenant_is_not_waited_for():
    async def case(slots: Slots) -> None:
        slots.semaphore = FairSemaphore(100, limit_while_shared=1, clock=slots.clock)
        await slots.request(*"baa")
        await slots.release("a")
        assert slots.granted == [*"ba"]
        slots.clock.now += YIELD_SECONDS
        await asyncio.sleep(2 * YIELD_SECONDS)
        assert slots.granted == [*"baa"]

    run_case(case)


def test_long_request_releases_its_slot_among_the_active_ones():
    async def case(_: Slots) -> None:
        finish, started = asyncio.Event(), asyncio.Event()

        async def request(tenant: str, on_start: Callable[[], None]) -> None:
            TENANT.set(tenant)
            async with request_slot():
                on_start()
                await finish.wait()

        requests = [asyncio.create_task(request("b", lambda: None))]
        requests += [asyncio.create_task(request("a", lambda: None)) for _ in range(REQUESTS_WHILE_SHARED)]
        requests.append(asyncio.create_task(request("a", started.set)))
        await settle()
        assert not started.is_set()
        await started.wait()
        finish.set()
        await asyncio.gather(*requests)

    run_case(case)


def test_isolated_tenant_has_one_slot_at_a_time():
    async def case(slots: Slots) -> None:
        slots.semaphore = FairSemaphore(4, clock=slots.clock, one_at_a_time=lambda tenant: tenant == "a")
        await slots.request(*"aaab")
        assert slots.granted == [*"ab"]
        await slots.release("a")
        assert slots.granted == [*"aba"]

    run_case(case)
