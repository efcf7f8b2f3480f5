"""Streams in process: errors before the first chunk, and reads with a request body."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from tarn.datasets.registry import Dataset
from tarn.model.datasets.snapshot import Snapshot

from tests.api.test_entity_reads import ENTITIES, ROOT, add, entity, ids_of, lines_of, problem
from tests.in_process_api import InProcessApi

Flushing = Callable[[], list[Snapshot]]

STREAMS = [f"{ENTITIES}/stream", f"{ROOT}/statements/stream"]


@pytest.fixture(autouse=True)
def flushed(api: InProcessApi, dataset: Dataset, flush: Flushing) -> Path:
    """Write Jane into a snapshot, and return the folder with its files."""
    add(api, entity("jane", name="Jane"))
    flush()
    root = api.services.store.connection.folder
    assert root is not None
    return root / dataset.layout.statements


@pytest.mark.parametrize("path", [*STREAMS, ENTITIES, f"{ENTITIES}/jane", f"{ROOT}/statements"])
def test_missing_file_is_a_problem_and_not_a_truncated_stream(api: InProcessApi, flushed: Path, path: str):
    for file in flushed.rglob("*.parquet"):
        file.unlink()

    response = api.admin.get(path)

    assert problem(response) == (503, "unavailable")
    assert int(response.headers["Retry-After"]) > 0


@pytest.mark.parametrize("path", STREAMS)
def test_refused_stream_releases_its_slot(api: InProcessApi, path: str):
    with api.with_settings(query_streams=1) as small:
        for _ in range(3):
            assert small.admin.get(f"{path}?at=7").status_code == 404
        response = small.admin.get(f"{path}?end=true")

    assert lines_of(response)[-1]["$end"]["count"] > 0


def test_read_with_a_compressed_body_is_answered(api: InProcessApi):
    body = gzip.compress(orjson.dumps({"where": {"field": "id", "op": "eq", "value": "jane"}}))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

    assert ids_of(api.admin.post(f"{ENTITIES}/query", content=body, headers=headers)) == ["jane"]
    assert ids_of(api.admin.get(ENTITIES, headers={"Content-Encoding": "zstd"})) == ["jane"]
    assert len(lines_of(api.admin.get(STREAMS[0], headers={"Content-Encoding": "gzip"}))) == 1
