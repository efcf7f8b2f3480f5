"""Tags over HTTP: a namespace for each tenant, and the lake's own, which all may read."""

from datetime import UTC, datetime

import orjson
import pytest
from tarn.coordination import tags
from tarn.datasets.registry import Dataset
from tarn.model.datasets.tag import LARGEST_VALUE
from tarn.model.names import TagKey

from tests.in_process_api import ONE_DATABASE, InProcessApi

BASE = "/v1/datasets/test"


@pytest.fixture
def put(api: InProcessApi, dataset: Dataset):
    def put(key: str, **body):
        response = api.admin.put(f"{BASE}/tag?key={key}", body or None)
        assert response.status_code == 200, response.text
        return response.json()

    return put


def listed(caller, query: str = "") -> list[str]:
    return [tag["key"] for tag in caller.get(f"{BASE}/tags{query}").json()["results"]]


def test_tag_without_a_body_is_the_current_time_and_increases(api: InProcessApi, dataset: Dataset, put, monkeypatch):
    first = put("crawl/last_run")
    monkeypatch.setattr(tags, "now", lambda: datetime(2001, 1, 1, tzinfo=UTC))
    second = put("crawl/last_run")

    assert first["value"] is None
    assert second["at"] > first["at"]
    assert api.admin.get(f"{BASE}/tag?key=crawl/last_run").json() == second


def test_tag_has_the_given_timestamp_and_value(api: InProcessApi, dataset: Dataset, put):
    tag = put("state", at="2030-01-01T12:00:00+02:00", value={"page": 7})

    assert tag == {"key": "state", "at": "2030-01-01T10:00:00Z", "value": {"page": 7}}
    assert put("state", value=[1])["value"] == [1]
    assert put("state", at="2030-01-01T00:00:00Z")["value"] is None


@ONE_DATABASE
def test_tag_is_mirrored_in_the_lake_and_removed_from_it(api: InProcessApi, dataset: Dataset, put):
    path = dataset.layout.tag("admin", TagKey("a/b"))
    store = api.services.store

    at = put("a/b")["at"]
    assert datetime.fromisoformat(orjson.loads(store.get(path))) == datetime.fromisoformat(at)
    put("a/b", value="x")
    assert orjson.loads(store.get(path)) == "x"
    assert api.admin.delete(f"{BASE}/tag?key=a/b").status_code == 204
    assert store.head(path) is None
    assert api.admin.delete(f"{BASE}/tag?key=a/b").json()["type"] == "/problems/tag-not-found"


def test_tags_are_listed_by_prefix_and_page(api: InProcessApi, dataset: Dataset, put):
    for key in ("b/2", "a_x", "aXx", "b/1", "b/3"):
        put(key)

    assert sorted(listed(api.admin)) == ["aXx", "a_x", "b/1", "b/2", "b/3"]
    assert listed(api.admin, "?prefix=a_") == ["a_x"]
    page = api.admin.get(f"{BASE}/tags?prefix=b/&limit=2").json()
    rest = api.admin.get(f"{BASE}/tags?prefix=b/&limit=2&cursor={page['next']}").json()
    assert [tag["key"] for tag in page["results"] + rest["results"]] == ["b/1", "b/2", "b/3"]
    assert rest["next"] is None


def test_tags_of_the_lake_are_readable_by_all_and_read_only(api: InProcessApi, dataset: Dataset):
    reader = api.tenant("reader", test="read")
    api.admin.post(f"{BASE}/entities", {"id": "jane", "schema": "Person"})
    key = "lakehouse/journal/last_updated"

    assert reader.get(f"{BASE}/tag?key={key}").json()["key"] == key
    assert listed(reader, "?prefix=lakehouse/") == [key]
    assert listed(reader) == []
    for caller in (api.admin, reader):
        for response in (
            caller.put(f"{BASE}/tag?key={key}"),
            caller.put(f"{BASE}/tag?key=lakehouse"),
            caller.delete(f"{BASE}/tag?key={key}"),
        ):
            assert (response.status_code, response.json()["type"]) == (403, "/problems/forbidden")
    denied = api.admin.get("/v1/admin/audit?tenant=reader").json()["results"]
    assert {(entry["action"], entry["outcome"]) for entry in denied} == {
        ("set_tag", "denied"),
        ("delete_tag", "denied"),
    }


@ONE_DATABASE
def test_tags_of_another_tenant_are_not_found(api: InProcessApi, dataset: Dataset, put):
    other, unrelated = api.tenant("other", test="admin"), api.tenant("unrelated")
    put("mine")

    assert listed(other) == []
    assert other.get(f"{BASE}/tag?key=mine").status_code == 404
    assert other.delete(f"{BASE}/tag?key=mine").status_code == 404
    assert other.put(f"{BASE}/tag?key=mine", {"value": 1}).json()["value"] == 1
    assert api.admin.get(f"{BASE}/tag?key=mine").json()["value"] is None
    assert unrelated.put(f"{BASE}/tag?key=mine").json()["type"] == "/problems/dataset-not-found"


def test_tag_is_latest_only_if_it_is_newer_than_every_existing_dependency(api: InProcessApi, dataset: Dataset, put):
    put("old", at="2020-01-01T00:00:00Z")
    put("same", at="2020-01-02T00:00:00Z")
    put("new", at="2020-01-02T00:00:00Z")

    def latest(key: str, *deps: str):
        query = "".join(f"&dep={dep}" for dep in deps)
        response = api.admin.get(f"{BASE}/tag/is_latest?key={key}{query}").json()
        return response["latest"], response["newer"]

    assert latest("new", "old", "missing") == (True, [])
    assert latest("new", "old", "same") == (False, ["same"])
    assert latest("missing", "old") == (False, ["old"])
    assert latest("missing", "gone") == (False, [])
    api.admin.post(f"{BASE}/entities", {"id": "jane", "schema": "Person"})
    assert latest("new", "lakehouse/journal/last_updated") == (False, ["lakehouse/journal/last_updated"])


@ONE_DATABASE
@pytest.mark.parametrize(
    "key", ["", "a//b", "/a", "a/", "../a", "a/..", ".a", "a/.b", "a b", "a\\b", "a%00b", "ä", "a" * 256, "a%0Ab"]
)
def test_key_that_is_not_a_path_is_refused(api: InProcessApi, dataset: Dataset, key: str):
    response = api.admin.put(f"{BASE}/tag?key={key}")

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "query.key")
    assert listed(api.admin) == []


@ONE_DATABASE
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"value": "x" * LARGEST_VALUE}, "value"),
        ({"at": "2030-01-01T00:00:00"}, "at"),
        ({"at": "0001-01-01T00:00:00Z"}, "at"),
        ({"when": 1}, "when"),
        ({"value": 2**70}, "value"),
    ],
)
def test_invalid_tag_is_refused_with_its_field(api: InProcessApi, dataset: Dataset, body, field: str):
    response = api.admin.put(f"{BASE}/tag?key=a", body)

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)


@ONE_DATABASE
def test_key_cannot_be_both_a_tag_and_a_prefix_of_tags(api: InProcessApi, dataset: Dataset, put):
    put("a/b")

    assert api.admin.put(f"{BASE}/tag?key=a").json()["type"] == "/problems/already-exists"
    assert api.admin.put(f"{BASE}/tag?key=a/b/c").json()["type"] == "/problems/already-exists"
    put("a/bc")


@ONE_DATABASE
def test_longest_key_is_mirrored_too(api: InProcessApi, dataset: Dataset, put):
    key = "k" * TagKey.longest_segment

    put(key)

    assert api.services.store.head(dataset.layout.tag("admin", TagKey(key))) is not None


@ONE_DATABASE
def test_writes_of_tags_are_audited(api: InProcessApi, dataset: Dataset, put):
    put("a")
    api.admin.delete(f"{BASE}/tag?key=a")

    entries = api.admin.get("/v1/admin/audit?limit=2").json()["results"]
    assert [(entry["action"], entry["detail"]) for entry in entries] == [
        ("delete_tag", {"key": "a"}),
        ("set_tag", {"key": "a"}),
    ]
