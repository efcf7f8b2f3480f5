"""Exports over HTTP: lists, downloads, ranges, versions and freshness."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tarn.datasets.registry import Dataset
from tarn.model.datasets.export import ExportKind
from tarn.model.work.job import ExportOptions, MakeOptions

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of, person, write
from tests.pipeline.test_rewrite import ignore

PATH = "/v1/datasets/test"
FILE = f"{PATH}/exports/entities.ftm.json"


@pytest.fixture
def content(api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> bytes:
    write(api, person("ann"), person("bob"))
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)
    return api.services.store.get("test/entities.ftm.json")


def test_export_is_sent_in_full_with_its_identifying_headers(api: InProcessApi, content: bytes):
    response = api.admin.get(FILE)
    head = api.admin.head(FILE)

    assert (response.status_code, response.content) == (200, content)
    assert response.headers["Content-Type"] == "application/json+ftm"
    assert response.headers["Content-Length"] == str(len(content))
    assert (head.status_code, head.content) == (200, b"")
    for name in ("ETag", "Last-Modified", "Content-Length", "Accept-Ranges"):
        assert head.headers[name] == response.headers[name]


@pytest.mark.parametrize(
    ("range_header", "part"),
    [
        ("bytes=0-9", lambda content: content[:10]),
        ("bytes=5-", lambda content: content[5:]),
        ("bytes=-7", lambda content: content[-7:]),
        ("bytes=3-99999999", lambda content: content[3:]),
        ("bytes=-99999999", lambda content: content),
    ],
)
def test_range_request_gets_that_part(
    api: InProcessApi, content: bytes, range_header: str, part: Callable[[bytes], bytes]
):
    response = api.admin.get(FILE, headers={"Range": range_header})

    expected = part(content)
    start = content.rindex(expected)
    assert (response.status_code, response.content) == (206, expected)
    assert response.headers["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/{len(content)}"
    assert response.headers["Content-Length"] == str(len(expected))


@pytest.mark.parametrize(
    "range_header", ["bytes=0-1,4-5", "lines=1-2", "bytes=9-3", "bytes=-", "bytes=a-b", f"bytes={'9' * 5000}-"]
)
def test_unparsable_range_gets_the_full_export(api: InProcessApi, content: bytes, range_header: str):
    response = api.admin.get(FILE, headers={"Range": range_header})

    assert (response.status_code, response.content) == (200, content)


@pytest.mark.parametrize("range_header", ["bytes=99999999-", "bytes=-0"])
def test_range_beyond_the_end_is_refused_with_the_size(api: InProcessApi, content: bytes, range_header: str):
    response = api.admin.get(FILE, headers={"Range": range_header})

    assert (response.status_code, response.json()["size"]) == (416, len(content))


def test_conditional_request_for_an_unchanged_export_is_304(api: InProcessApi, content: bytes):
    first = api.admin.get(FILE)
    tag, moment = first.headers["ETag"], first.headers["Last-Modified"]

    assert api.admin.get(FILE, headers={"If-None-Match": f'"other", {tag}'}).status_code == 304
    assert api.admin.get(FILE, headers={"If-None-Match": '"other"'}).status_code == 200
    assert api.admin.get(FILE, headers={"If-Modified-Since": moment}).status_code == 304
    assert api.admin.get(FILE, headers={"If-Modified-Since": "yesterday"}).status_code == 200
    assert api.admin.get(FILE, headers={"Range": "bytes=0-3", "If-Range": tag}).status_code == 206
    assert api.admin.get(FILE, headers={"Range": "bytes=0-3", "If-Range": '"other"'}).content == content


def test_missing_export_is_not_found_and_existing_ones_are_named(api: InProcessApi, dataset: Dataset):
    for name in ("entities.ftm.json", "delta.json", "statements.csv.gz", "anything"):
        response = api.admin.get(f"{PATH}/exports/{name}")
        assert (response.status_code, response.json()["type"].rsplit("/", 1)[-1]) == (404, "export-missing"), name
    assert api.admin.get(f"{PATH}/exports/delta/20250101000000-abc.json").status_code == 404
    assert api.admin.get(f"{PATH}/exports").json() == {"results": []}


@pytest.mark.parametrize("kinds", [["nonsense"], [], "entities", [1]])
def test_unknown_kind_is_refused_and_the_kinds_are_named(api: InProcessApi, dataset: Dataset, kinds: object):
    response = api.admin.post(f"{PATH}/operations/export", {"kinds": kinds})

    assert response.status_code == 422
    assert kinds != ["nonsense"] or "'statements', 'entities'" in response.text
    assert api.admin.get("/v1/jobs").json()["results"] == []


def test_list_and_freshness_name_the_snapshot_of_each_export(api: InProcessApi, dataset: Dataset, content: bytes):
    listed = api.admin.get(f"{PATH}/exports").json()["results"]
    report = api.admin.get(f"{PATH}/freshness").json()
    head = api.admin.get(f"{PATH}/snapshots/latest").json()

    assert [one["kind"] for one in listed] == [one["kind"] for one in report["exports"]] == list(ExportKind)
    assert {(one["snapshot"], one["seq"], one["fresh"]) for one in listed} == {(head["id"], head["seq"], True)}
    assert {one["name"]: one["size"] for one in listed}["entities.ftm.json"] == len(content)
    assert {one["at"] for one in report["exports"]} <= set(report["tags"].values())
    assert report["tags"].keys() >= {"journal/last_updated", "journal/last_flushed", "statements/last_updated"}
    assert report["tags"].keys() >= {kind.form.tag for kind in ExportKind}
    mirrored = api.services.store.get("test/tags/lakehouse/exports/entities_json").decode()
    assert mirrored.startswith(report["tags"]["exports/entities_json"].removesuffix("Z")[:19])


def test_former_version_can_be_downloaded_and_an_unknown_one_is_not_found(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, content: bytes
):
    write(api, person("cem"))
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)
    versions = [
        one for one in api.admin.get(f"{PATH}/versions").json()["results"] if one["name"] == "entities.ftm.json"
    ]

    (former,) = (api.admin.get(f"{PATH}/versions/{one['timestamp']}/{one['name']}") for one in versions)
    never = api.admin.get(f"{PATH}/versions/20200101T000000.000000Z/entities.ftm.json")

    assert (former.status_code, former.content) == (200, content)
    assert (never.status_code, never.json()["type"].rsplit("/", 1)[-1]) == (404, "version-not-found")


def catalog_entry(api: InProcessApi, path: str = "/v1/catalog") -> dict[str, Any]:
    (entry,) = api.admin.get(path).json()["datasets"]
    return dict(entry)


def test_catalog_lists_the_resources_of_a_loader_with_absolute_urls(api: InProcessApi, content: bytes):
    entry = catalog_entry(api)

    base = f"http://testserver{PATH}/exports"
    assert (entry["resource_name"], entry["delta_url"]) == (
        "entities.ftm.json",
        f"{base}/delta.json?until={entry['version']}",
    )
    assert {one["name"]: one["url"] for one in entry["resources"]}["entities.ftm.json"] == f"{base}/entities.ftm.json"
    assert api.admin.get(entry["delta_url"]).json()["versions"] == {
        entry["version"]: f"{base}/delta/{entry['version']}.json"
    }
    assert "load" not in entry
    assert catalog_entry(api, "/v1/catalog.json") == entry


@pytest.mark.parametrize("url", ["https://lake.example.org/tarn", "https://lake.example.org/tarn/"])
def test_urls_are_below_the_public_url_in_every_document(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, url: str
):
    settings = api.services.settings.model_copy(update={"public_url": url})
    public = InProcessApi(type(api.services)(**vars(api.services) | {"settings": settings}), str(api.admin.key))
    write(public, person("ann"))
    exports_of(public, kernels).make(dataset, MakeOptions(), ignore)

    entry = catalog_entry(public)
    deltas = public.admin.get(f"{PATH}/exports/delta.json").json()["versions"]
    stored = {
        name: json.loads(public.services.store.get(f"test/{name}")) for name in ("index.json", "exports/delta.json")
    }
    listed = json.loads(public.services.store.get("index.json"))["datasets"]

    base = f"https://lake.example.org/tarn{PATH}/exports"
    assert {one["url"] for one in entry["resources"]} == {f"{base}/{one['name']}" for one in entry["resources"]}
    assert entry["delta_url"] == stored["index.json"]["delta_url"] == f"{base}/delta.json?until={entry['version']}"
    assert stored["index.json"]["resource_name"] == "entities.ftm.json"
    assert (
        stored["exports/delta.json"]["versions"]
        == deltas
        == {entry["version"]: f"{base}/delta/{entry['version']}.json"}
    )
    assert [one["delta_url"] for one in listed] == [entry["delta_url"]]


def test_documents_in_the_lake_have_no_urls_without_a_public_url(api: InProcessApi, content: bytes):
    index = json.loads(api.services.store.get("test/index.json"))
    deltas = json.loads(api.services.store.get("test/exports/delta.json"))

    assert "delta_url" not in index
    assert "resource_name" not in index
    assert [one for one in index["resources"] if "url" in one] == []
    assert deltas["versions"] == {index["version"]: f"delta/{index['version']}.json"}


def test_dataset_that_no_loader_can_read_lists_no_resource(api: InProcessApi, dataset: Dataset, kernels: DirectKernels):
    never = catalog_entry(api)
    write(api, person("ann"))
    assert api.admin.patch(PATH, {"compression": "gzip"}).status_code == 200
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)
    compressed = catalog_entry(api)

    assert (never["resources"], "resource_name" in never, "delta_url" in never) == ([], False, False)
    assert {one["name"] for one in compressed["resources"]} > {"entities.ftm.json.gz"}
    assert ("resource_name" in compressed, "delta_url" in compressed) == (False, False)


def test_dataset_with_children_and_own_entities_is_marked_to_be_loaded(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    assert api.admin.patch(PATH, {"children": ["other"]}).status_code == 200
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)
    empty = catalog_entry(api)
    write(api, person("ann"))
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)

    assert "load" not in empty
    assert catalog_entry(api)["load"] is True


def test_delta_index_has_an_entity_tag_and_answers_head(api: InProcessApi, content: bytes):
    path = f"{PATH}/exports/delta.json"
    index = api.admin.get(path)
    head = api.admin.head(path)

    assert api.admin.get(path, headers={"If-None-Match": index.headers["ETag"]}).status_code == 304
    assert (head.status_code, head.content) == (200, b"")
    assert (head.headers["ETag"], head.headers["Content-Length"]) == (index.headers["ETag"], str(len(index.content)))
    for until in ("", "today", "20250101000000", f"20250101000000-{'a' * 50}", "2025010100000\u0660-abc"):
        assert api.admin.get(path, params={"until": until}).status_code == 422, until
    assert api.admin.get(path, params={"until": "20000101000000-abc"}).json()["versions"] == {}


def test_loader_that_follows_versions_has_the_exported_state_after_any_order_of_exports(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    """Run exports of entities alone, of deltas alone and of both between adds, changes and deletes, with loaders that
    poll at each, every second and every third step, as yente does.
    """
    exporting = exports_of(api, kernels)
    loaders = [(every, Loader(api)) for every in (1, 2, 3)]
    runs: list[list[ExportKind]] = [
        [ExportKind.ENTITIES, ExportKind.DELTA],
        [ExportKind.ENTITIES],
        [ExportKind.ENTITIES, ExportKind.DELTA],
        [ExportKind.DELTA],
        [ExportKind.DELTA],
        [ExportKind.ENTITIES],
        [ExportKind.ENTITIES, ExportKind.DELTA],
        [ExportKind.STATISTICS],
        [ExportKind.ENTITIES],
        [ExportKind.ENTITIES],
        [ExportKind.DELTA],
        *[[ExportKind.ENTITIES, ExportKind.DELTA]] * 6,
    ]
    for number, kinds in enumerate(runs):
        write(api, person(f"p{number}"), person("always", country=["de", "fr", "it", "es"][: number % 4]))
        if number:
            assert api.admin.delete(f"{PATH}/entities/p{number - 1}").status_code == 200
        exporting.export(dataset, ExportOptions(kinds=kinds), ignore)
        for every, loader in loaders:
            if number % every == 0:
                loader.poll()
                exported = {one["id"]: one for one in map(json.loads, api.admin.get(FILE).content.splitlines())}
                assert loader.entities == exported, (number, every)

    assert [loader.deltas > 0 for _, loader in loaders] == [True] * len(loaders)


class Loader:
    """A model of yente's catalog loader (`DatasetUpdater` of version 5.5), on a dictionary instead of an index."""

    def __init__(self, api: InProcessApi) -> None:
        self._api = api
        self._version: str | None = None
        self.entities: dict[str, Any] = {}
        self.deltas = 0

    def poll(self) -> None:
        entry = catalog_entry(self._api)
        if self._version is not None and entry["version"] <= self._version:
            return
        versions: dict[str, str] = {}
        if "delta_url" in entry and self._version is not None:
            versions = self._api.admin.get(entry["delta_url"]).json()["versions"]
        if self._version is None or not versions or self._version < min(versions):
            lines = self._api.admin.get(FILE).content.splitlines()
            self.entities = {one["id"]: one for one in map(json.loads, lines)}
            self._version = entry["version"]
            return
        for version in sorted(versions):
            if self._version < version <= entry["version"]:
                self._apply(self._api.admin.get(versions[version]).content)
        self._version = max(versions)

    def _apply(self, delta: bytes) -> None:
        self.deltas += 1
        for line in map(json.loads, delta.splitlines()):
            self.entities.pop(line["entity"]["id"], None)
            if line["op"] != "DEL":
                self.entities[line["entity"]["id"]] = line["entity"]
