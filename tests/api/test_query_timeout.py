"""Query time-outs over HTTP: the problem that is returned, and isolation from other tenants."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from httpx2 import Response
from tarn.datasets.registry import Dataset
from tarn.query.live import MAX_LOOKUP_IDS, MAX_LOOKUP_ROWS

from tests.api.test_entity_reads import ENTITIES, ROOT, add, add_statements, entity, ids_of, lines_of, merge, problem
from tests.api.test_read_state import READS, read
from tests.in_process_api import ONE_DATABASE, Caller, InProcessApi

pytestmark = [ONE_DATABASE, pytest.mark.own_query_process]

INSTANT = 1e-9
SMALL = "/v1/datasets/small/entities"

DRAW = random.Random(1)
LONG_TEXT = "".join("".join(DRAW.choices("ab", k=20)) + "a" * DRAW.randrange(100) for _ in range(8_000_000 // 70))
STUBBORN: dict[str, Any] = {
    "where": {
        "or": [{"field": "prop:bodyText", "op": "like", "value": f"%a________{'a' * 85}{end}%"} for end in "cdefghijkl"]
    }
}
"""Patterns of the maximum cost: ten seconds each on that text, in which DuckDB does not check for an interrupt."""


@pytest.fixture(autouse=True)
def _dataset(dataset: Dataset) -> None:
    """Create the dataset `test` for every test."""


def attack(caller: Caller) -> Response:
    return caller.post(f"{ENTITIES}/query", STUBBORN)


@pytest.mark.parametrize("name", [name for name in READS if name not in ("get", "stream", "statement stream")])
def test_every_query_over_its_time_limit_is_answered_with_the_limit(api: InProcessApi, name: str):
    add(api, entity("jane", name="Jane"))

    with api.with_settings(query_seconds=INSTANT) as limited:
        response = read(limited.admin, name)

    assert problem(response) == (504, "query-timeout")
    assert (response.json()["seconds"], response.json()["retryable"]) == (INSTANT, False)
    assert "Retry-After" not in response.headers


@pytest.mark.parametrize("name", ["stream", "statement stream"])
def test_stream_without_rows_within_the_time_limit_is_answered_with_the_limit(api: InProcessApi, name: str):
    add(api, entity("jane", name="Jane"))

    with api.with_settings(stream_seconds=INSTANT) as limited:
        response = read(limited.admin, name)

    assert problem(response) == (504, "query-timeout")


def test_stream_has_its_own_time_limit(api: InProcessApi):
    add(api, entity("jane", name="Jane"))

    with api.with_settings(query_seconds=INSTANT) as limited:
        assert len(lines_of(read(limited.admin, "stream"))) == 1


@pytest.mark.parametrize("path", [f"{ROOT}/origins/crawl", f"{ROOT}/statements/{'0' * 40}"])
def test_delete_whose_count_times_out_deletes_nothing(api: InProcessApi, path: str):
    add(api, entity("jane", name="Jane"))

    with api.with_settings(query_seconds=INSTANT) as limited:
        response = limited.admin.delete(path)

        assert problem(response) == (504, "query-timeout")
        assert len(lines_of(read(limited.admin, "stream"))) == 1


def test_query_that_must_be_killed_affects_other_tenants_once(api: InProcessApi):
    mallory, alice = api.tenant("mallory", any="read"), api.tenant("alice", any="read")
    api.dataset("small")
    add(api, entity("jane", name="Jane"), dataset="small")
    add(api, entity("page", "Pages", bodyText=LONG_TEXT))
    reader = api.services.reader
    assert ids_of(alice.get(SMALL)) == ["jane"]
    first = reader._remote.pid

    with api.with_settings(query_seconds=3) as limited:
        mallory, alice = limited.with_key(str(mallory.key)), limited.with_key(str(alice.key))
        killed = attack(mallory)
        assert ids_of(alice.get(SMALL)) == ["jane"]
        second = reader._remote.pid
        with ThreadPoolExecutor(1) as thread:
            attacked = thread.submit(attack, mallory)
            while not attacked.done():
                assert ids_of(alice.get(SMALL)) == ["jane"]
        harmless = mallory.get(SMALL)
        third, isolated = reader._remote.pid, reader._isolated.pid

    assert [problem(killed), problem(attacked.result())] == [(504, "query-timeout")] * 2
    assert first != second == third
    assert reader.is_isolated("mallory")
    assert not reader.is_isolated("alice")
    assert ids_of(harmless) == ["jane"]
    assert isolated is None


@pytest.mark.parametrize("value", [f"%a{'_' * 900}", f"%{'a' * 100}_"])
def test_pattern_over_the_cost_limit_is_refused_with_its_location(api: InProcessApi, value: str):
    where = {"and": [{"field": "prop:bodyText", "op": "ilike", "value": value}]}

    response = api.admin.post(f"{ENTITIES}/query", {"where": where})

    assert problem(response) == (422, "schema-violation")
    (fault,) = response.json()["errors"]
    assert fault["field"] == "where.and.0.value"
    assert "allowed" in fault["reason"]


def test_entity_with_more_statements_than_the_lookup_limit_is_shown_and_counted(api: InProcessApi):
    add(api, entity("jane", name=[f"Jane {number}" for number in range(MAX_LOOKUP_ROWS)]))
    add(api, entity("jane", alias="J"), origin="other")

    shown = api.admin.get(f"{ENTITIES}/jane")
    by_other = api.admin.get(f"{ENTITIES}/jane?origin=other").json()
    (listed,) = api.admin.get(f"{ENTITIES}?id=jane").json()["results"]
    deleted = api.admin.delete(f"{ENTITIES}/jane?origin=crawl").json()

    assert shown.json() == listed
    assert len(listed["properties"]["name"]) == MAX_LOOKUP_ROWS
    assert by_other["properties"] == {"alias": ["J"]}
    assert by_other["origin"] == ["other"]
    assert deleted["tombstones"] == MAX_LOOKUP_ROWS + 1
    assert api.admin.get(f"{ENTITIES}/john").status_code == 404


def test_entity_with_more_ids_than_the_lookup_limit_is_shown(api: InProcessApi):
    ids = [f"one-{number}" for number in range(MAX_LOOKUP_IDS + 1)]
    statement = {"canonical_id": "jane", "schema": "Person", "prop": "name", "value": "Jane"}
    add_statements(api, *(statement | {"entity_id": one} for one in ids))
    merge(api, "joan", "few-1", "few-2")

    for name in ("jane", ids[7]):
        shown = api.admin.get(f"{ENTITIES}/{name}").json()
        assert (shown["id"], shown["referents"]) == ("jane", sorted(ids))
    assert api.admin.get(f"{ENTITIES}/few-1").json()["referents"] == ["few-1", "few-2"]
