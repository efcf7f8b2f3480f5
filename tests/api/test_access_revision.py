"""Coalesced reads of the access revision on an event loop."""

import asyncio
import threading

import pytest
from tarn.access import revision
from tarn.api.http.services.admission_cache import RevisionReader
from tarn.db.engine import Database
from tarn.errors import Unavailable


class PausedReader(RevisionReader):
    """A reader that counts its reads after querying, and then waits to be released."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.started = 0
        self.permits = threading.Semaphore(0)

    def _read_current(self) -> str:
        current = super()._read_current()
        self.started += 1
        self.permits.acquire()
        return current


async def wait_for_reads(reader: PausedReader, count: int) -> None:
    while reader.started < count:
        await asyncio.sleep(0)


def test_requests_during_a_read_share_the_next_one_and_see_earlier_changes(database: Database):
    async def run() -> tuple[str, list[str]]:
        reader = PausedReader(database)
        first = asyncio.ensure_future(reader.revision())
        await wait_for_reads(reader, 1)
        with database.write() as connection:
            revision.bump(connection)
        rest = [asyncio.ensure_future(reader.revision()) for _ in range(50)]
        reader.permits.release(2)
        answers = await first, await asyncio.gather(*rest)
        assert reader.started == 2
        return answers

    before, after = asyncio.run(run())

    assert len(set(after)) == 1
    assert after[0] != before


def test_cancelled_request_does_not_cancel_the_read_of_the_others(database: Database):
    async def run() -> str:
        reader = PausedReader(database)
        leaving, staying = asyncio.ensure_future(reader.revision()), asyncio.ensure_future(reader.revision())
        await wait_for_reads(reader, 1)
        leaving.cancel()
        reader.permits.release()
        return await staying

    with database.read() as connection:
        assert asyncio.run(run()) == revision.current(connection)


def test_database_error_is_raised_to_every_waiter_and_the_next_request_reads_again(database: Database):
    class Failing(PausedReader):
        def _read_current(self) -> str:
            super()._read_current()
            if self.started == 1:
                raise Unavailable("the database does not answer", retry_after=2)
            return "answered"

    async def run() -> str:
        failing = Failing(database)
        failing.permits.release(2)
        errors = await asyncio.gather(failing.revision(), failing.revision(), return_exceptions=True)
        assert [type(error) for error in errors] == [Unavailable, Unavailable]
        return await failing.revision()

    assert asyncio.run(run()) == "answered"


@pytest.mark.parametrize("times", [1, 3])
def test_request_after_a_read_starts_another(database: Database, times: int):
    async def run() -> int:
        reader = PausedReader(database)
        for _ in range(times):
            reader.permits.release()
            await reader.revision()
        return reader.started

    assert asyncio.run(run()) == times
