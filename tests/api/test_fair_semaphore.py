"""Places that tenants share: none is kept waiting by how much another asks for."""

import asyncio
from collections.abc import Awaitable, Callable

from tarn.api.http.limits.tenant_semaphore import ACTIVE_SECONDS, BESIDE, YIELD_SECONDS, FairSemaphore, worked_on
from tarn.db.connection_shares import TENANT


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    """Everybody who asked has asked, and everybody who was given a place knows."""
    for _ in range(3):
        await asyncio.sleep(0)


class Slots:
    """Four places, and who was given one, in order."""

    def __init__(self, most: int = 4) -> None:
        self.clock = Clock()
        self.places = FairSemaphore(most, clock=self.clock)
        self.given: list[str] = []

    async def ask(self, *tenants: str) -> list[asyncio.Task[None]]:
        """Let these ask for a place, one after the other; each keeps what it is given."""
        asked = [asyncio.create_task(self._ask(tenant)) for tenant in tenants]
        await settle()
        return asked

    async def release(self, tenant: str) -> None:
        self.places.release(tenant)
        await settle()

    async def _ask(self, tenant: str) -> None:
        TENANT.set(tenant)
        self.given.append(await self.places.acquire())


def run_case(case: Callable[[Slots], Awaitable[None]]) -> None:
    async def play() -> None:
        await case(Slots())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(play())


def test_last_place_is_kept_for_a_tenant_without_any_however_long_another_was_alone():
    async def case(hall: Slots) -> None:
        await hall.ask(*"aaaaa")
        assert hall.given == [*"aaa"]
        hall.clock.now = ACTIVE_SECONDS * 10
        await hall.ask("a")
        assert hall.given == [*"aaa"]
        await hall.ask("b")
        assert hall.given == [*"aaab"]

    run_case(case)


def test_last_place_is_kept_for_the_next_tenant_however_many_others_want_more():
    async def case(hall: Slots) -> None:
        await hall.ask(*"aabb")
        assert hall.given == [*"aab"]
        await hall.ask("c")
        assert hall.given == [*"aabc"]

    run_case(case)


def test_only_place_there_is_goes_to_whoever_asks_first():
    async def case(hall: Slots) -> None:
        hall.places = FairSemaphore(1, clock=hall.clock)
        await hall.ask(*"ab")
        assert hall.given == ["a"]
        await hall.release("a")
        assert hall.given == ["a", "b"]

    run_case(case)


def test_place_that_becomes_free_goes_to_who_has_the_fewest_and_not_to_who_asked_first():
    async def case(hall: Slots) -> None:
        await hall.ask(*"aaaaaaaaa")
        await hall.ask(*"bbc")
        hall.given.clear()
        for _ in range(3):
            await hall.release("a")
        await hall.release("c")
        assert hall.given == [*"cab"]

    run_case(case)


def test_places_are_shared_while_more_than_one_tenant_was_there_within_a_minute():
    async def case(hall: Slots) -> None:
        assert not hall.places.are_shared
        await hall.ask(*"aa")
        assert not hall.places.are_shared
        await hall.ask("b")
        assert hall.places.are_shared
        hall.clock.now = ACTIVE_SECONDS + 1
        await hall.ask("a")
        assert not hall.places.are_shared

    run_case(case)


def test_who_gives_up_waiting_takes_no_place_and_who_gives_one_up_leaves_it():
    async def case(hall: Slots) -> None:
        await hall.ask(*"aaa")
        [waiting] = await hall.ask("a")
        waiting.cancel()
        [late] = await hall.ask("a")
        hall.places.release("a")
        late.cancel()  # after it was given the place, and before it heard of that
        await settle()
        await hall.ask("a")
        assert hall.given == [*"aaaa"]

    run_case(case)


def test_place_that_is_not_there_now_is_not_waited_for():
    async def case(hall: Slots) -> None:
        TENANT.set("b")
        assert hall.places.acquire_now() == "b"
        TENANT.set("a")
        taken = [hall.places.acquire_now() for _ in range(4)]
        assert taken == ["a", "a", None, None]
        TENANT.set("c")
        assert hall.places.acquire_now() == "c"

    run_case(case)


def test_fewer_places_are_given_back_in_their_own_time_and_more_are_given_at_once():
    async def case(hall: Slots) -> None:
        await hall.ask(*"aaa")
        hall.places.most = 1
        await hall.ask("a")
        for _ in range(2):
            await hall.release("a")
        assert len(hall.given) == 3
        hall.places.most = 4
        await settle()
        assert len(hall.given) == 4

    run_case(case)


def test_tenant_without_a_place_finds_one_also_while_there_are_fewer_than_others_hold():
    async def case(hall: Slots) -> None:
        await hall.ask(*"aaa")
        hall.places.most = 1
        await hall.ask("b")
        assert hall.given == [*"aaab"]

    run_case(case)


def test_tenant_beside_another_may_have_as_many_as_is_said():
    async def case(hall: Slots) -> None:
        hall.places = FairSemaphore(100, beside=2, clock=hall.clock)
        await hall.ask(*"aaaaa")
        await hall.ask(*"bbb")
        assert hall.given == [*"aaaaabb"]
        for _ in range(4):
            await hall.release("a")
        await hall.ask(*"aa")
        assert hall.given == [*"aaaaabba"]

    run_case(case)


def test_tenant_with_more_to_do_does_not_have_two_turns_in_a_row_beside_another():
    async def case(hall: Slots) -> None:
        hall.places = FairSemaphore(100, beside=1, clock=hall.clock)
        await hall.ask(*"baaa")
        assert hall.given == [*"ba"]
        await hall.release("a")
        assert hall.given == [*"ba"]
        await hall.release("b")
        assert hall.given == [*"baa"]
        # Whoever has nothing waiting is not kept: it asks for one thing after the other.
        await hall.ask("b")
        assert hall.given == [*"baab"]

    run_case(case)


def test_turn_of_another_that_takes_long_is_not_waited_for():
    async def case(hall: Slots) -> None:
        hall.places = FairSemaphore(100, beside=1, clock=hall.clock)
        await hall.ask(*"baa")
        await hall.release("a")
        assert hall.given == [*"ba"]
        hall.clock.now += YIELD_SECONDS
        await asyncio.sleep(2 * YIELD_SECONDS)
        assert hall.given == [*"baa"]

    run_case(case)


def test_request_that_takes_long_leaves_its_place_among_those_that_are_worked_on():
    async def case(_: Slots) -> None:
        over, begun = asyncio.Event(), asyncio.Event()

        async def request(tenant: str, begins: Callable[[], None]) -> None:
            TENANT.set(tenant)
            async with worked_on():
                begins()
                await over.wait()

        requests = [asyncio.create_task(request("b", lambda: None))]
        requests += [asyncio.create_task(request("a", lambda: None)) for _ in range(BESIDE)]
        requests.append(asyncio.create_task(request("a", begun.set)))
        await settle()
        assert not begun.is_set()
        await begun.wait()
        over.set()
        await asyncio.gather(*requests)

    run_case(case)


def test_tenant_that_is_confined_has_one_place_at_a_time():
    async def case(hall: Slots) -> None:
        hall.places = FairSemaphore(4, clock=hall.clock, one_at_a_time=lambda tenant: tenant == "a")
        await hall.ask(*"aaab")
        assert hall.given == [*"ab"]
        await hall.release("a")
        assert hall.given == [*"aba"]

    run_case(case)
