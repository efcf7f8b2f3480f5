"""The number of S3 requests of each operation, counted over all libraries and processes in the server's log."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tarn.datasets.registry import Dataset
from tarn.lake import delta_tables
from tarn.model.datasets.snapshot import Snapshot
from tarn.query.reader import NOW
from tarn.settings import Settings

from tests.in_process_api import InProcessApi
from tests.s3 import Request, S3Server

Flushing = Callable[[], list[Snapshot]]

ENTITIES = "/v1/datasets/test/entities"
LINES = {"Content-Type": "application/x-ndjson"}

GETS = 4
"""Requests for one data file that was not read before: its footer, and the row groups that two lookups need."""

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def settings(s3: S3Server, database_url: str, tmp_path: Path) -> Settings:
    return s3.settings(database_url=database_url, admin_key_file=tmp_path / "admin.key")


def person(entity_id: str, **properties: str) -> dict[str, Any]:
    return {"id": entity_id, "schema": "Person", "properties": {"name": [entity_id], **properties}}


def add(api: InProcessApi, *entities: dict[str, Any], origin: str = "crawl") -> None:
    assert api.admin.post(f"{ENTITIES}?origin={origin}", list(entities)).status_code == 200


def read(api: InProcessApi, entity_id: str) -> dict[str, Any]:
    response = api.admin.get(f"{ENTITIES}/{entity_id}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def make_history(api: InProcessApi, flush: Flushing, length: int) -> list[Snapshot]:
    """Make snapshots of disjoint entities, in files whose bounds do not overlap."""
    snapshots = []
    for number in range(length):
        add(api, *(person(f"e{number:02d}-{each}") for each in range(3)))
        snapshots += flush()
    return snapshots


def in_log(request: Request) -> bool:
    return "/_delta_log/" in request.key


def is_data(request: Request) -> bool:
    return request.key.endswith(".parquet") and not in_log(request)


def kinds(requests: Iterable[Request]) -> Counter[tuple[str, str, int]]:
    """Count requests by operation, path and status, with ids and version numbers masked."""
    return Counter((each.operation, re.sub(r"[0-9a-f-]{12,}", "#", each.key), each.status) for each in requests)


@pytest.mark.contract("X1")
def test_ingest_sends_no_request_to_the_store(s3: S3Server, api: InProcessApi, dataset: Dataset, flush: Flushing):
    make_history(api, flush, 1)
    statement = b'{"entity_id": "x", "schema": "Person", "prop": "name", "value": "X"}\n'

    with s3.counted() as requests:
        add(api, *(person(f"p{number}") for number in range(2000)))
        api.admin.post("/v1/datasets/test/statements?origin=crawl", content=statement, headers=LINES)
        stage = api.admin.post("/v1/datasets/test/stages", {"origin": "bulk"}).json()["id"]
        api.admin.post(f"/v1/datasets/test/stages/{stage}/entities", [person("staged")])
        committed = api.admin.post(f"/v1/datasets/test/stages/{stage}/commit")

    assert committed.status_code == 200, committed.text
    assert requests == []


@pytest.mark.contract("X1", "X2")
def test_reader_resolves_the_head_without_a_request_and_reads_its_manifest_once(
    s3: S3Server, api: InProcessApi, dataset: Dataset, flush: Flushing
):
    head = make_history(api, flush, 5)[-1]

    with s3.counted() as first, api.services.reader.reading() as reading:
        found = reading.view(dataset, NOW).snapshot_id
    with s3.counted() as again, api.services.reader.reading() as reading:
        reading.view(dataset, NOW)

    assert found == head.id
    assert [(each.operation, each.status) for each in first] == [("GET", 200)]
    assert first[0].key.endswith(dataset.layout.snapshot(head.seq))
    assert again == []


@pytest.mark.contract("X1")
def test_first_entity_lookup_costs_its_manifest_and_a_few_requests_per_candidate_file_and_the_next_none(
    s3: S3Server, api: InProcessApi, flush: Flushing
):
    history = make_history(api, flush, 6)
    add(api, person("e02-1", country="de"))
    (changed,) = flush()
    quiet, busy = history[4], {*history[2].statements.added, *changed.statements.added}
    busy |= {path for path in changed.translog.added if not path.startswith("kind=insert/")}

    with s3.counted() as cold:
        found = read(api, "e04-0")
    with s3.counted() as warm:
        again, neighbor = read(api, "e04-0"), read(api, "e04-2")
    with s3.counted() as merged:
        read(api, "e02-1")

    assert found == again
    assert neighbor["id"] == "e04-2"
    assert warm == []
    assert Counter(each.operation for each in cold if not is_data(each)) == {"GET": 1}
    for requests, files in ((cold, {*quiet.statements.added}), (merged, busy)):
        data = [each for each in requests if is_data(each)]
        assert {each.key.split("/entities/")[1].split("/", 1)[1] for each in data} == files
        assert Counter(each.operation for each in data)["HEAD"] == len(files)
        assert Counter(each.operation for each in data)["GET"] <= GETS * len(files)
        assert {each.operation for each in requests} == {"GET", "HEAD"}


@pytest.mark.contract("X1")
def test_unflushed_events_add_no_request_to_a_read(s3: S3Server, api: InProcessApi, flush: Flushing):
    make_history(api, flush, 2)
    read(api, "e01-0")
    add(api, person("e01-0", country="de"), person("e01-9"))

    with s3.counted() as requests:
        found, new = read(api, "e01-0"), read(api, "e01-9")

    assert (found["properties"]["country"], new["caption"]) == (["de"], "e01-9")
    assert requests == []


@pytest.mark.contract("X1", "X3")
def test_cost_of_a_flush_grows_only_with_the_log_since_its_checkpoint(
    s3: S3Server, api: InProcessApi, flush: Flushing, monkeypatch: pytest.MonkeyPatch
):
    every = 4
    monkeypatch.setitem(delta_tables.CONFIGURATION, "delta.checkpointInterval", str(every))
    costs: list[list[Request]] = []
    for number in range(12):
        add(api, *(person(f"e{number:02d}-{each}") for each in range(3)))
        with s3.counted() as requests:
            flush()
        costs.append(requests)

    outside = [kinds(each for each in requests if not in_log(each)) for requests in costs]
    assert outside[2] == outside[11]
    assert Counter(each.operation for each in costs[11] if is_data(each)) == {"PUT": 2}
    assert all(in_log(each) for requests in costs for each in requests if each.operation == "LIST")
    log = [Counter(each.operation for each in requests if in_log(each)) for requests in costs]
    # Equally many commits since the last checkpoint, so equally many requests.
    assert log[4:8] == log[8:12]
    assert log[5]["LIST"] == log[6]["LIST"]
    assert log[6] - log[5] == {"GET": 4}


@pytest.mark.contract("X3")
def test_flush_costs_one_more_request_per_data_file(s3: S3Server, api: InProcessApi, flush: Flushing):
    make_history(api, flush, 2)
    costs = []
    for origins in (1, 5):
        for origin in range(origins):
            add(api, person(f"x{origins}-{origin}"), origin=f"o{origin}")
        with s3.counted() as requests:
            (snapshot,) = flush()
        files = len(snapshot.statements.added) + len(snapshot.translog.added)
        costs.append((files, len([each for each in requests if not in_log(each)])))

    (few, cheap), (many, dear) = costs
    assert (few, many) == (2, 6)
    assert dear - cheap == many - few
