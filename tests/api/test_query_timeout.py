"""Queries over HTTP that take too long: who is told what, and who is not affected."""

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

pytestmark = ONE_DATABASE

INSTANT = 1e-9
SMALL = "/v1/datasets/small/entities"

DRAW = random.Random(1)
LONG_TEXT = "".join("".join(DRAW.choices("ab", k=20)) + "a" * DRAW.randrange(100) for _ in range(8_000_000 // 70))
STUBBORN: dict[str, Any] = {
    "where": {
        "or": [{"field": "prop:bodyText", "op": "like", "value": f"%a________{'a' * 85}{end}%"} for end in "cdefghijkl"]
    }
}
"""Patterns as costly as they may be: ten seconds each on that text, in which DuckDB looks for no interrupt."""


@pytest.fixture(autouse=True)
def _dataset(dataset: Dataset) -> None:
    """Every test has the dataset `test`."""


def attack(caller: Caller) -> Response:
    return caller.post(f"{ENTITIES}/query", STUBBORN)


@pytest.mark.parametrize("name", [name for name in READS if name not in ("get", "stream", "statement stream")])
def test_every_query_over_its_time_is_answered_with_the_limit(house: InProcessApi, name: str):
    add(house, entity("jane", name="Jane"))

    with house.with_settings(query_seconds=INSTANT) as hurried:
        answer = read(hurried.admin, name)

    assert problem(answer) == (504, "query-timeout")
    assert (answer.json()["seconds"], answer.json()["retryable"]) == (INSTANT, False)
    assert "Retry-After" not in answer.headers


@pytest.mark.parametrize("name", ["stream", "statement stream"])
def test_stream_whose_query_takes_too_long_for_its_first_rows_is_answered_with_the_limit(
    house: InProcessApi, name: str
):
    add(house, entity("jane", name="Jane"))

    with house.with_settings(stream_seconds=INSTANT) as hurried:
        answer = read(hurried.admin, name)

    assert problem(answer) == (504, "query-timeout")


def test_stream_has_its_own_limit_and_not_that_of_queries(house: InProcessApi):
    add(house, entity("jane", name="Jane"))

    with house.with_settings(query_seconds=INSTANT) as hurried:
        assert len(lines_of(read(hurried.admin, "stream"))) == 1


@pytest.mark.parametrize("path", [f"{ROOT}/origins/crawl", f"{ROOT}/statements/{'0' * 40}"])
def test_delete_whose_count_takes_too_long_deletes_nothing(house: InProcessApi, path: str):
    add(house, entity("jane", name="Jane"))

    with house.with_settings(query_seconds=INSTANT) as hurried:
        answer = hurried.admin.delete(path)

        assert problem(answer) == (504, "query-timeout")
        assert len(lines_of(read(hurried.admin, "stream"))) == 1


def test_query_that_must_be_killed_affects_other_tenants_once(house: InProcessApi):
    mallory, alice = house.tenant("mallory", any="read"), house.tenant("alice", any="read")
    house.dataset("small")
    add(house, entity("jane", name="Jane"), dataset="small")
    add(house, entity("page", "Pages", bodyText=LONG_TEXT))
    reader = house.services.reader
    assert ids_of(alice.get(SMALL)) == ["jane"]
    first = reader._apart.pid

    with house.with_settings(query_seconds=3) as hurried:
        mallory, alice = hurried.with_key(str(mallory.key)), hurried.with_key(str(alice.key))
        killed = attack(mallory)
        assert ids_of(alice.get(SMALL)) == ["jane"]
        second = reader._apart.pid
        with ThreadPoolExecutor(1) as thread:
            attacked = thread.submit(attack, mallory)
            while not attacked.done():
                assert ids_of(alice.get(SMALL)) == ["jane"]
        harmless = mallory.get(SMALL)
        third, confined = reader._apart.pid, reader._confined.pid

    assert [problem(killed), problem(attacked.result())] == [(504, "query-timeout")] * 2
    assert first != second == third
    assert reader.is_confined("mallory")
    assert not reader.is_confined("alice")
    assert ids_of(harmless) == ["jane"]
    assert confined is None


@pytest.mark.parametrize("value", [f"%a{'_' * 900}", f"%{'a' * 100}_"])
def test_pattern_that_costs_too_much_is_refused_with_its_place(house: InProcessApi, value: str):
    where = {"and": [{"field": "prop:bodyText", "op": "ilike", "value": value}]}

    answer = house.admin.post(f"{ENTITIES}/query", {"where": where})

    assert problem(answer) == (422, "schema-violation")
    (fault,) = answer.json()["errors"]
    assert fault["field"] == "where.and.0.value"
    assert "allowed" in fault["reason"]


def test_entity_of_more_statements_than_a_lookup_may_have_is_shown_and_counted(house: InProcessApi):
    add(house, entity("jane", name=[f"Jane {number}" for number in range(MAX_LOOKUP_ROWS)]))
    add(house, entity("jane", alias="J"), origin="other")

    shown = house.admin.get(f"{ENTITIES}/jane")
    by_other = house.admin.get(f"{ENTITIES}/jane?origin=other").json()
    (listed,) = house.admin.get(f"{ENTITIES}?id=jane").json()["results"]
    deleted = house.admin.delete(f"{ENTITIES}/jane?origin=crawl").json()

    assert shown.json() == listed
    assert len(listed["properties"]["name"]) == MAX_LOOKUP_ROWS
    assert by_other["properties"] == {"alias": ["J"]}
    assert by_other["origin"] == ["other"]
    assert deleted["tombstones"] == MAX_LOOKUP_ROWS + 1
    assert house.admin.get(f"{ENTITIES}/john").status_code == 404


def test_entity_of_more_ids_than_a_lookup_may_have_is_shown(house: InProcessApi):
    ids = [f"one-{number}" for number in range(MAX_LOOKUP_IDS + 1)]
    statement = {"canonical_id": "jane", "schema": "Person", "prop": "name", "value": "Jane"}
    add_statements(house, *(statement | {"entity_id": one} for one in ids))
    merge(house, "joan", "few-1", "few-2")

    for name in ("jane", ids[7]):
        shown = house.admin.get(f"{ENTITIES}/{name}").json()
        assert (shown["id"], shown["referents"]) == ("jane", sorted(ids))
    assert house.admin.get(f"{ENTITIES}/few-1").json()["referents"] == ["few-1", "few-2"]
