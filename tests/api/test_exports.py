"""Exports over HTTP: what there is, the files and parts of them, and what is fresh."""

from collections.abc import Callable

import pytest

from app.lake.datasets import Dataset
from app.model.export import Kind
from app.model.job import MakeOptions
from tests.house import House
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_export import exports_of, person, write
from tests.pipeline.test_rewrite import ignore

PATH = "/v1/datasets/test"
FILE = f"{PATH}/exports/entities.ftm.json"


@pytest.fixture
def content(house: House, dataset: Dataset, kernels: DirectKernels) -> bytes:
    write(house, person("ann"), person("bob"))
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    return house.services.store.get("test/entities.ftm.json")


def test_export_is_sent_whole_with_what_tells_it_apart(house: House, content: bytes):
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
def test_range_gets_that_part(house: House, content: bytes, asked: str, part: Callable[[bytes], bytes]):
    answer = house.admin.get(FILE, headers={"Range": asked})

    wanted = part(content)
    start = content.rindex(wanted)
    assert (answer.status_code, answer.content) == (206, wanted)
    assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(wanted) - 1}/{len(content)}"
    assert answer.headers["Content-Length"] == str(len(wanted))


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,4-5", "lines=1-2", "bytes=9-3", "bytes=-", "bytes=a-b", f"bytes={'9' * 5000}-"]
)
def test_range_that_is_not_understood_gets_everything(house: House, content: bytes, asked: str):
    answer = house.admin.get(FILE, headers={"Range": asked})

    assert (answer.status_code, answer.content) == (200, content)


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_range_beyond_the_end_is_refused_with_the_size(house: House, content: bytes, asked: str):
    answer = house.admin.get(FILE, headers={"Range": asked})

    assert (answer.status_code, answer.json()["size"]) == (416, len(content))


def test_who_has_it_already_is_told_so(house: House, content: bytes):
    first = house.admin.get(FILE)
    tag, moment = first.headers["ETag"], first.headers["Last-Modified"]

    assert house.admin.get(FILE, headers={"If-None-Match": f'"other", {tag}'}).status_code == 304
    assert house.admin.get(FILE, headers={"If-None-Match": '"other"'}).status_code == 200
    assert house.admin.get(FILE, headers={"If-Modified-Since": moment}).status_code == 304
    assert house.admin.get(FILE, headers={"If-Modified-Since": "yesterday"}).status_code == 200
    assert house.admin.get(FILE, headers={"Range": "bytes=0-3", "If-Range": tag}).status_code == 206
    assert house.admin.get(FILE, headers={"Range": "bytes=0-3", "If-Range": '"other"'}).content == content


def test_export_that_was_never_made_is_missing_and_those_that_were_are_named(house: House, dataset: Dataset):
    for name in ("entities.ftm.json", "delta.json", "statements.csv.gz", "anything"):
        answer = house.admin.get(f"{PATH}/exports/{name}")
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (404, "export-missing"), name
    assert house.admin.get(f"{PATH}/exports/delta/20250101000000-abc.json").status_code == 404
    assert house.admin.get(f"{PATH}/exports").json() == {"results": []}


@pytest.mark.parametrize("kinds", [["nonsense"], [], "entities", [1]])
def test_unknown_kind_is_refused_and_the_kinds_are_named(house: House, dataset: Dataset, kinds: object):
    answer = house.admin.post(f"{PATH}/operations/export", {"kinds": kinds})

    assert answer.status_code == 422
    assert kinds != ["nonsense"] or "'statements', 'entities'" in answer.text
    assert house.admin.get("/v1/jobs").json()["results"] == []


def test_list_and_freshness_tell_of_what_each_was_made(house: House, dataset: Dataset, content: bytes):
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
    house: House, dataset: Dataset, kernels: DirectKernels, content: bytes
):
    write(house, person("cem"))
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    kept = [one for one in house.admin.get(f"{PATH}/versions").json()["results"] if one["name"] == "entities.ftm.json"]

    (former,) = (house.admin.get(f"{PATH}/versions/{one['timestamp']}/{one['name']}") for one in kept)
    never = house.admin.get(f"{PATH}/versions/20200101T000000.000000Z/entities.ftm.json")

    assert (former.status_code, former.content) == (200, content)
    assert (never.status_code, never.json()["type"].rsplit("/", 1)[-1]) == (404, "version-not-found")
