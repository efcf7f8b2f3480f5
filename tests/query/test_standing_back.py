"""Threads that stand back: nice for good, and on a part of the processors while those are shared."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Thread, get_native_id

import pytest

from app.query.engine import Engine
from app.query.standing_back import LOWER, Processors, stand_back
from app.settings import Settings
from app.storage.connection import Connection
from tests.house import ONE_DATABASE

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
MANY = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one processor, and no part of it")

pytestmark = LINUX


def priority() -> int:
    """How nice this thread is."""
    return os.getpriority(os.PRIO_PROCESS, get_native_id())


def processors(thread: int) -> set[int]:
    """Where a thread may run."""
    return os.sched_getaffinity(thread)


def standing_back() -> set[int]:
    """The threads of this process that are nicer than this one."""
    found = set()
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # one of another test's has ended
            if os.getpriority(os.PRIO_PROCESS, thread) > priority():
                found.add(thread)
    return found


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, initializer=stand_back) as thread:
        yield thread


def test_thread_that_stands_back_is_nicer_with_those_that_it_starts_and_others_stay_as_they_are(
    thread: ThreadPoolExecutor,
):
    usual, found = priority(), []

    def start() -> int:
        started = Thread(target=lambda: found.append(priority()))
        started.start()
        started.join()
        return priority()

    assert thread.submit(start).result() == usual + LOWER
    assert found == [usual + LOWER]
    assert priority() == usual


@ONE_DATABASE
def test_every_thread_of_the_engines_own_stands_back(settings: Settings):
    others = standing_back()
    engine = Engine(settings.model_copy(update={"query_threads": 4}), Connection.from_settings(settings))
    try:
        with engine.session() as duck:
            duck.execute("SELECT count(DISTINCT i) FROM range(100_000) AS t(i)").fetchall()
        # Whoever asks is the fourth.
        assert len(standing_back() - others) == 3
    finally:
        engine.close()


@MANY
def test_threads_that_stand_back_keep_to_their_part_while_processors_are_shared(thread: ThreadPoolExecutor):
    everywhere, found = processors(0), Processors()
    running = thread.submit(get_native_id).result()

    found.share(True)
    part = processors(running)
    assert 0 < len(part) <= len(everywhere) / 2
    assert part < everywhere
    assert processors(0) == everywhere

    with ThreadPoolExecutor(1, initializer=found.stand_back) as later:
        assert later.submit(lambda: processors(0)).result() == part

    found.share(False)
    assert processors(running) == everywhere


@MANY
def test_query_that_is_running_leaves_processors_at_once(thread: ThreadPoolExecutor):
    begun, go_on = Event(), Event()

    def query() -> set[int]:
        begun.set()
        assert go_on.wait(30)
        return processors(0)

    running = thread.submit(query)
    assert begun.wait(30)
    found = Processors()
    found.share(True)
    go_on.set()
    assert running.result() < processors(0)
    found.share(False)


def test_where_it_is_not_permitted_threads_stay_as_they_are(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)
    monkeypatch.setattr(os, "sched_setaffinity", refused)
    found = Processors()
    found.share(True)
    with ThreadPoolExecutor(1, initializer=found.stand_back) as thread:
        assert thread.submit(lambda: (priority(), processors(0))).result() == (priority(), processors(0))


def test_where_threads_have_no_priority_nothing_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    found = Processors()
    found.share(True)
    with ThreadPoolExecutor(1, initializer=found.stand_back) as thread:
        assert thread.submit(lambda: (priority(), processors(0))).result() == (priority(), processors(0))
