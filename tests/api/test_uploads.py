"""Uploads in blocks over HTTP."""

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tarn.model.upload import Span, merge_spans, missing_spans

from tests.in_process_api import ONE_DATABASE, InProcessApi

FILES, UPLOADS = "/v1/datasets/test/files", "/v1/datasets/test/uploads"
CONTENT = random.Random(2).randbytes(2_500_000)


@pytest.fixture
def files(api: InProcessApi) -> InProcessApi:
    api.dataset("test")
    return api


def slug(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["type"].rsplit("/", 1)[-1]


def begin(api: InProcessApi, **fields: Any) -> str:
    response = api.admin.post(UPLOADS, {"length": len(CONTENT), "path": "a/b.bin", **fields})
    assert response.status_code == 201, response.text
    return str(response.headers["Location"])


def block(api: InProcessApi, upload: str, start: int, end: int, **options: Any) -> Any:
    return api.admin.put(f"{upload}?offset={start}", content=CONTENT[start:end], **options)


def uploading(api: InProcessApi) -> list[str]:
    return [entry.path for entry in api.services.store.list("test/uploads")]


def test_blocks_in_any_order_become_the_file(files: InProcessApi):
    upload = begin(files, checksum=hashlib.sha256(CONTENT).hexdigest(), origin="crawl", meta={"a": 1})

    for start, end in ((2_000_000, 2_500_000), (0, 1_000_000), (1_000_000, 2_000_000)):
        assert block(files, upload, start, end).status_code == 200
    response = files.admin.post(f"{upload}/commit?entity=true")

    file = response.json()
    assert files.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()["caption"] == "b.bin"
    assert (response.status_code, file["path"], file["origin"], file["meta"]) == (201, "a/b.bin", "crawl", {"a": 1})
    assert files.admin.get(f"{FILES}/{file['checksum']}/data").content == CONTENT
    assert files.admin.get(FILES).json()["results"] == [file]
    assert uploading(files) == []


@ONE_DATABASE
def test_upload_lists_received_and_missing_ranges(files: InProcessApi):
    upload = begin(files)
    block(files, upload, 0, 1000)
    block(files, upload, 1000, 2000)

    shown = block(files, upload, 5000, 6000).json()

    assert shown == files.admin.get(upload).json() | {"expires": shown["expires"]}
    assert shown["committed"] == [{"start": 0, "end": 2000}, {"start": 5000, "end": 6000}]
    assert shown["missing"] == [{"start": 2000, "end": 5000}, {"start": 6000, "end": len(CONTENT)}]
    assert shown["file"] is None


@ONE_DATABASE
@pytest.mark.parametrize(("start", "end"), [(1000, 2000), (500, 1500), (1500, 2500), (0, 3000), (1999, 2000)])
def test_overlapping_block_is_refused_and_changes_nothing(files: InProcessApi, start: int, end: int):
    upload = begin(files)
    before = block(files, upload, 1000, 2000).json()

    assert slug(block(files, upload, start, end)) == (409, "overlapping-blocks")

    assert files.admin.get(upload).json()["committed"] == before["committed"]
    assert len(uploading(files)) == 1


@ONE_DATABASE
def test_upload_with_missing_ranges_cannot_be_committed(files: InProcessApi):
    upload = begin(files)
    block(files, upload, 1000, len(CONTENT))

    refused = files.admin.post(f"{upload}/commit")

    assert slug(refused) == (409, "range-missing")
    assert "0 to 1000" in refused.json()["detail"]
    assert files.admin.get(FILES).json()["results"] == []
    block(files, upload, 0, 1000)
    assert files.admin.post(f"{upload}/commit").status_code == 201


@ONE_DATABASE
def test_block_beyond_the_end_or_without_bytes_is_refused(files: InProcessApi):
    upload = begin(files, length=1000)

    assert slug(block(files, upload, 500, 1501)) == (413, "body-too-large")
    assert slug(block(files, upload, 1000, 1001)) == (413, "body-too-large")
    assert slug(files.admin.put(f"{upload}?offset=0")) == (400, "empty-body")
    assert slug(files.admin.put(f"{upload}?offset=-1", content=b"x")) == (422, "schema-violation")
    assert uploading(files) == []


@ONE_DATABASE
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_empty_file_needs_no_block_and_may_have_empty_ones(files: InProcessApi, blocks: int):
    upload = begin(files, length=0)
    for number in range(blocks):
        key = {"Idempotency-Key": "k"} if number else {}
        for _ in range(2):
            assert files.admin.put(f"{upload}?offset=0", headers=key).json()["missing"] == []
    assert slug(files.admin.put(f"{upload}?offset=0", content=b"x")) == (413, "body-too-large")

    response = files.admin.post(f"{upload}/commit")

    assert (response.status_code, response.json()["size"]) == (201, 0)
    assert response.json()["checksum"] == hashlib.sha256().hexdigest()
    assert files.admin.get(upload).json()["committed"] == []
    assert files.admin.post(f"{upload}/commit").json() == response.json()
    assert uploading(files) == []


@ONE_DATABASE
def test_wrong_checksum_is_refused_at_the_commit_and_nothing_is_stored(files: InProcessApi):
    upload = begin(files, checksum="0" * 64)
    block(files, upload, 0, len(CONTENT))

    assert slug(files.admin.post(f"{upload}/commit")) == (422, "schema-violation")

    assert files.admin.get(FILES).json()["results"] == []
    assert files.admin.delete(upload).status_code == 204
    assert uploading(files) == []


@ONE_DATABASE
@pytest.mark.parametrize(
    ("fields", "problem"),
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
def test_invalid_upload_is_not_started(files: InProcessApi, fields: dict[str, Any], problem: tuple[int, str]):
    assert slug(files.admin.post(UPLOADS, {"length": 10, "path": "a", **fields})) == problem


@ONE_DATABASE
def test_upload_over_the_quota_is_not_started(files: InProcessApi):
    tenant = files.tenant("small", test="write")
    files.admin.put("/v1/admin/tenants/small/limits", {"quota_bytes": 10})

    assert slug(tenant.post(UPLOADS, {"length": 11, "path": "a"})) == (429, "quota-exceeded")
    assert tenant.post(UPLOADS, {"length": 10, "path": "a"}).status_code == 201


@ONE_DATABASE
def test_open_uploads_count_against_the_quota_together(files: InProcessApi):
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
def test_upload_of_another_tenant_is_not_found(files: InProcessApi):
    upload = begin(files)
    other = files.tenant("other", test="write")

    assert slug(other.get(upload)) == (404, "upload-not-found")
    assert slug(other.put(f"{upload}?offset=0", content=b"x")) == (404, "upload-not-found")
    assert slug(other.post(f"{upload}/commit")) == (404, "upload-not-found")
    assert slug(other.delete(upload)) == (404, "upload-not-found")


@ONE_DATABASE
def test_repeated_commit_returns_the_same_and_accepts_no_more_blocks(files: InProcessApi):
    upload = begin(files)
    block(files, upload, 0, len(CONTENT))
    first = files.admin.post(f"{upload}/commit").json()

    assert files.admin.post(f"{upload}/commit").json() == first
    assert slug(block(files, upload, 0, 10)) == (409, "overlapping-blocks")
    assert files.admin.get(upload).json()["file"] == first
    assert files.admin.delete(upload).status_code == 204
    assert slug(files.admin.get(upload)) == (404, "upload-not-found")
    assert files.admin.get(f"{FILES}/{first['checksum']}/data").content == CONTENT


@ONE_DATABASE
def test_block_with_an_idempotency_key_is_added_once(files: InProcessApi):
    upload = begin(files)
    key = {"Idempotency-Key": "block-1"}

    first = block(files, upload, 0, 1000, headers=key)

    assert block(files, upload, 0, 1000, headers=key).json() == first.json()
    assert slug(block(files, upload, 0, 999, headers=key)) == (422, "idempotency-mismatch")
    assert slug(block(files, upload, 0, 1000)) == (409, "overlapping-blocks")
    assert len(uploading(files)) == 1


def test_concurrent_commits_create_one_file(files: InProcessApi):
    upload = begin(files)
    for start in range(0, len(CONTENT), 500_000):
        block(files, upload, start, start + 500_000)
    responses: list[Any] = []

    threads = [
        threading.Thread(target=lambda: responses.append(files.admin.post(f"{upload}/commit"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {response.status_code for response in responses} == {201}
    assert len({response.json()["id"] for response in responses}) == 1
    assert files.admin.get("/v1/whoami").json()["limits"]["used_bytes"] == len(CONTENT)
    assert uploading(files) == []


@ONE_DATABASE
def test_commit_checks_its_preconditions_and_keeps_the_upload_if_they_fail(files: InProcessApi):
    existing = files.admin.put(f"{FILES}?path=a%2Fb.bin", content=b"there")
    upload = begin(files)
    block(files, upload, 0, len(CONTENT))
    received = uploading(files)

    failed = files.admin.post(f"{upload}/commit", headers={"If-None-Match": "*"})
    other = files.admin.post(f"{upload}/commit", headers={"If-Match": '"x"'})

    assert slug(failed) == slug(other) == (412, "precondition-failed")
    assert existing.headers["ETag"] in failed.json()["head"]
    assert (uploading(files), files.admin.get(upload).json()["file"]) == (received, None)
    assert files.admin.get(FILES).json()["results"] == [existing.json()]
    done = files.admin.post(f"{upload}/commit", headers={"If-Match": existing.headers["ETag"]})
    assert (done.status_code, done.headers["ETag"]) == (201, f'"{hashlib.sha256(CONTENT).hexdigest()}"')
    assert files.admin.get(done.headers["Location"]).json() == done.json()
    again = files.admin.post(f"{upload}/commit", headers={"If-Match": '"x"'})
    assert (again.status_code, again.json(), again.headers["ETag"]) == (201, done.json(), done.headers["ETag"])


def test_concurrent_uploads_with_if_none_match_at_one_path_succeed_once_however_often_each_is_committed(
    files: InProcessApi,
):
    uploads = [begin(files), begin(files, length=1000)]
    block(files, uploads[0], 0, len(CONTENT))
    block(files, uploads[1], 0, 1000)

    def commit(upload: str) -> tuple[str, Any]:
        return upload, files.admin.post(f"{upload}/commit", headers={"If-None-Match": "*"})

    with ThreadPoolExecutor(4) as pool:
        responses = [*pool.map(commit, uploads * 2)]

    (winner,) = {upload for upload, response in responses if response.status_code == 201}
    assert sorted(response.status_code for _, response in responses) == [201, 201, 412, 412]
    assert {response.json()["id"] for upload, response in responses if upload == winner} == {
        file["id"] for file in files.admin.get(FILES).json()["results"]
    }
    assert files.admin.get(winner).json()["file"] is not None
    (loser,) = set(uploads) - {winner}
    assert (files.admin.get(loser).json()["file"], len(uploading(files))) == (None, 1)


@given(st.sets(st.integers(0, 60)), st.integers(60, 80))
def test_received_and_missing_ranges_cover_the_file(cuts: set[int], length: int):
    edges = sorted(cuts)
    blocks = [Span(start, end) for start, end in zip(edges[::2], edges[1::2], strict=False)]

    left = missing_spans(blocks, length)

    covered = sorted(byte for start, end in [*merge_spans(blocks), *left] for byte in range(start, end))
    assert covered == list(range(length))
    assert merge_spans(left) == left
