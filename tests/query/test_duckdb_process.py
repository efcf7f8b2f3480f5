"""DuckDB in a process of its own: the same results and errors, low priority, and restart after a crash."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pytest
from tarn.child_process import LOW_PRIORITY
from tarn.errors import Unavailable
from tarn.query.engine.duckdb_process import CACHED_BYTES, ArrowFileCache, register_table
from tarn.query.engine.engine import Engine, ProcessEngine
from tarn.settings import Settings
from tarn.storage.connection import Connection

from tests.waiting import wait_until

pytestmark = pytest.mark.own_query_process

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the processors that a process may use")
MULTIPROCESSOR = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is only one processor")

ENDLESS = "SELECT count(*) FROM range(10_000_000_000) AS t(i) WHERE hash(i) % 7 = 8"


@pytest.fixture
def settings(default_settings: Settings, tmp_path: Path) -> Settings:
    return default_settings.model_copy(update={"lake_uri": str(tmp_path / "lake")})


@pytest.fixture
def engine(settings: Settings) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(settings, Connection.from_settings(settings))
    yield engine
    engine.close()


@pytest.fixture
def local_engine(settings: Settings) -> Iterator[Engine]:
    engine = Engine(settings, Connection.from_settings(settings))
    yield engine
    engine.close()


def threads(pid: int | None) -> list[int]:
    return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]


@pytest.mark.parametrize(
    ("query", "parameters"),
    [
        ("SELECT 1, 'a', 1.5, NULL, true, 'bytes'::BLOB", None),
        ("SELECT ?, ?, ?", ["ä\x00b", None, [1, 2]]),
        ("SELECT $name", {"name": "by name"}),
        ("SELECT make_timestamp(0), DATE '2020-01-01', 12.50::DECIMAL(4, 2), {'a': [1]}", None),
        ("SELECT i FROM range(5000) AS t(i)", None),
        ("SELECT 1 WHERE false", None),
    ],
)
def test_rows_equal_those_of_duckdb_in_this_process(engine: ProcessEngine, local_engine: Engine, query, parameters):
    with engine.session() as remote, local_engine.session() as local:
        assert remote.execute(query, parameters).fetchall() == local.execute(query, parameters).fetchall()
        assert remote.execute(query, parameters).fetchone() == local.execute(query, parameters).fetchone()
        names = [column[0] for column in local.execute(query, parameters).description]
        assert [column[0] for column in remote.execute(query, parameters).description] == names


@pytest.mark.parametrize(
    "query", ["SELEC 1", "SELECT * FROM nowhere", "SELECT error('no')", "FROM read_parquet('none')"]
)
def test_errors_equal_those_of_duckdb(engine: ProcessEngine, local_engine: Engine, query: str):
    with engine.session() as remote, local_engine.session() as local:
        with pytest.raises(duckdb.Error) as local_error:
            local.execute(query)
        with pytest.raises(type(local_error.value)) as remote_error:
            remote.execute(query)
        assert str(remote_error.value) == str(local_error.value)
        assert remote.execute("SELECT 1").fetchall() == [(1,)]


def test_rows_arrive_as_arrow_unbounded_and_in_order(engine: ProcessEngine):
    with engine.session() as duck:
        rows = duck.execute("SELECT i, repeat('x', 100) AS text FROM range(100_000) AS t(i) ORDER BY i")
        table = pa.Table.from_batches(rows.to_arrow_reader(2048))
        assert table.column("i").to_pylist() == list(range(100_000))
        # After a query was cancelled midway, the session can run the next.
        batches = duck.execute("FROM range(10_000_000)").to_arrow_reader(2048)
        assert next(iter(batches)).num_rows == 2048
        batches.close()
        assert duck.execute("SELECT 1").fetchall() == [(1,)]
        assert list(duck.execute("SELECT 1 AS i WHERE false").to_arrow_reader(2048)) == []


def test_error_midway_is_raised_midway(engine: ProcessEngine):
    with engine.session() as duck:
        failing = "SELECT CASE WHEN i < 1000000 THEN i ELSE error('no more') END AS i FROM range(2000000) AS t(i)"
        with pytest.raises((OSError, duckdb.Error), match="no more"):
            list(duck.execute(failing).to_arrow_reader(2048))


def test_sessions_have_separate_tables(engine: ProcessEngine):
    with engine.session() as one, engine.session() as other:
        one.execute("CREATE TEMP TABLE mine AS SELECT 1 AS i")
        with pytest.raises(duckdb.CatalogException):
            other.execute("FROM mine")
        assert one.execute("FROM mine").fetchall() == [(1,)]


def test_query_is_interrupted_from_another_thread_and_the_session_is_usable_afterwards(engine: ProcessEngine):
    with engine.session() as duck, ThreadPoolExecutor(1) as other:
        running = other.submit(lambda: duck.execute(ENDLESS).fetchall())

        def has_ended() -> bool:
            duck.interrupt()
            return running.done()

        wait_until(has_ended)
        with pytest.raises(duckdb.InterruptException):
            running.result()

        def is_usable() -> bool:
            with suppress(duckdb.InterruptException):  # the last message may arrive late
                return duck.execute("SELECT 1").fetchall() == [(1,)]
            return False

        wait_until(is_usable)


def test_waiters_of_a_killed_process_get_an_error_and_the_next_query_has_a_new_process(engine: ProcessEngine):
    with ThreadPoolExecutor(1) as other:

        def ask() -> object:
            with engine.session() as duck:
                return duck.execute(ENDLESS).fetchall()

        engine.warm_up()
        killed = engine.pid
        assert killed is not None
        busy = psutil.Process(killed).cpu_times().user + 0.2
        running = other.submit(ask)
        wait_until(lambda: psutil.Process(killed).cpu_times().user > busy)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(Unavailable):
            running.result()
    with engine.session() as duck:
        assert duck.execute("SELECT 1").fetchall() == [(1,)]
    assert engine.pid != killed


def test_rows_released_after_their_session_do_not_crash_the_process(engine: ProcessEngine):
    with engine.session() as duck:
        late = duck.execute("FROM range(10_000_000)").to_arrow_reader(2048)
        assert next(iter(late)).num_rows == 2048
    pid = engine.pid
    late.close()
    with pytest.raises(duckdb.ConnectionException):
        duck.execute("SELECT 1")
    with engine.session() as duck:
        assert duck.execute("SELECT 1").fetchall() == [(1,)]
    assert engine.pid == pid


def test_table_on_a_full_disk_raises_an_error_and_leaves_no_file(tmp_path: Path):
    cache = ArrowFileCache(tmp_path / "nowhere")
    with pytest.raises(Unavailable), cache.file(pa.table({"i": [1]}), "one"):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_process_ends_when_its_engine_is_closed(settings: Settings):
    engine = ProcessEngine(settings, Connection.from_settings(settings))
    engine.warm_up()
    pid = engine.pid
    assert pid is not None
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@LINUX
def test_every_thread_of_the_process_has_low_priority(engine: ProcessEngine):
    with engine.session() as duck:
        duck.execute("SELECT count(DISTINCT i) FROM range(100_000) AS t(i)").fetchall()
        usual_value = os.getpriority(os.PRIO_PROCESS, 0)
        priorities = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads(engine.pid)}
        assert priorities == {usual_value + LOW_PRIORITY}


@LINUX
@MULTIPROCESSOR
def test_process_uses_only_its_share_of_processors_while_they_are_shared(engine: ProcessEngine):
    all_processors = os.sched_getaffinity(0)
    with engine.session() as duck:

        def affinities() -> list[set[int]]:
            return [os.sched_getaffinity(thread) for thread in threads(engine.pid)]

        def workers() -> int:
            return duck.execute("SELECT current_setting('threads')").fetchall()[0][0]

        usual_value = workers()
        engine.set_cpus_shared(True)
        assert all(0 < len(part) <= len(all_processors) / 2 for part in affinities())
        wait_until(lambda: workers() <= len(all_processors) // 2)
        with engine.session() as later:
            assert later.execute("SELECT 1").fetchall() == [(1,)]
            assert all(part < all_processors for part in affinities())
        engine.set_cpus_shared(False)
        assert all(part == all_processors for part in affinities())
        wait_until(lambda: workers() == usual_value)


@LINUX
@MULTIPROCESSOR
def test_process_started_while_processors_are_shared_uses_only_its_share(engine: ProcessEngine):
    engine.set_cpus_shared(True)
    engine.warm_up()
    assert all(os.sched_getaffinity(thread) < os.sched_getaffinity(0) for thread in threads(engine.pid))


def test_transferred_table_is_read_by_its_name(engine: ProcessEngine, local_engine: Engine):
    for version in (None, ("a", 1)):
        for other in (engine, local_engine):
            with other.session() as duck:
                register_table(duck, "incoming", pa.table({"i": [1, 2, None], "t": ["ä", None, "c"]}), version)
                assert duck.execute("FROM incoming").fetchall() == [(1, "ä"), (2, None), (None, "c")]


def test_table_of_a_version_is_written_once_and_evicted_when_there_are_too_many(tmp_path: Path):
    cache = ArrowFileCache(tmp_path)
    large = pa.table({"i": pa.array(range(CACHED_BYTES // 8 // 2 + 1), pa.int64())})
    with cache.file(large, "one") as first, cache.file(large, "one") as again:
        assert first.samefile(again)
    with cache.file(large, "two"):
        assert len(list(tmp_path.glob("*.arrow"))) == 1
    with cache.file(large, None) as own:
        assert own.exists()
    assert not own.exists()
    assert len(list(tmp_path.iterdir())) == 1
    cache.clear()
    assert not list(tmp_path.iterdir())
