"""Uploads in blocks over HTTP."""

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tarn.model.upload import Span, merge_spans, missing

from tests.in_process_api import ONE_DATABASE, InProcessApi

FILES, UPLOADS = "/v1/datasets/test/files", "/v1/datasets/test/uploads"
CONTENT = random.Random(2).randbytes(2_500_000)


@pytest.fixture
def files(house: InProcessApi) -> InProcessApi:
    house.dataset("test")
    return house


def slug(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]


def begin(house: InProcessApi, **said: Any) -> str:
    answer = house.admin.post(UPLOADS, {"length": len(CONTENT), "path": "a/b.bin", **said})
    assert answer.status_code == 201, answer.text
    return str(answer.headers["Location"])


def block(house: InProcessApi, place: str, start: int, end: int, **options: Any) -> Any:
    return house.admin.put(f"{place}?offset={start}", content=CONTENT[start:end], **options)


def uploading(house: InProcessApi) -> list[str]:
    return [entry.path for entry in house.services.store.list("test/uploads")]


def test_blocks_in_any_order_become_the_file(files: InProcessApi):
    place = begin(files, checksum=hashlib.sha256(CONTENT).hexdigest(), origin="crawl", meta={"a": 1})

    for start, end in ((2_000_000, 2_500_000), (0, 1_000_000), (1_000_000, 2_000_000)):
        assert block(files, place, start, end).status_code == 200
    answer = files.admin.post(f"{place}/commit?entity=true")

    file = answer.json()
    assert files.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()["caption"] == "b.bin"
    assert (answer.status_code, file["path"], file["origin"], file["meta"]) == (201, "a/b.bin", "crawl", {"a": 1})
    assert files.admin.get(f"{FILES}/{file['checksum']}/data").content == CONTENT
    assert files.admin.get(FILES).json()["results"] == [file]
    assert uploading(files) == []


@ONE_DATABASE
def test_upload_tells_what_arrived_and_what_is_missing(files: InProcessApi):
    place = begin(files)
    block(files, place, 0, 1000)
    block(files, place, 1000, 2000)

    shown = block(files, place, 5000, 6000).json()

    assert shown == files.admin.get(place).json() | {"expires": shown["expires"]}
    assert shown["committed"] == [{"start": 0, "end": 2000}, {"start": 5000, "end": 6000}]
    assert shown["missing"] == [{"start": 2000, "end": 5000}, {"start": 6000, "end": len(CONTENT)}]
    assert shown["file"] is None


@ONE_DATABASE
@pytest.mark.parametrize(("start", "end"), [(1000, 2000), (500, 1500), (1500, 2500), (0, 3000), (1999, 2000)])
def test_block_that_overlaps_is_refused_and_leaves_the_rest_as_it_is(files: InProcessApi, start: int, end: int):
    place = begin(files)
    before = block(files, place, 1000, 2000).json()

    assert slug(block(files, place, start, end)) == (409, "overlapping-blocks")

    assert files.admin.get(place).json()["committed"] == before["committed"]
    assert len(uploading(files)) == 1


@ONE_DATABASE
def test_upload_with_holes_cannot_be_committed(files: InProcessApi):
    place = begin(files)
    block(files, place, 1000, len(CONTENT))

    refused = files.admin.post(f"{place}/commit")

    assert slug(refused) == (409, "range-missing")
    assert "0 to 1000" in refused.json()["detail"]
    assert files.admin.get(FILES).json()["results"] == []
    block(files, place, 0, 1000)
    assert files.admin.post(f"{place}/commit").status_code == 201


@ONE_DATABASE
def test_block_beyond_the_end_or_without_bytes_is_refused(files: InProcessApi):
    place = begin(files, length=1000)

    assert slug(block(files, place, 500, 1501)) == (413, "body-too-large")
    assert slug(block(files, place, 1000, 1001)) == (413, "body-too-large")
    assert slug(files.admin.put(f"{place}?offset=0")) == (400, "empty-body")
    assert slug(files.admin.put(f"{place}?offset=-1", content=b"x")) == (422, "schema-violation")
    assert uploading(files) == []


@ONE_DATABASE
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_file_without_bytes_needs_no_block_and_may_have_empty_ones(files: InProcessApi, blocks: int):
    place = begin(files, length=0)
    for number in range(blocks):
        key = {"Idempotency-Key": "k"} if number else {}
        for _ in range(2):
            assert files.admin.put(f"{place}?offset=0", headers=key).json()["missing"] == []
    assert slug(files.admin.put(f"{place}?offset=0", content=b"x")) == (413, "body-too-large")

    answer = files.admin.post(f"{place}/commit")

    assert (answer.status_code, answer.json()["size"]) == (201, 0)
    assert answer.json()["checksum"] == hashlib.sha256().hexdigest()
    assert files.admin.get(place).json()["committed"] == []
    assert files.admin.post(f"{place}/commit").json() == answer.json()
    assert uploading(files) == []


@ONE_DATABASE
def test_wrong_checksum_is_found_at_the_commit_and_nothing_is_stored(files: InProcessApi):
    place = begin(files, checksum="0" * 64)
    block(files, place, 0, len(CONTENT))

    assert slug(files.admin.post(f"{place}/commit")) == (422, "schema-violation")

    assert files.admin.get(FILES).json()["results"] == []
    assert files.admin.delete(place).status_code == 204
    assert uploading(files) == []


@ONE_DATABASE
@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"path": "../a"}, (400, "invalid-path")),
        ({"path": "/a"}, (400, "invalid-path")),
        ({"path": ""}, (400, "invalid-path")),
        ({"length": -1}, (422, "schema-violation")),
        ({"length": 1 << 49}, (413, "body-too-large")),
        ({"checksum": "x"}, (422, "schema-violation")),
        ({"unknown": 1}, (422, "schema-violation")),
    ],
)
def test_upload_that_cannot_be_is_not_begun(files: InProcessApi, said: dict[str, Any], problem: tuple[int, str]):
    assert slug(files.admin.post(UPLOADS, {"length": 10, "path": "a", **said})) == problem


@ONE_DATABASE
def test_upload_beyond_the_quota_is_not_begun(files: InProcessApi):
    tenant = files.tenant("small", test="write")
    files.admin.put("/v1/admin/tenants/small/limits", {"quota_bytes": 10})

    assert slug(tenant.post(UPLOADS, {"length": 11, "path": "a"})) == (429, "quota-exceeded")
    assert tenant.post(UPLOADS, {"length": 10, "path": "a"}).status_code == 201


@ONE_DATABASE
def test_uploads_that_go_on_count_against_each_other(files: InProcessApi):
    tenant = files.tenant("small", test="write")
    files.admin.put("/v1/admin/tenants/small/limits", {"quota_bytes": 10})

    first = tenant.post(UPLOADS, {"length": 6, "path": "a"})
    second = tenant.post(UPLOADS, {"length": 6, "path": "b"})
    tenant.delete(first.headers["Location"])
    third = tenant.post(UPLOADS, {"length": 6, "path": "b"})
    tenant.put(f"{third.headers['Location']}?offset=0", content=b"012345")

    assert (first.status_code, third.status_code) == (201, 201)
    assert slug(second) == (429, "quota-exceeded")
    assert tenant.post(f"{third.headers['Location']}/commit").status_code == 201
    assert tenant.post(UPLOADS, {"length": 4, "path": "c"}).status_code == 201
    assert slug(tenant.post(UPLOADS, {"length": 1, "path": "d"})) == (429, "quota-exceeded")


@ONE_DATABASE
def test_upload_is_its_tenants_own(files: InProcessApi):
    place = begin(files)
    other = files.tenant("other", test="write")

    assert slug(other.get(place)) == (404, "upload-not-found")
    assert slug(other.put(f"{place}?offset=0", content=b"x")) == (404, "upload-not-found")
    assert slug(other.post(f"{place}/commit")) == (404, "upload-not-found")
    assert slug(other.delete(place)) == (404, "upload-not-found")


@ONE_DATABASE
def test_commit_again_answers_the_same_and_takes_no_more_blocks(files: InProcessApi):
    place = begin(files)
    block(files, place, 0, len(CONTENT))
    first = files.admin.post(f"{place}/commit").json()

    assert files.admin.post(f"{place}/commit").json() == first
    assert slug(block(files, place, 0, 10)) == (409, "overlapping-blocks")
    assert files.admin.get(place).json()["file"] == first
    assert files.admin.delete(place).status_code == 204
    assert slug(files.admin.get(place)) == (404, "upload-not-found")
    assert files.admin.get(f"{FILES}/{first['checksum']}/data").content == CONTENT


@ONE_DATABASE
def test_block_with_a_key_is_added_once(files: InProcessApi):
    place = begin(files)
    key = {"Idempotency-Key": "block-1"}

    first = block(files, place, 0, 1000, headers=key)

    assert block(files, place, 0, 1000, headers=key).json() == first.json()
    assert slug(block(files, place, 0, 999, headers=key)) == (422, "idempotency-mismatch")
    assert slug(block(files, place, 0, 1000)) == (409, "overlapping-blocks")
    assert len(uploading(files)) == 1


def test_commits_at_once_make_one_file(files: InProcessApi):
    place = begin(files)
    for start in range(0, len(CONTENT), 500_000):
        block(files, place, start, start + 500_000)
    told: list[Any] = []

    threads = [threading.Thread(target=lambda: told.append(files.admin.post(f"{place}/commit"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {answer.status_code for answer in told} == {201}
    assert len({answer.json()["id"] for answer in told}) == 1
    assert files.admin.get("/v1/whoami").json()["limits"]["used_bytes"] == len(CONTENT)
    assert uploading(files) == []


@ONE_DATABASE
def test_commit_holds_its_conditions_against_the_files_at_the_path_and_leaves_the_upload_if_they_fail(
    files: InProcessApi,
):
    there = files.admin.put(f"{FILES}?path=a%2Fb.bin", content=b"there")
    place = begin(files)
    block(files, place, 0, len(CONTENT))
    arrived = uploading(files)

    failed = files.admin.post(f"{place}/commit", headers={"If-None-Match": "*"})
    other = files.admin.post(f"{place}/commit", headers={"If-Match": '"x"'})

    assert slug(failed) == slug(other) == (412, "precondition-failed")
    assert there.headers["ETag"] in failed.json()["head"]
    assert (uploading(files), files.admin.get(place).json()["file"]) == (arrived, None)
    assert files.admin.get(FILES).json()["results"] == [there.json()]
    done = files.admin.post(f"{place}/commit", headers={"If-Match": there.headers["ETag"]})
    assert (done.status_code, done.headers["ETag"]) == (201, f'"{hashlib.sha256(CONTENT).hexdigest()}"')
    assert files.admin.get(done.headers["Location"]).json() == done.json()
    again = files.admin.post(f"{place}/commit", headers={"If-Match": '"x"'})
    assert (again.status_code, again.json(), again.headers["ETag"]) == (201, done.json(), done.headers["ETag"])


def test_of_uploads_that_must_be_the_first_at_their_path_one_is_however_often_each_is_committed(files: InProcessApi):
    places = [begin(files), begin(files, length=1000)]
    block(files, places[0], 0, len(CONTENT))
    block(files, places[1], 0, 1000)

    def commit(place: str) -> tuple[str, Any]:
        return place, files.admin.post(f"{place}/commit", headers={"If-None-Match": "*"})

    with ThreadPoolExecutor(4) as pool:
        told = [*pool.map(commit, places * 2)]

    (winner,) = {place for place, answer in told if answer.status_code == 201}
    assert sorted(answer.status_code for _, answer in told) == [201, 201, 412, 412]
    assert {answer.json()["id"] for place, answer in told if place == winner} == {
        file["id"] for file in files.admin.get(FILES).json()["results"]
    }
    assert files.admin.get(winner).json()["file"] is not None
    (loser,) = set(places) - {winner}
    assert (files.admin.get(loser).json()["file"], len(uploading(files))) == (None, 1)


@given(st.sets(st.integers(0, 60)), st.integers(60, 80))
def test_what_arrived_and_what_is_missing_are_all_there_is(cuts: set[int], length: int):
    edges = sorted(cuts)
    blocks = [Span(start, end) for start, end in zip(edges[::2], edges[1::2], strict=False)]

    left = missing(blocks, length)

    covered = sorted(byte for start, end in [*merge_spans(blocks), *left] for byte in range(start, end))
    assert covered == list(range(length))
    assert merge_spans(left) == left
