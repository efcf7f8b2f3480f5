"""Places that tenants share: none is kept waiting by how much another asks for."""

import asyncio
from collections.abc import Awaitable, Callable

from app.api.places import ALONE, TENANT, Places


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Hall:
    """Four places, and who was given one, in order."""

    def __init__(self, most: int = 4) -> None:
        self.clock = Clock()
        self.places = Places(most, self.clock)
        self.given: list[str] = []

    async def ask(self, *tenants: str) -> list[asyncio.Task[None]]:
        """Let these ask for a place, one after the other; each keeps what it is given."""
        asked = [asyncio.create_task(self._ask(tenant)) for tenant in tenants]
        await asyncio.sleep(0)
        return asked

    async def release(self, tenant: str) -> None:
        self.places.release(tenant)
        await asyncio.sleep(0)

    async def _ask(self, tenant: str) -> None:
        TENANT.set(tenant)
        self.given.append(await self.places.acquire())


def played(case: Callable[[Hall], Awaitable[None]]) -> None:
    async def play() -> None:
        await case(Hall())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(play())


def test_tenant_that_is_alone_may_have_all_places():
    async def case(hall: Hall) -> None:
        await hall.ask(*"aaaaa")
        assert hall.given == [*"aaaa"]

    played(case)


def test_tenant_beside_another_leaves_a_place_to_the_next_however_long_it_keeps_its_own():
    async def case(hall: Hall) -> None:
        await hall.ask("b")
        await hall.release("b")
        await hall.ask(*"aaaaa")
        assert hall.given == [*"baaa"]
        await hall.ask("c")
        assert hall.given == [*"baaac"]

    played(case)


def test_place_that_becomes_free_goes_to_who_has_the_fewest_and_not_to_who_asked_first():
    async def case(hall: Hall) -> None:
        await hall.ask(*"aaaaaaaaa")
        await hall.ask(*"bbc")
        hall.given.clear()
        for _ in range(4):
            await hall.release("a")
        assert hall.given == [*"bcba"]

    played(case)


def test_tenant_that_nobody_was_beside_for_a_minute_may_have_all_places_again():
    async def case(hall: Hall) -> None:
        await hall.ask("b")
        await hall.release("b")
        await hall.ask(*"aaaa")
        assert hall.given == [*"baaa"]
        hall.clock.now = ALONE + 1
        await hall.ask("a")
        assert hall.given == [*"baaaa"]

    played(case)


def test_who_gives_up_waiting_takes_no_place_and_who_gives_one_up_leaves_it():
    async def case(hall: Hall) -> None:
        await hall.ask(*"aaaa")
        [waiting] = await hall.ask("a")
        waiting.cancel()
        [late] = await hall.ask("a")
        hall.places.release("a")
        late.cancel()  # after it was given the place, and before it heard of that
        await asyncio.sleep(0)
        await hall.ask("a")
        assert hall.given == [*"aaaaa"]

    played(case)


def test_place_that_is_not_there_now_is_not_waited_for():
    async def case(hall: Hall) -> None:
        TENANT.set("b")
        assert hall.places.acquire_now() == "b"
        TENANT.set("a")
        taken = [hall.places.acquire_now() for _ in range(4)]
        assert taken == ["a", "a", "a", None]

    played(case)


def test_fewer_places_are_given_back_in_their_own_time_and_more_are_given_at_once():
    async def case(hall: Hall) -> None:
        await hall.ask(*"aaaa")
        hall.places.most = 1
        await hall.ask("a")
        for _ in range(3):
            await hall.release("a")
        assert len(hall.given) == 4
        hall.places.most = 4
        await asyncio.sleep(0)
        assert len(hall.given) == 5

    played(case)
