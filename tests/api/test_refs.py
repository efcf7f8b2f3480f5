"""Refs: names for snapshots."""

import orjson
import pytest
from tarn.datasets.registry import Dataset
from tarn.model.names import RefName

from tests.in_process_api import InProcessApi


@pytest.fixture
def two(house: InProcessApi, dataset: Dataset, flush) -> list[str]:
    """The ids of two snapshots."""
    ids = []
    for name in ("Jane", "John"):
        house.admin.post("/v1/datasets/test/entities", {"id": name, "schema": "Person"})
        ids.append(flush()[0].id)
    return ids


def test_ref_stands_for_a_snapshot_wherever_one_is_named(house: InProcessApi, dataset: Dataset, two: list[str]):
    made = house.admin.put("/v1/datasets/test/refs/release-1", {"snapshot": "1"})

    assert made.status_code == 200
    assert (made.json()["seq"], made.json()["snapshot"], made.json()["tenant"]) == (1, two[0], "admin")
    read = house.admin.get("/v1/datasets/test/entities?at=release-1")
    assert [entity["id"] for entity in read.json()["results"]] == ["Jane"]
    assert read.headers["Tarn-Snapshot"] == two[0]


def test_ref_is_moved_listed_shown_and_deleted(house: InProcessApi, dataset: Dataset, two: list[str]):
    for name, snapshot in (("b", two[0]), ("a", "latest"), ("b", "2")):
        assert house.admin.put(f"/v1/datasets/test/refs/{name}", {"snapshot": snapshot}).status_code == 200

    listed = house.admin.get("/v1/datasets/test/refs").json()["results"]
    assert [(ref["name"], ref["snapshot"]) for ref in listed] == [("a", two[1]), ("b", two[1])]
    assert house.admin.get("/v1/datasets/test/refs/b").json()["seq"] == 2
    assert house.admin.delete("/v1/datasets/test/refs/b").status_code == 204
    for gone in (house.admin.get("/v1/datasets/test/refs/b"), house.admin.delete("/v1/datasets/test/refs/b")):
        assert gone.json()["type"] == "/problems/ref-not-found"


def test_ref_is_mirrored_in_the_layout_and_leaves_it(house: InProcessApi, dataset: Dataset, two: list[str]):
    path = dataset.layout.ref(RefName("keep"))
    house.admin.put("/v1/datasets/test/refs/keep", {"snapshot": "1"})

    assert orjson.loads(house.services.store.get(path))["snapshot"] == two[0]
    house.admin.delete("/v1/datasets/test/refs/keep")
    assert house.services.store.head(path) is None


@pytest.mark.parametrize(
    ("name", "snapshot", "slug"),
    [
        ("latest", "1", "schema-violation"),
        ("2024-01-01", "1", "schema-violation"),
        ("12", "1", "schema-violation"),
        ("a" * 129, "1", "schema-violation"),
        ("ab01e763-4d43-7088-96b5-c0e1476b5a52", "1", "schema-violation"),
        ("good", "7", "snapshot-not-found"),
        ("good", "other", "ref-not-found"),
    ],
)
def test_bad_ref_is_refused_and_sets_nothing(
    house: InProcessApi, dataset: Dataset, two: list[str], name, snapshot, slug
):
    answer = house.admin.put(f"/v1/datasets/test/refs/{name}", {"snapshot": snapshot})

    assert answer.json()["type"] == f"/problems/{slug}"
    assert house.admin.get("/v1/datasets/test/refs").json()["results"] == []
