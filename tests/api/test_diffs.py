"""What changed between two snapshots."""

from typing import Any

import orjson
import pytest
from tarn.datasets.registry import Dataset

from tests.in_process_api import InProcessApi


def person(entity_id: str, **properties: Any) -> dict[str, Any]:
    return {"id": entity_id, "schema": "Person", "properties": properties}


@pytest.fixture
def history(house: InProcessApi, dataset: Dataset, flush) -> None:
    """1: jane, john, jim. 2: nothing that shows. 3: joan new, john otherwise, jim gone, jane as she was."""
    path = "/v1/datasets/test/entities"
    house.admin.post(path, [person("jane", name="Jane"), person("john", name="John"), person("jim", name="Jim")])
    flush()
    house.admin.post(path, [person("odd", name="Odd")])
    flush()
    house.admin.delete(f"{path}/odd")
    house.admin.delete(f"{path}/jim")
    house.admin.post(path, [person("joan", name="Joan"), person("john", nationality="de")])
    flush()


def ops(house: InProcessApi, path: str) -> list[tuple[str, str]]:
    answer = house.admin.get(f"/v1/datasets/test/snapshots/{path}")
    assert answer.status_code == 200, answer.text
    return [(found["op"], found["id"]) for found in answer.json()["results"]]


def test_diff_tells_added_deleted_and_modified_entities(house: InProcessApi, history):
    assert ops(house, "1/diff/3") == [("ADD", "joan"), ("DEL", "jim"), ("MOD", "john")]


def test_diff_the_other_way_round_is_the_opposite(house: InProcessApi, history):
    assert ops(house, "3/diff/1") == [("ADD", "jim"), ("DEL", "joan"), ("MOD", "john")]


def test_diff_of_a_snapshot_with_itself_is_empty(house: InProcessApi, history):
    assert ops(house, "2/diff/2") == []


def test_diff_shows_entities_as_they_are_and_deleted_ones_as_they_were(house: InProcessApi, history):
    results = house.admin.get("/v1/datasets/test/snapshots/1/diff/3").json()["results"]

    for found in results:
        at = 1 if found["op"] == "DEL" else 3
        assert found["entity"] == house.admin.get(f"/v1/datasets/test/entities/{found['id']}?at={at}").json()


def test_entity_that_was_only_seen_again_is_modified_as_its_last_seen_is_shown(house: InProcessApi, history, flush):
    house.admin.post("/v1/datasets/test/entities", person("jane", name="Jane"))
    flush()

    assert ops(house, "3/diff/4") == [("MOD", "jane")]


def test_diff_in_pages_is_the_diff(house: InProcessApi, history):
    path, found, cursor = "/v1/datasets/test/snapshots/1/diff/3", [], ""
    while cursor is not None:
        page = house.admin.get(path, params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        found += page["results"]
        cursor = page["next"]

    assert found == house.admin.get(path).json()["results"]
    assert len(found) == 3


def test_streamed_diff_is_the_diff_and_ends_with_its_snapshot(house: InProcessApi, history):
    answer = house.admin.get("/v1/datasets/test/snapshots/1/diff/latest/stream?end=true")
    *lines, end = map(orjson.loads, answer.text.splitlines())

    assert lines == house.admin.get("/v1/datasets/test/snapshots/1/diff/3").json()["results"]
    assert end == {"$end": {"snapshot": answer.headers["Tarn-Snapshot"], "count": 3, "invalid": 0}}


def test_diff_counts_the_entities_that_it_cannot_show(house: InProcessApi, history, flush):
    vessel = {"id": "john", "schema": "Vessel", "properties": {"name": ["John"]}}
    house.admin.post("/v1/datasets/test/entities?origin=register", [vessel])
    flush()

    answer = house.admin.get("/v1/datasets/test/snapshots/3/diff/4/stream?end=true")
    line, end = map(orjson.loads, answer.text.splitlines())

    assert line == {"op": "MOD", "id": "john", "entity": None}
    assert (end["$end"]["count"], end["$end"]["invalid"]) == (1, 1)


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("1/diff/9", "snapshot-not-found"),
        ("9/diff/1", "snapshot-not-found"),
        ("1/diff/2?at=1", "invalid-format"),
        ("1/diff/2?fresh=flush", "invalid-format"),
        ("1/diff/2?cursor=abc", "schema-violation"),
        ("1/diff/nowhere", "ref-not-found"),
    ],
)
def test_bad_diff_is_refused(house: InProcessApi, history, path: str, slug: str):
    answer = house.admin.get(f"/v1/datasets/test/snapshots/{path}")

    assert answer.json()["type"] == f"/problems/{slug}"


def test_diff_of_a_dataset_without_snapshots_says_so(house: InProcessApi, dataset: Dataset):
    answer = house.admin.get("/v1/datasets/test/snapshots/latest/diff/latest")

    assert answer.json()["type"] == "/problems/no-snapshots"
