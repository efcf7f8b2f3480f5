"""Streams in process: what goes wrong before the first piece, and bodies that came before a read."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from tarn.datasets.registry import Dataset
from tarn.model.snapshot import Snapshot

from tests.api.test_entity_reads import ENTITIES, ROOT, add, entity, ids_of, lines_of, problem
from tests.in_process_api import InProcessApi

Flushing = Callable[[], list[Snapshot]]

STREAMS = [f"{ENTITIES}/stream", f"{ROOT}/statements/stream"]


@pytest.fixture(autouse=True)
def flushed(house: InProcessApi, dataset: Dataset, flush: Flushing) -> Path:
    """Jane in a snapshot, and the folder with its files."""
    add(house, entity("jane", name="Jane"))
    flush()
    root = house.services.store.connection.folder
    assert root is not None
    return root / dataset.layout.statements


@pytest.mark.parametrize("path", [*STREAMS, ENTITIES, f"{ENTITIES}/jane", f"{ROOT}/statements"])
def test_file_that_is_not_there_is_answered_as_a_problem_and_not_with_half_a_stream(
    house: InProcessApi, flushed: Path, path: str
):
    for file in flushed.rglob("*.parquet"):
        file.unlink()

    answer = house.admin.get(path)

    assert problem(answer) == (503, "unavailable")
    assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize("path", STREAMS)
def test_stream_that_was_refused_leaves_its_place_to_others(house: InProcessApi, path: str):
    with house.with_settings(query_streams=1) as small:
        for _ in range(3):
            assert small.admin.get(f"{path}?at=7").status_code == 404
        answer = small.admin.get(f"{path}?end=true")

    assert lines_of(answer)[-1]["$end"]["count"] > 0


def test_read_with_a_compressed_body_is_answered(house: InProcessApi):
    body = gzip.compress(orjson.dumps({"where": {"field": "id", "op": "eq", "value": "jane"}}))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

    assert ids_of(house.admin.post(f"{ENTITIES}/query", content=body, headers=headers)) == ["jane"]
    assert ids_of(house.admin.get(ENTITIES, headers={"Content-Encoding": "zstd"})) == ["jane"]
    assert len(lines_of(house.admin.get(STREAMS[0], headers={"Content-Encoding": "gzip"}))) == 1
