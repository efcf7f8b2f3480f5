"""Refs: names for snapshots."""

import orjson
import pytest
from tarn.datasets.registry import Dataset
from tarn.model.names import RefName

from tests.in_process_api import InProcessApi


@pytest.fixture
def two_snapshots(api: InProcessApi, dataset: Dataset, flush) -> list[str]:
    """Publish two snapshots and return their ids."""
    ids = []
    for name in ("Jane", "John"):
        api.admin.post("/v1/datasets/test/entities", {"id": name, "schema": "Person"})
        ids.append(flush()[0].id)
    return ids


def test_ref_is_accepted_wherever_a_snapshot_is_named(api: InProcessApi, dataset: Dataset, two_snapshots: list[str]):
    created = api.admin.put("/v1/datasets/test/refs/release-1", {"snapshot": "1"})

    assert created.status_code == 200
    assert (created.json()["seq"], created.json()["snapshot"], created.json()["tenant"]) == (
        1,
        two_snapshots[0],
        "admin",
    )
    read = api.admin.get("/v1/datasets/test/entities?at=release-1")
    assert [entity["id"] for entity in read.json()["results"]] == ["Jane"]
    assert read.headers["Tarn-Snapshot"] == two_snapshots[0]


def test_ref_is_moved_listed_shown_and_deleted(api: InProcessApi, dataset: Dataset, two_snapshots: list[str]):
    for name, snapshot in (("b", two_snapshots[0]), ("a", "latest"), ("b", "2")):
        assert api.admin.put(f"/v1/datasets/test/refs/{name}", {"snapshot": snapshot}).status_code == 200

    listed = api.admin.get("/v1/datasets/test/refs").json()["results"]
    assert [(ref["name"], ref["snapshot"]) for ref in listed] == [("a", two_snapshots[1]), ("b", two_snapshots[1])]
    assert api.admin.get("/v1/datasets/test/refs/b").json()["seq"] == 2
    assert api.admin.delete("/v1/datasets/test/refs/b").status_code == 204
    for gone in (api.admin.get("/v1/datasets/test/refs/b"), api.admin.delete("/v1/datasets/test/refs/b")):
        assert gone.json()["type"] == "/problems/ref-not-found"


def test_ref_is_mirrored_in_the_lake_and_removed_from_it(api: InProcessApi, dataset: Dataset, two_snapshots: list[str]):
    path = dataset.layout.ref(RefName("keep"))
    api.admin.put("/v1/datasets/test/refs/keep", {"snapshot": "1"})

    assert orjson.loads(api.services.store.get(path))["snapshot"] == two_snapshots[0]
    api.admin.delete("/v1/datasets/test/refs/keep")
    assert api.services.store.head(path) is None


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
    api: InProcessApi, dataset: Dataset, two_snapshots: list[str], name, snapshot, slug
):
    response = api.admin.put(f"/v1/datasets/test/refs/{name}", {"snapshot": snapshot})

    assert response.json()["type"] == f"/problems/{slug}"
    assert api.admin.get("/v1/datasets/test/refs").json()["results"] == []
