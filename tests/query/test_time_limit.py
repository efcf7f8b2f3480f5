"""Time limit of queries, with a real query process that is interrupted or killed."""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow as pa
import pytest
from tarn.api.http.reads.read_requests import ClientWatch
from tarn.errors import QueryTimeout, Unavailable
from tarn.model.ftm.query import Op
from tarn.query.engine.duckdb_process import DuckdbSession, register_table
from tarn.query.engine.engine import Engine, IsolatedEngine, ProcessEngine
from tarn.query.engine.tenant_isolation import SECONDS, IsolatedTenants
from tarn.query.filters import CALLS, _expression
from tarn.query.reader import Reading
from tarn.settings import Settings
from tarn.storage.connection import Connection

from tests.query.test_duckdb_process import ENDLESS
from tests.waiting import wait_until

pytestmark = pytest.mark.own_query_process

TEXT = "".join(random.Random(1).choices("ab", k=8_000_000))
UNINTERRUPTIBLE = "SELECT regexp_full_match(value, '.*a' || repeat('.', 900) || 'c', 's') FROM texts"
"""A minute or more of work on one row, in which DuckDB does not check for an interrupt."""


@pytest.fixture
def settings(default_settings: Settings, tmp_path: Path) -> Settings:
    return default_settings.model_copy(update={"lake_uri": str(tmp_path / "lake")})


@pytest.fixture
def engine(settings: Settings) -> Iterator[ProcessEngine]:
    engine = ProcessEngine(settings, Connection.from_settings(settings))
    yield engine
    engine.close()


def run_uninterruptible(engine: ProcessEngine, seconds: float) -> object:
    with engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        register_table(duck, "texts", pa.table({"value": [TEXT]}), None)
        duck.limit(seconds)
        return duck.execute(UNINTERRUPTIBLE).fetchall()


def answers(engine: ProcessEngine) -> bool:
    with engine.session() as duck:
        return duck.execute("SELECT 1").fetchall() == [(1,)]


def test_query_over_its_time_limit_is_interrupted_and_its_process_is_kept(engine: ProcessEngine):
    assert answers(engine)
    pid = engine.pid
    with engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        duck.limit(0.2)
        with pytest.raises(QueryTimeout, match=r"after 0\.2 seconds") as stopped:
            duck.execute(ENDLESS).fetchall()
    assert stopped.value.members == {"seconds": 0.2}
    assert answers(engine)
    assert engine.pid == pid


def test_query_that_ignores_the_interrupt_is_killed_and_others_can_retry(engine: ProcessEngine):
    assert answers(engine)
    pid = engine.pid
    assert pid is not None
    with ThreadPoolExecutor(1) as other, engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        busy = psutil.Process(pid).cpu_times().user + 0.2
        other_query = other.submit(lambda: duck.execute(ENDLESS).fetchall())
        wait_until(lambda: psutil.Process(pid).cpu_times().user > busy)
        with pytest.raises(QueryTimeout):
            run_uninterruptible(engine, 0.2)
        with pytest.raises(Unavailable) as failed:
            other_query.result()
        assert failed.value.retryable
    assert answers(engine)
    assert engine.pid != pid


def test_session_that_killed_the_process_reports_it_and_an_interrupted_one_does_not(engine: ProcessEngine):
    killers: list[str] = []
    with engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        duck.on_kill = lambda: killers.append("interrupted")
        duck.limit(0.1)
        with pytest.raises(QueryTimeout):
            duck.execute(ENDLESS)
    with engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        duck.on_kill = lambda: killers.append("uninterruptible")
        register_table(duck, "texts", pa.table({"value": [TEXT]}), None)
        duck.limit(0.1)
        with pytest.raises(QueryTimeout):
            duck.execute(UNINTERRUPTIBLE).fetchall()
    assert killers == ["uninterruptible"]


def test_time_that_rows_wait_for_the_reader_does_not_count_with_a_restarted_limit(engine: ProcessEngine):
    with engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        batches = iter(duck.execute("FROM range(10_000_000)").to_arrow_reader(2048))
        duck.limit(0.1)
        over = time.monotonic() + 0.2
        wait_until(lambda: time.monotonic() > over)
        duck.limit(60)
        assert sum(batch.num_rows for batch in batches) > 0
        duck.limit(0)
        with pytest.raises(QueryTimeout):
            duck.execute("SELECT 1")


def test_credentials_that_change_long_after_the_start_are_used(engine: ProcessEngine):
    assert answers(engine)
    assert isinstance(engine._root, DuckdbSession)
    engine._root.limit(0)
    engine._keys = cast("Any", "others")

    assert answers(engine)


def test_start_timeout_is_retryable_and_not_a_query_timeout(engine: ProcessEngine, monkeypatch: pytest.MonkeyPatch):
    assert answers(engine)
    engine._keys = cast("Any", "others")
    monkeypatch.setattr("tarn.query.engine.engine.START_SECONDS", 0)

    with pytest.raises(Unavailable):
        answers(engine)


def test_lookup_in_the_apis_own_process_is_interrupted(settings: Settings, tmp_path: Path):
    engine = Engine(settings, Connection.from_settings(settings))
    watch = ClientWatch()

    def lookup() -> object:
        with engine.session() as duck:
            watch.begin(
                Reading(duck, cast("Any", None), cast("Any", None), tmp_path, cast("Any", None))
            )  # it needs none
            return duck.execute(ENDLESS).fetchall()

    async def limited() -> object:
        with watch.limited(0.2):
            return await asyncio.to_thread(lookup)

    with pytest.raises(QueryTimeout):
        asyncio.run(limited())
    engine.close()


@pytest.mark.parametrize(
    "pattern", ["%abba%c", "%a________c%", "%a_b_a_b_a_b_a_b_%c", "_" * 900 + "%c", "%a" * 400 + "%c"]
)
@pytest.mark.parametrize("op", [Op.LIKE, Op.ILIKE])
def test_longest_patterns_match_a_text_of_eight_megabytes_in_time(engine: ProcessEngine, op: Op, pattern: str):
    with engine.session() as duck:
        assert isinstance(duck, DuckdbSession)
        register_table(duck, "texts", pa.table({"value": [TEXT]}), None)
        duck.limit(60)
        query = f"SELECT {CALLS[op].format('value')} FROM texts"
        assert duck.execute(query, [_expression(pattern)]).fetchall() == [(False,)]


def test_process_of_isolated_tenants_has_less_memory_and_ends_with_its_last_session(settings: Settings):
    engine = IsolatedEngine(settings, Connection.from_settings(settings))
    with engine.session() as one:
        with engine.session() as other:
            assert other.execute("SELECT current_setting('threads')").fetchall() == [(1,)]
            memory = other.execute("SELECT current_setting('memory_limit')").fetchall()[0][0]
            pid = engine.pid
        assert one.execute("SELECT 1").fetchall() == [(1,)]
        assert engine.pid == pid
    assert pid is not None
    assert engine.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert memory == "512.0 MiB"
    assert answers(engine)
    engine.close()


def test_tenant_is_isolated_for_ten_minutes_after_it_was_last_added():
    now = [0.0]
    isolated_tenants = IsolatedTenants(lambda: now[0])
    isolated_tenants.add("one")
    now[0] = SECONDS - 1
    isolated_tenants.add("other")
    assert ("one" in isolated_tenants, "other" in isolated_tenants, "third" in isolated_tenants) == (True, True, False)
    now[0] = SECONDS + 1
    assert ("one" in isolated_tenants, "other" in isolated_tenants) == (False, True)
