"""The access revision as an event loop asks for it."""

import asyncio
import threading

import pytest
from tarn.access import revision
from tarn.api.http.services.identity_cache import RevisionReader
from tarn.db.engine import Database
from tarn.errors import Unavailable


class PausedReader(RevisionReader):
    """Readings that are counted once they have looked, and then wait to be let go."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.begun = 0
        self.go = threading.Semaphore(0)

    def _current(self) -> str:
        found = super()._current()
        self.begun += 1
        self.go.acquire()
        return found


async def wait_for_reads(slow: PausedReader, readings: int) -> None:
    while slow.begun < readings:
        await asyncio.sleep(0)


def test_questions_asked_during_a_reading_share_the_next_one_and_see_what_changed_before_them(database: Database):
    async def ask() -> tuple[str, list[str]]:
        slow = PausedReader(database)
        first = asyncio.ensure_future(slow.revision())
        await wait_for_reads(slow, 1)
        with database.write() as connection:
            revision.bump(connection)
        rest = [asyncio.ensure_future(slow.revision()) for _ in range(50)]
        slow.go.release(2)
        answers = await first, await asyncio.gather(*rest)
        assert slow.begun == 2
        return answers

    before, after = asyncio.run(ask())

    assert len(set(after)) == 1
    assert after[0] != before


def test_one_that_leaves_does_not_take_the_reading_from_the_others(database: Database):
    async def ask() -> str:
        slow = PausedReader(database)
        leaving, staying = asyncio.ensure_future(slow.revision()), asyncio.ensure_future(slow.revision())
        await wait_for_reads(slow, 1)
        leaving.cancel()
        slow.go.release()
        return await staying

    with database.read() as connection:
        assert asyncio.run(ask()) == revision.current(connection)


def test_a_database_that_does_not_answer_is_told_to_everybody_and_asked_again_next_time(database: Database):
    class Failing(PausedReader):
        def _current(self) -> str:
            super()._current()
            if self.begun == 1:
                raise Unavailable("the database does not answer", retry_after=2)
            return "answered"

    async def ask() -> str:
        failing = Failing(database)
        failing.go.release(2)
        told = await asyncio.gather(failing.revision(), failing.revision(), return_exceptions=True)
        assert [type(error) for error in told] == [Unavailable, Unavailable]
        return await failing.revision()

    assert asyncio.run(ask()) == "answered"


@pytest.mark.parametrize("times", [1, 3])
def test_a_question_after_a_reading_begins_another(database: Database, times: int):
    async def ask() -> int:
        slow = PausedReader(database)
        for _ in range(times):
            slow.go.release()
            await slow.revision()
        return slow.begun

    assert asyncio.run(ask()) == times
