"""Exports over HTTP: what there is, the files and parts of them, and what is fresh."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tarn.datasets.registry import Dataset
from tarn.model.export import Kind
from tarn.model.job import ExportOptions, MakeOptions

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of, person, write
from tests.pipeline.test_rewrite import ignore

PATH = "/v1/datasets/test"
FILE = f"{PATH}/exports/entities.ftm.json"


@pytest.fixture
def content(house: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> bytes:
    write(house, person("ann"), person("bob"))
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    return house.services.store.get("test/entities.ftm.json")


def test_export_is_sent_whole_with_what_tells_it_apart(house: InProcessApi, content: bytes):
    answer = house.admin.get(FILE)
    head = house.admin.head(FILE)

    assert (answer.status_code, answer.content) == (200, content)
    assert answer.headers["Content-Type"] == "application/json+ftm"
    assert answer.headers["Content-Length"] == str(len(content))
    assert (head.status_code, head.content) == (200, b"")
    for name in ("ETag", "Last-Modified", "Content-Length", "Accept-Ranges"):
        assert head.headers[name] == answer.headers[name]


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-9", lambda content: content[:10]),
        ("bytes=5-", lambda content: content[5:]),
        ("bytes=-7", lambda content: content[-7:]),
        ("bytes=3-99999999", lambda content: content[3:]),
        ("bytes=-99999999", lambda content: content),
    ],
)
def test_range_gets_that_part(house: InProcessApi, content: bytes, asked: str, part: Callable[[bytes], bytes]):
    answer = house.admin.get(FILE, headers={"Range": asked})

    wanted = part(content)
    start = content.rindex(wanted)
    assert (answer.status_code, answer.content) == (206, wanted)
    assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(wanted) - 1}/{len(content)}"
    assert answer.headers["Content-Length"] == str(len(wanted))


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,4-5", "lines=1-2", "bytes=9-3", "bytes=-", "bytes=a-b", f"bytes={'9' * 5000}-"]
)
def test_range_that_is_not_understood_gets_everything(house: InProcessApi, content: bytes, asked: str):
    answer = house.admin.get(FILE, headers={"Range": asked})

    assert (answer.status_code, answer.content) == (200, content)


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_range_beyond_the_end_is_refused_with_the_size(house: InProcessApi, content: bytes, asked: str):
    answer = house.admin.get(FILE, headers={"Range": asked})

    assert (answer.status_code, answer.json()["size"]) == (416, len(content))


def test_who_has_it_already_is_told_so(house: InProcessApi, content: bytes):
    first = house.admin.get(FILE)
    tag, moment = first.headers["ETag"], first.headers["Last-Modified"]

    assert house.admin.get(FILE, headers={"If-None-Match": f'"other", {tag}'}).status_code == 304
    assert house.admin.get(FILE, headers={"If-None-Match": '"other"'}).status_code == 200
    assert house.admin.get(FILE, headers={"If-Modified-Since": moment}).status_code == 304
    assert house.admin.get(FILE, headers={"If-Modified-Since": "yesterday"}).status_code == 200
    assert house.admin.get(FILE, headers={"Range": "bytes=0-3", "If-Range": tag}).status_code == 206
    assert house.admin.get(FILE, headers={"Range": "bytes=0-3", "If-Range": '"other"'}).content == content


def test_export_that_was_never_made_is_missing_and_those_that_were_are_named(house: InProcessApi, dataset: Dataset):
    for name in ("entities.ftm.json", "delta.json", "statements.csv.gz", "anything"):
        answer = house.admin.get(f"{PATH}/exports/{name}")
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (404, "export-missing"), name
    assert house.admin.get(f"{PATH}/exports/delta/20250101000000-abc.json").status_code == 404
    assert house.admin.get(f"{PATH}/exports").json() == {"results": []}


@pytest.mark.parametrize("kinds", [["nonsense"], [], "entities", [1]])
def test_unknown_kind_is_refused_and_the_kinds_are_named(house: InProcessApi, dataset: Dataset, kinds: object):
    answer = house.admin.post(f"{PATH}/operations/export", {"kinds": kinds})

    assert answer.status_code == 422
    assert kinds != ["nonsense"] or "'statements', 'entities'" in answer.text
    assert house.admin.get("/v1/jobs").json()["results"] == []


def test_list_and_freshness_tell_of_what_each_was_made(house: InProcessApi, dataset: Dataset, content: bytes):
    listed = house.admin.get(f"{PATH}/exports").json()["results"]
    report = house.admin.get(f"{PATH}/freshness").json()
    head = house.admin.get(f"{PATH}/snapshots/latest").json()

    assert [one["kind"] for one in listed] == [one["kind"] for one in report["exports"]] == list(Kind)
    assert {(one["snapshot"], one["seq"], one["fresh"]) for one in listed} == {(head["id"], head["seq"], True)}
    assert {one["name"]: one["size"] for one in listed}["entities.ftm.json"] == len(content)
    assert {one["at"] for one in report["exports"]} <= set(report["tags"].values())
    assert report["tags"].keys() >= {"journal/last_updated", "journal/last_flushed", "statements/last_updated"}
    assert report["tags"].keys() >= {kind.form.tag for kind in Kind}
    mirrored = house.services.store.get("test/tags/lakehouse/exports/entities_json").decode()
    assert mirrored.startswith(report["tags"]["exports/entities_json"].removesuffix("Z")[:19])


def test_former_export_is_a_version_that_can_be_fetched_and_one_that_never_was_is_not_found(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, content: bytes
):
    write(house, person("cem"))
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    kept = [one for one in house.admin.get(f"{PATH}/versions").json()["results"] if one["name"] == "entities.ftm.json"]

    (former,) = (house.admin.get(f"{PATH}/versions/{one['timestamp']}/{one['name']}") for one in kept)
    never = house.admin.get(f"{PATH}/versions/20200101T000000.000000Z/entities.ftm.json")

    assert (former.status_code, former.content) == (200, content)
    assert (never.status_code, never.json()["type"].rsplit("/", 1)[-1]) == (404, "version-not-found")


def catalog_entry(house: InProcessApi, path: str = "/v1/catalog") -> dict[str, Any]:
    (entry,) = house.admin.get(path).json()["datasets"]
    return dict(entry)


def test_catalog_names_what_a_loader_needs_with_absolute_addresses(house: InProcessApi, content: bytes):
    entry = catalog_entry(house)

    base = f"http://testserver{PATH}/exports"
    assert (entry["resource_name"], entry["delta_url"]) == (
        "entities.ftm.json",
        f"{base}/delta.json?until={entry['version']}",
    )
    assert {one["name"]: one["url"] for one in entry["resources"]}["entities.ftm.json"] == f"{base}/entities.ftm.json"
    assert house.admin.get(entry["delta_url"]).json()["versions"] == {
        entry["version"]: f"{base}/delta/{entry['version']}.json"
    }
    assert "load" not in entry
    assert catalog_entry(house, "/v1/catalog.json") == entry


@pytest.mark.parametrize("url", ["https://lake.example.org/tarn", "https://lake.example.org/tarn/"])
def test_addresses_are_below_the_public_url_wherever_they_stand(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, url: str
):
    settings = house.services.settings.model_copy(update={"public_url": url})
    public = InProcessApi(type(house.services)(**vars(house.services) | {"settings": settings}), str(house.admin.key))
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


def test_documents_in_the_lake_have_no_address_where_none_is_set(house: InProcessApi, content: bytes):
    index = json.loads(house.services.store.get("test/index.json"))
    deltas = json.loads(house.services.store.get("test/exports/delta.json"))

    assert "delta_url" not in index
    assert "resource_name" not in index
    assert [one for one in index["resources"] if "url" in one] == []
    assert deltas["versions"] == {index["version"]: f"delta/{index['version']}.json"}


def test_dataset_that_no_loader_can_read_names_no_resource(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    never = catalog_entry(house)
    write(house, person("ann"))
    assert house.admin.patch(PATH, {"compression": "gzip"}).status_code == 200
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    compressed = catalog_entry(house)

    assert (never["resources"], "resource_name" in never, "delta_url" in never) == ([], False, False)
    assert {one["name"] for one in compressed["resources"]} > {"entities.ftm.json.gz"}
    assert ("resource_name" in compressed, "delta_url" in compressed) == (False, False)


def test_dataset_with_children_and_entities_of_its_own_is_to_be_loaded(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    assert house.admin.patch(PATH, {"children": ["other"]}).status_code == 200
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    empty = catalog_entry(house)
    write(house, person("ann"))
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)

    assert "load" not in empty
    assert catalog_entry(house)["load"] is True


def test_index_of_deltas_is_known_by_its_tag_and_has_a_head(house: InProcessApi, content: bytes):
    path = f"{PATH}/exports/delta.json"
    whole = house.admin.get(path)
    head = house.admin.head(path)

    assert house.admin.get(path, headers={"If-None-Match": whole.headers["ETag"]}).status_code == 304
    assert (head.status_code, head.content) == (200, b"")
    assert (head.headers["ETag"], head.headers["Content-Length"]) == (whole.headers["ETag"], str(len(whole.content)))
    for until in ("", "today", "20250101000000", f"20250101000000-{'a' * 50}", "2025010100000\u0660-abc"):
        assert house.admin.get(path, params={"until": until}).status_code == 422, until
    assert house.admin.get(path, params={"until": "20000101000000-abc"}).json()["versions"] == {}


def test_whatever_is_exported_when_a_loader_that_follows_versions_has_what_was_exported(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    """Runs of entities alone, of deltas alone and of both, between adds, changes and deletes; loaders that look at each
    step, and at every second and third one, as yente does it."""
    exporting = exports_of(house, kernels)
    loaders = [(every, Loader(house)) for every in (1, 2, 3)]
    runs: list[list[Kind]] = [
        [Kind.ENTITIES, Kind.DELTA],
        [Kind.ENTITIES],
        [Kind.ENTITIES, Kind.DELTA],
        [Kind.DELTA],
        [Kind.DELTA],
        [Kind.ENTITIES],
        [Kind.ENTITIES, Kind.DELTA],
        [Kind.STATISTICS],
        [Kind.ENTITIES],
        [Kind.ENTITIES],
        [Kind.DELTA],
        *[[Kind.ENTITIES, Kind.DELTA]] * 6,
    ]
    for number, kinds in enumerate(runs):
        write(house, person(f"p{number}"), person("always", country=["de", "fr", "it", "es"][: number % 4]))
        if number:
            assert house.admin.delete(f"{PATH}/entities/p{number - 1}").status_code == 200
        exporting.export(dataset, ExportOptions(kinds=kinds), ignore)
        for every, loader in loaders:
            if number % every == 0:
                loader.look()
                exported = {one["id"]: one for one in map(json.loads, house.admin.get(FILE).content.splitlines())}
                assert loader.entities == exported, (number, every)

    assert [loader.deltas > 0 for _, loader in loaders] == [True] * len(loaders)


class Loader:
    """What yente does with a catalog: `DatasetUpdater` of its version 5.5, on a dictionary instead of an index."""

    def __init__(self, house: InProcessApi) -> None:
        self._house = house
        self._version: str | None = None
        self.entities: dict[str, Any] = {}
        self.deltas = 0

    def look(self) -> None:
        entry = catalog_entry(self._house)
        if self._version is not None and entry["version"] <= self._version:
            return
        versions: dict[str, str] = {}
        if "delta_url" in entry and self._version is not None:
            versions = self._house.admin.get(entry["delta_url"]).json()["versions"]
        if self._version is None or not versions or self._version < min(versions):
            lines = self._house.admin.get(FILE).content.splitlines()
            self.entities = {one["id"]: one for one in map(json.loads, lines)}
            self._version = entry["version"]
            return
        for version in sorted(versions):
            if self._version < version <= entry["version"]:
                self._apply(self._house.admin.get(versions[version]).content)
        self._version = max(versions)

    def _apply(self, delta: bytes) -> None:
        self.deltas += 1
        for line in map(json.loads, delta.splitlines()):
            self.entities.pop(line["entity"]["id"], None)
            if line["op"] != "DEL":
                self.entities[line["entity"]["id"]] = line["entity"]
