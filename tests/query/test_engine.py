"""DuckDB for reads: its metadata caches are bounded."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tarn.query.engine.engine import Engine
from tarn.settings import Settings
from tarn.storage.connection import Connection

from tests.in_process_api import ONE_DATABASE

pytestmark = [ONE_DATABASE, pytest.mark.own_query_process]

MEMORY = 16_000_000
FILES, COLUMNS = 200, 200


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    little = settings.model_copy(update={"query_memory": "16m"})
    engine = Engine(little, Connection.from_settings(little))
    yield engine
    engine.close()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write files whose metadata together exceeds the engine's memory."""
    table = pa.table({f"column_{number:03d}": ["something to be known"] * 2 for number in range(COLUMNS)})
    paths = [tmp_path / f"{number}.parquet" for number in range(FILES)]
    for file in paths:
        pq.write_table(table, file, row_group_size=1)
    return paths


def test_engine_reads_more_files_than_its_metadata_cache_has_memory_for(engine: Engine, files: list[Path]) -> None:
    for file in files:
        with engine.session() as duck:
            assert duck.execute("SELECT count(column_000) FROM read_parquet(?)", [str(file)]).fetchall() == [(2,)]
    memory = _memory_by_tag(engine)
    assert 0 < memory.pop("OBJECT_CACHE") <= MEMORY
    with engine.session() as duck:
        rows = duck.execute("SELECT count(DISTINCT i::VARCHAR) FROM range(150_000) AS t(i)").fetchall()
    assert rows == [(150_000,)]


def test_engine_keeps_no_copy_of_local_files(engine: Engine, files: list[Path]) -> None:
    with engine.session() as duck:
        duck.execute(
            "SELECT max(column_000), max(column_199) FROM read_parquet(?)", [list(map(str, files[:20]))]
        ).fetchall()
    assert _memory_by_tag(engine).get("EXTERNAL_FILE_CACHE", 0) == 0


def _memory_by_tag(engine: Engine) -> dict[str, int]:
    with engine.session() as duck:
        return dict(duck.execute("SELECT tag, memory_usage_bytes FROM duckdb_memory()").fetchall())
