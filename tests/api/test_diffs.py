"""Differences between two snapshots over HTTP."""

from typing import Any

import orjson
import pytest
from tarn.datasets.registry import Dataset

from tests.in_process_api import InProcessApi


def person(entity_id: str, **properties: Any) -> dict[str, Any]:
    return {"id": entity_id, "schema": "Person", "properties": properties}


@pytest.fixture
def history(api: InProcessApi, dataset: Dataset, flush) -> None:
    """Publish three snapshots. 1: jane, john, jim. 2: no visible change. 3: joan added, john modified, jim
    deleted, jane unchanged.
    """
    path = "/v1/datasets/test/entities"
    api.admin.post(path, [person("jane", name="Jane"), person("john", name="John"), person("jim", name="Jim")])
    flush()
    api.admin.post(path, [person("odd", name="Odd")])
    flush()
    api.admin.delete(f"{path}/odd")
    api.admin.delete(f"{path}/jim")
    api.admin.post(path, [person("joan", name="Joan"), person("john", nationality="de")])
    flush()


def ops(api: InProcessApi, path: str) -> list[tuple[str, str]]:
    response = api.admin.get(f"/v1/datasets/test/snapshots/{path}")
    assert response.status_code == 200, response.text
    return [(change["op"], change["id"]) for change in response.json()["results"]]


def test_diff_lists_added_deleted_and_modified_entities(api: InProcessApi, history):
    assert ops(api, "1/diff/3") == [("ADD", "joan"), ("DEL", "jim"), ("MOD", "john")]


def test_diff_in_reverse_is_the_opposite(api: InProcessApi, history):
    assert ops(api, "3/diff/1") == [("ADD", "jim"), ("DEL", "joan"), ("MOD", "john")]


def test_diff_of_a_snapshot_with_itself_is_empty(api: InProcessApi, history):
    assert ops(api, "2/diff/2") == []


def test_diff_shows_current_entities_and_the_former_state_of_deleted_ones(api: InProcessApi, history):
    results = api.admin.get("/v1/datasets/test/snapshots/1/diff/3").json()["results"]

    for change in results:
        at = 1 if change["op"] == "DEL" else 3
        assert change["entity"] == api.admin.get(f"/v1/datasets/test/entities/{change['id']}?at={at}").json()


def test_entity_with_only_a_new_last_seen_is_modified(api: InProcessApi, history, flush):
    api.admin.post("/v1/datasets/test/entities", person("jane", name="Jane"))
    flush()

    assert ops(api, "3/diff/4") == [("MOD", "jane")]


def test_pages_of_a_diff_add_up_to_the_diff(api: InProcessApi, history):
    path, changes, cursor = "/v1/datasets/test/snapshots/1/diff/3", [], ""
    while cursor is not None:
        page = api.admin.get(path, params={"limit": 1, **({"cursor": cursor} if cursor else {})}).json()
        changes += page["results"]
        cursor = page["next"]

    assert changes == api.admin.get(path).json()["results"]
    assert len(changes) == 3


def test_streamed_diff_equals_the_diff_and_ends_with_its_snapshot(api: InProcessApi, history):
    response = api.admin.get("/v1/datasets/test/snapshots/1/diff/latest/stream?end=true")
    *lines, end = map(orjson.loads, response.text.splitlines())

    assert lines == api.admin.get("/v1/datasets/test/snapshots/1/diff/3").json()["results"]
    assert end == {"$end": {"snapshot": response.headers["Tarn-Snapshot"], "count": 3, "invalid": 0}}


def test_diff_counts_invalid_entities(api: InProcessApi, history, flush):
    vessel = {"id": "john", "schema": "Vessel", "properties": {"name": ["John"]}}
    api.admin.post("/v1/datasets/test/entities?origin=register", [vessel])
    flush()

    response = api.admin.get("/v1/datasets/test/snapshots/3/diff/4/stream?end=true")
    line, end = map(orjson.loads, response.text.splitlines())

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
def test_bad_diff_is_refused(api: InProcessApi, history, path: str, slug: str):
    response = api.admin.get(f"/v1/datasets/test/snapshots/{path}")

    assert response.json()["type"] == f"/problems/{slug}"


def test_diff_of_a_dataset_without_snapshots_is_refused(api: InProcessApi, dataset: Dataset):
    response = api.admin.get("/v1/datasets/test/snapshots/latest/diff/latest")

    assert response.json()["type"] == "/problems/no-snapshots"
