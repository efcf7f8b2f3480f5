"""Files over HTTP: put, forms, fetch, list, texts, and their document entities."""

import asyncio
import gzip
import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import text
from tarn.archive import documents
from tarn.archive.files import SMALL
from tarn.model.names import FilePath

from tests.in_process_api import ONE_DATABASE, InProcessApi

pytestmark = ONE_DATABASE

FILES = "/v1/datasets/test/files"
LARGE = random.Random(1).randbytes(SMALL * 3)


@pytest.fixture
def files(api: InProcessApi) -> InProcessApi:
    api.dataset("test")
    return api


def put(api: InProcessApi, path: str, content: bytes = b"content", query: str = "", **options: Any) -> Any:
    return api.admin.put(f"{FILES}?path={quote(path)}{query}", content=content, **options)


def post_form(api: InProcessApi, content: bytes = b"content", query: str = "", meta: str = "{}", **options: Any) -> Any:
    return api.admin.post(f"{FILES}{query}", files={"file": ("a", content)}, data={"meta": meta}, **options)


def created(response: Any) -> Any:
    assert response.status_code == 201, response.text
    return response.json()


def data(api: InProcessApi, file: Any, **options: Any) -> Any:
    return api.admin.get(f"{FILES}/{file['checksum']}/data", **options)


def slug(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["type"].rsplit("/", 1)[-1]


def stored(api: InProcessApi) -> list[str]:
    return [entry.path for folder in ("archive", "uploads") for entry in api.services.store.list(f"test/{folder}")]


# Conditions


def tags(api: InProcessApi, file: Any) -> tuple[str, str]:
    """Return the entity tags of a file: its content's, and its record's."""
    shown = api.admin.get(f"{FILES}/{file['checksum']}/{file['id']}")
    return f'"{file["checksum"]}"', shown.headers["ETag"]


def test_put_with_if_none_match_at_a_path_succeeds_once(files: InProcessApi):
    first = put(files, "a", headers={"If-None-Match": "*"})
    same = put(files, "a", headers={"If-None-Match": "*"})
    other = put(files, "a", LARGE, headers={"If-None-Match": "*"})
    elsewhere = put(files, "b", headers={"If-None-Match": "*"})

    assert (first.status_code, elsewhere.status_code) == (201, 201)
    assert first.headers["ETag"] == tags(files, first.json())[0]
    assert slug(same) == slug(other) == (412, "precondition-failed")
    assert same.json()["head"] == ", ".join(tags(files, first.json()))
    assert files.admin.get(f"{FILES}?path=a").json()["results"] == [first.json()]
    assert not [path for path in stored(files) if "uploads" in path]


def test_put_checks_its_preconditions_against_every_file_at_the_path(files: InProcessApi):
    content, record = tags(files, created(put(files, "a")))
    other, _ = tags(files, created(put(files, "a", b"other")))

    def status_of(**headers: str) -> int:
        return put(files, "a", headers={name.replace("_", "-"): value for name, value in headers.items()}).status_code

    assert [status_of(If_Match=value) for value in (content, record, other, f'"x", {other}', "*")] == [201] * 5
    assert [status_of(If_Match=value) for value in ('"x"', f"W/{content}", content[1:-1], "")] == [412] * 4
    assert [status_of(If_None_Match=value) for value in (content, f"W/{record}", f'"x",{other}', "*")] == [412] * 4
    assert [status_of(If_None_Match=value) for value in ('"x"', 'W/"x"')] == [201] * 2
    assert status_of(If_Match=content, If_None_Match='"x"') == 201
    assert status_of(If_Match=content, If_None_Match=content) == 412
    lines = [("Authorization", f"Bearer {files.admin.key}"), ("If-Match", '"x"'), ("If-Match", content)]
    assert files._client.put(f"{FILES}?path=a", content=b"content", headers=lines).status_code == 201
    assert slug(put(files, "nothing", headers={"If-Match": "*"})) == (412, "precondition-failed")
    assert slug(put(files, "../a", headers={"If-Match": "*"})) == (400, "invalid-path")
    assert status_of(If_Match='"' + "x" * 1000 + '"') == 422


def test_record_that_was_changed_concurrently_is_not_overwritten(files: InProcessApi):
    file = created(put(files, "a", query="&meta={}"))
    _, record = tags(files, file)

    changed = put(files, "a", query='&meta={"by":1}', headers={"If-Match": record})
    late = put(files, "a", query='&meta={"by":2}', headers={"If-Match": record})

    assert created(changed)["meta"] == {"by": 1}
    assert slug(late) == (412, "precondition-failed")
    location = changed.headers["Location"]
    assert files.admin.get(location, headers={"If-None-Match": record}).json()["meta"] == {"by": 1}
    assert files.admin.get(location, headers={"If-None-Match": tags(files, file)[1]}).status_code == 304


def test_replayed_put_is_answered_although_its_precondition_no_longer_holds(files: InProcessApi):
    headers = {"Idempotency-Key": "k", "If-None-Match": "*"}

    responses = [put(files, "a", LARGE, headers=headers) for _ in range(2)]

    assert [response.status_code for response in responses] == [201, 201]
    assert slug(put(files, "a", LARGE, headers=headers | {"Idempotency-Key": "l"})) == (412, "precondition-failed")
    assert not [path for path in stored(files) if "uploads" in path]


def test_form_checks_its_preconditions_against_the_files_at_its_path(files: InProcessApi):
    first = post_form(files, headers={"If-None-Match": "*"})
    content, record = tags(files, first.json())

    same = post_form(files, headers={"If-None-Match": "*"})
    other = post_form(files, LARGE, headers={"If-None-Match": "*"})
    elsewhere = post_form(files, query="?path=b", headers={"If-Match": "*"})
    changed = post_form(files, meta='{"by": 1}', headers={"If-Match": record})
    late = post_form(files, meta='{"by": 2}', headers={"If-Match": record})

    assert (first.status_code, first.headers["ETag"]) == (201, content)
    assert slug(same) == slug(other) == slug(elsewhere) == slug(late) == (412, "precondition-failed")
    assert created(changed)["meta"] == {"by": 1}
    assert files.admin.get(FILES).json()["results"] == [changed.json()]
    assert not [path for path in stored(files) if "uploads" in path]


def test_replayed_form_is_answered_although_its_precondition_no_longer_holds(files: InProcessApi):
    headers = {"Idempotency-Key": "k", "If-None-Match": "*"}

    responses = [post_form(files, LARGE, headers=headers) for _ in range(2)]

    assert [response.status_code for response in responses] == [201, 201]
    assert slug(post_form(files, LARGE, headers=headers | {"Idempotency-Key": "l"})) == (412, "precondition-failed")
    assert not [path for path in stored(files) if "uploads" in path]


def test_concurrent_forms_with_if_none_match_at_one_path_succeed_once(files: InProcessApi):
    contents = [LARGE[: SMALL + 1], LARGE, b"small", b"tiny"]

    with ThreadPoolExecutor(len(contents)) as pool:
        responses = [*pool.map(lambda content: post_form(files, content, headers={"If-None-Match": "*"}), contents)]

    assert sorted(response.status_code for response in responses) == [201, 412, 412, 412]
    (winner,) = [response.json() for response in responses if response.status_code == 201]
    assert files.admin.get(FILES).json()["results"] == [winner]
    assert not [path for path in stored(files) if "uploads" in path]


def test_delete_checks_its_preconditions_against_the_file(files: InProcessApi):
    response = put(files, "a")
    location, (content, record) = response.headers["Location"], tags(files, response.json())

    def status_of(**headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return files.admin.delete(location, headers=named).status_code

    assert [status_of(If_Match=value) for value in ('"x"', f"W/{record}")] == [412] * 2
    assert [status_of(If_None_Match=value) for value in ("*", content, f"W/{record}")] == [412] * 3
    assert files.admin.get(location).status_code == 200
    assert status_of(If_Match=f'"x", {record}', If_None_Match='"x"') == 204
    assert [status_of(If_Match="*"), status_of(If_None_Match="*")] == [404] * 2
    put(files, "a")
    assert status_of(If_Match=content) == 204


# Metadata of a file


def test_metadata_in_the_query_is_stored_and_omitted_fields_are_kept(files: InProcessApi):
    meta = quote('{"Seite": [1, null], "Straße": "文"}')

    file = created(put(files, "a", query=f"&meta={meta}"))
    again = created(put(files, "a"))
    other = created(put(files, "a", query="&meta={}"))

    assert file["meta"] == again["meta"] == {"Seite": [1, None], "Straße": "文"}
    assert other["meta"] == {}


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ("", (400, "invalid-format")),
        ("{", (400, "invalid-format")),
        ("%ff", (400, "invalid-format")),
        ('{"a": NaN}', (400, "invalid-format")),
        ("[1]", (422, "schema-violation")),
        ("null", (422, "schema-violation")),
        ('{"a":' * 65 + "1" + "}" * 65, (422, "schema-violation")),
        ('{"a": "%s"}' % ("x" * 16_384), (422, "schema-violation")),
    ],
)
def test_invalid_metadata_is_refused_before_anything_is_stored(
    files: InProcessApi, meta: str, problem: tuple[int, str]
):
    response = put(files, "a", query=f"&meta={quote(meta, safe='%')}")

    assert slug(response) == problem
    assert response.json()["errors"][0]["field"].endswith("meta")
    assert stored(files) == []


# Putting


@pytest.mark.parametrize("content", [b"%PDF-1.7 small", LARGE])
def test_put_file_is_listed_shown_and_downloaded(files: InProcessApi, content: bytes):
    response = put(files, "Bücher/文書 1.pdf", content, "&origin=crawl")

    file = created(response)
    assert file["checksum"] == hashlib.sha256(content).hexdigest()
    assert (file["path"], file["name"], file["size"]) == ("Bücher/文書 1.pdf", "文書 1.pdf", len(content))
    assert (file["origin"], file["meta"], file["tenant"]) == ("crawl", {}, "admin")
    assert response.headers["Location"] == f"{FILES}/{file['checksum']}/{file['id']}"
    assert files.admin.get(response.headers["Location"]).json() == file
    assert files.admin.get(FILES).json() == {"results": [file], "next": None}
    assert files.admin.get(f"{FILES}/{file['checksum']}").json() == {"results": [file], "next": None}
    assert data(files, file).content == content
    assert "archive/last_updated" in files.admin.get("/v1/datasets/test/freshness").json()["tags"]


def test_compressed_body_of_a_file_is_stored_decompressed(files: InProcessApi):
    import gzip

    file = created(put(files, "a.txt", gzip.compress(b"content"), headers={"Content-Encoding": "gzip"}))

    assert data(files, file).content == b"content"


@pytest.mark.contract("W8")
def test_empty_file_is_stored_by_put_and_by_form(files: InProcessApi):
    first = created(files.admin.put(f"{FILES}?path=a.csv"))
    chunked = created(files.admin.put(f"{FILES}?path=b.csv", content=iter([])))
    zipped = created(put(files, "c.csv", gzip.compress(b""), headers={"Content-Encoding": "gzip"}))
    form = created(files.admin.post(f"{FILES}?path=d.csv", files={"file": ("d.csv", b"")}))

    assert {file["checksum"] for file in (first, chunked, zipped, form)} == {hashlib.sha256().hexdigest()}
    assert (first["size"], first["mime_type"]) == (0, "text/csv")
    assert len(files.admin.get(FILES).json()["results"]) == 4
    assert slug(put(files, "e.csv", b"", f"&checksum={'0' * 64}")) == (422, "schema-violation")
    assert slug(files.admin.post(FILES, headers={"Content-Type": "multipart/form-data; boundary=x"})) == (
        400,
        "empty-body",
    )


@pytest.mark.contract("W8")
def test_empty_body_of_records_is_still_refused(files: InProcessApi):
    for kind in ("entities", "statements"):
        response = files.admin.post(f"/v1/datasets/test/{kind}", headers={"Content-Type": "application/x-ndjson"})
        assert slug(response) == (400, "empty-body")


def test_empty_file_is_sent_in_full_for_any_range(files: InProcessApi):
    file = created(put(files, "a.txt", b"", "&entity=true"))

    for range_header in (None, "bytes=0-", "bytes=0-0", "bytes=-5", "bytes=5-"):
        response = data(files, file, headers={} if range_header is None else {"Range": range_header})
        assert (response.status_code, response.content, response.headers["Content-Length"]) == (200, b"", "0")
    head = files.admin.head(f"{FILES}/{file['checksum']}/data")
    assert (head.status_code, head.headers["Content-Length"]) == (200, "0")
    assert head.headers["ETag"] == f'"{hashlib.sha256().hexdigest()}"'
    assert data(files, file, headers={"If-None-Match": head.headers["ETag"]}).status_code == 304
    document = files.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()
    assert (document["schema"], document["properties"]["fileSize"]) == ("PlainText", ["0"])


def test_empty_text_is_stored(files: InProcessApi):
    location = f"{FILES}/{created(put(files, 'a.pdf'))['checksum']}/text/ocr"

    assert files.admin.put(location).json() == {"size": 0}
    response = files.admin.get(location, headers={"Range": "bytes=0-"})
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("content", [b"content", LARGE])
def test_wrong_checksum_is_refused_and_nothing_is_stored(files: InProcessApi, content: bytes):
    response = put(files, "a", content, f"&checksum={'0' * 64}")

    assert slug(response) == (422, "schema-violation")
    assert response.json()["errors"][0]["field"] == "checksum"
    assert stored(files) == []


def test_right_checksum_is_accepted(files: InProcessApi):
    assert created(put(files, "a", LARGE, f"&checksum={hashlib.sha256(LARGE).hexdigest()}"))["size"] == len(LARGE)


def test_file_over_the_limit_is_refused(files: InProcessApi):
    with files.with_settings(max_file_bytes=SMALL * 2) as small:
        declared = small.admin.put(f"{FILES}?path=a", content=LARGE)
        undeclared = small.admin.put(f"{FILES}?path=a", content=(LARGE[start:] for start in (0, 1)))

    assert slug(declared) == slug(undeclared) == (413, "body-too-large")
    assert stored(files) == []


def test_quota_of_bytes_is_enforced(files: InProcessApi):
    tenant = files.tenant("small", test="write")
    files.admin.put("/v1/admin/tenants/small/limits", {"quota_bytes": 10})

    first = tenant.put(f"{FILES}?path=a", content=b"0123456")
    second = tenant.put(f"{FILES}?path=b", content=b"0123456")

    assert first.status_code == 201
    assert slug(second) == (429, "quota-exceeded")
    assert len(files.admin.get(FILES).json()["results"]) == 1
    assert tenant.delete(first.headers["Location"]).status_code == 204
    assert tenant.put(f"{FILES}?path=b", content=b"0123456").status_code == 201


def limited(api: InProcessApi, quota: int) -> Any:
    """Return a tenant with a quota of bytes."""
    tenant = api.tenant("small", test="write")
    api.admin.put("/v1/admin/tenants/small/limits", {"quota_bytes": quota})
    return tenant


def used(api: InProcessApi) -> int:
    return int(api.admin.get("/v1/admin/tenants/small/limits").json()["used_bytes"])


def test_texts_count_against_the_quota_and_release_it(files: InProcessApi):
    tenant = limited(files, 1000)
    file = created(tenant.put(f"{FILES}?path=a.pdf", content=b"x" * 100))
    location = f"{FILES}/{file['checksum']}/text"

    assert tenant.put(f"{location}/ocr", content=b"x" * 800).status_code == 200
    assert slug(tenant.put(f"{location}/other", content=b"x" * 200)) == (429, "quota-exceeded")
    assert slug(files.admin.get(f"{location}/other")) == (404, "file-not-found")
    assert tenant.put(f"{location}/ocr", content=b"y" * 900).status_code == 200
    assert used(files) == 1000
    # Another tenant's text that replaces it counts for that tenant.
    assert files.admin.put(f"{location}/ocr", content=b"z" * 5000).status_code == 200
    assert used(files) == 100
    assert tenant.delete(f"{location}/ocr").status_code == 204
    assert slug(tenant.delete(f"{location}/ocr")) == (404, "file-not-found")
    assert slug(tenant.get(f"{location}/ocr")) == (404, "file-not-found")
    assert slug(tenant.delete(f"{FILES}/{'0' * 64}/text/ocr")) == (404, "file-not-found")
    assert tenant.put(f"{location}/ocr", content=b"y" * 900).status_code == 200
    assert tenant.delete(f"{FILES}/{file['checksum']}/{file['id']}").status_code == 204
    assert used(files) == 0
    assert [path for path in stored(files) if path.endswith(".txt")] == []


@pytest.mark.parametrize("kind", ["put", "post", "text"])
def test_body_over_the_quota_stores_nothing(files: InProcessApi, kind: str):
    tenant = limited(files, SMALL * 2)
    checksum = created(put(files, "a.pdf"))["checksum"]
    before = stored(files)

    def sent(content: Any) -> Any:
        if kind == "post":
            body = content if isinstance(content, bytes) else b"".join(content)
            return tenant.post(f"{FILES}?path=a", files={"file": ("a", body)})
        location = f"{FILES}?path=a" if kind == "put" else f"{FILES}/{checksum}/text/ocr"
        return tenant.put(location, content=content)

    text = b"x" * len(LARGE)
    assert slug(sent(text)) == (429, "quota-exceeded")
    assert slug(sent(text[start : start + SMALL] for start in range(0, len(text), SMALL))) == (429, "quota-exceeded")
    assert (stored(files), used(files)) == (before, 0)


def test_replayed_put_is_answered_although_the_quota_is_used_up(files: InProcessApi):
    tenant, key = limited(files, len(LARGE) + 1), {"Idempotency-Key": "k"}
    first = tenant.put(f"{FILES}?path=a", content=LARGE, headers=key)
    location = f"{FILES}/{created(first)['checksum']}/text/ocr"
    text = tenant.put(location, content=b"x", headers={"Idempotency-Key": "t"})
    before = stored(files)

    assert tenant.put(f"{FILES}?path=a", content=LARGE, headers=key).json() == first.json()
    assert slug(tenant.put(f"{FILES}?path=a", content=LARGE[:-1], headers=key)) == (422, "idempotency-mismatch")
    assert slug(tenant.put(f"{FILES}?path=a", content=LARGE)) == (429, "quota-exceeded")
    assert tenant.put(location, content=b"x", headers={"Idempotency-Key": "t"}).json() == text.json() == {"size": 1}
    assert (stored(files), used(files)) == (before, len(LARGE) + 1)


@pytest.mark.parametrize("path", ["../a", "/a", "a//b", "a/", "a\\b", "a\x00b", "a\nb", "", ".", "C:/a", "x" * 4097])
def test_invalid_path_is_refused_before_anything_is_stored(files: InProcessApi, path: str):
    response = put(files, path)

    assert response.status_code in (400, 422)
    assert slug(response)[1] == ("schema-violation" if len(path) > 4096 else "invalid-path")
    assert stored(files) == []


def test_path_that_is_not_utf8_is_refused(files: InProcessApi):
    assert slug(files.admin.put(f"{FILES}?path=a%ff", content=b"x")) == (400, "invalid-path")
    assert created(files.admin.put(f"{FILES}?path=a%ef%bf%bd", content=b"x"))["path"] == "a\ufffd"


def test_same_idempotency_key_stores_once_and_refuses_other_content(files: InProcessApi):
    key = {"Idempotency-Key": "k1"}

    first = put(files, "a", LARGE, headers=key)
    again = put(files, "a", LARGE, headers=key)
    other = put(files, "a", b"other", headers=key)

    assert first.json() == again.json()
    assert slug(other) == (422, "idempotency-mismatch")
    assert len(files.admin.get("/v1/admin/audit").json()["results"]) == len({first.text, "create_dataset"})
    assert not [path for path in stored(files) if "uploads" in path]


# Forms


def test_form_stores_the_file_with_its_metadata(files: InProcessApi):
    form = {"file": ("Übersicht.csv", LARGE, "text/csv")}

    file = created(files.admin.post(f"{FILES}?path=b%2Fc.bin", files=form, data={"meta": '{"page": [1, null]}'}))
    other = created(files.admin.post(FILES, files={"file": ("Übersicht.csv", b"a,b\n")}))

    assert (file["path"], file["meta"], file["size"]) == ("b/c.bin", {"page": [1, None]}, len(LARGE))
    assert data(files, file).content == LARGE
    assert (other["path"], other["mime_type"], other["meta"]) == ("Übersicht.csv", "text/csv", {})


def test_form_may_have_its_fields_after_the_file(files: InProcessApi):
    body = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + LARGE
    body += b'\r\n--x\r\ncontent-disposition: form-data; name="meta"\r\n\r\n{"a": 1}\r\n--x--\r\n'

    file = created(files.admin.post(FILES, content=body, headers={"Content-Type": "multipart/form-data; boundary=x"}))

    assert (file["meta"], file["size"]) == ({"a": 1}, len(LARGE))


BEGIN = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
META = b'\r\n--x\r\ncontent-disposition: form-data; name="meta"\r\n\r\n'
END = b"\r\n--x--\r\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", (400, "empty-body")),
        (b"nonsense", (400, "invalid-format")),
        (BEGIN + LARGE, (400, "invalid-format")),
        (BEGIN + b"content", (400, "invalid-format")),
        (BEGIN + LARGE + b"\r\n--x\r\n", (400, "invalid-format")),
        (BEGIN + b"a" + END.replace(b"--\r\n", b"\r\n") + BEGIN[5:] + b"b" + END, (422, "schema-violation")),
        (BEGIN + b"a" + META + b"{" + END, (400, "invalid-format")),
        (BEGIN + LARGE + META + b"[1]" + END, (422, "schema-violation")),
        (BEGIN + b"a" + META + b"{}" + META + b"{}" + END, (422, "schema-violation")),
        (BEGIN + b"a" + META + b" " * (2 << 20) + END, (413, "body-too-large")),
        (BEGIN.replace(b'"file"', b'"other"') + b"a" + END, (422, "schema-violation")),
        (BEGIN.replace(b'"a"', b'"../a"') + b"a" + END, (400, "invalid-path")),
        (BEGIN.replace(b'; filename="a"', b"") + b"a" + END, (400, "invalid-path")),
        (BEGIN.replace(b'"a"', b'"\xff"') + b"a" + END, (400, "invalid-format")),
        (BEGIN.replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 99_999 + b"\r\n\r\n") + b"a" + END, (400, "invalid-format")),
    ],
)
def test_invalid_form_is_refused_and_nothing_is_stored(files: InProcessApi, body: bytes, problem: tuple[int, str]):
    response = files.admin.post(FILES, content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})

    assert slug(response) == problem
    assert stored(files) == []


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("application/json", (415, "unsupported-media-type")),
        ("multipart/form-data", (400, "invalid-format")),
        (f"multipart/form-data; boundary={'x' * 500}", (400, "invalid-format")),
    ],
)
def test_body_that_is_not_a_form_is_refused(files: InProcessApi, kind: str, problem: tuple[int, str]):
    assert slug(files.admin.post(FILES, content=b"{}", headers={"Content-Type": kind})) == problem


# Fetching


def test_requested_range_of_a_file_is_sent(files: InProcessApi):
    file = created(put(files, "a.txt", b"0123456789"))

    def request_range(range_header: str) -> tuple[int, bytes, str | None]:
        response = data(files, file, headers={"Range": range_header})
        return response.status_code, response.content, response.headers.get("Content-Range")

    assert request_range("bytes=2-4") == (206, b"234", "bytes 2-4/10")
    assert request_range("bytes=7-") == (206, b"789", "bytes 7-9/10")
    assert request_range("bytes=-2") == (206, b"89", "bytes 8-9/10")
    assert request_range("bytes=0-0,2-2") == (200, b"0123456789", None)
    assert request_range("bytes=10-")[0] == 416


def test_entity_tag_of_a_file_is_its_checksum(files: InProcessApi):
    file = created(put(files, "a.txt"))
    tag = f'"{file["checksum"]}"'

    head = files.admin.head(f"{FILES}/{file['checksum']}/data")

    assert (head.status_code, head.content, head.headers["ETag"]) == (200, b"", tag)
    assert (head.headers["Content-Length"], head.headers["Content-Type"]) == ("7", "text/plain; charset=utf-8")
    assert data(files, file, headers={"If-None-Match": tag}).status_code == 304
    assert data(files, file, headers={"Range": "bytes=0-1", "If-Range": tag}).status_code == 206
    assert data(files, file, headers={"Range": "bytes=0-1", "If-Range": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("report 1.pdf", 'attachment; filename="report 1.pdf"'),
        ('a"; filename="evil.exe', "attachment; filename=\"a_; filename=_evil.exe\"; filename*=UTF-8''a%22%3B%20"),
        ("отчёт.pdf", "attachment; filename=\"_____.pdf\"; filename*=UTF-8''%D0%BE%D1%82%D1%87%D1%91%D1%82.pdf"),
        ("a%22b.txt", "attachment; filename=\"a_22b.txt\"; filename*=UTF-8''a%2522b.txt"),
        ("\u202egpj.exe", "attachment; filename=\"_gpj.exe\"; filename*=UTF-8''%E2%80%AEgpj.exe"),
    ],
)
def test_hostile_names_stay_inside_their_header(files: InProcessApi, name: str, header: str):
    file = created(put(files, f"x/{name}"))

    response = data(files, file)

    assert response.headers["Content-Disposition"].startswith(header)
    assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_markup_is_sent_as_an_attachment(files: InProcessApi):
    file = created(put(files, "a.html", b"<html><script>alert(1)</script>"))

    assert data(files, file).headers["Content-Disposition"] == 'attachment; filename="a.html"'


@pytest.mark.parametrize("path", [f"/{'0' * 64}", f"/{'0' * 64}/data", f"/{'0' * 64}/{'0' * 40}"])
def test_missing_file_is_not_found(files: InProcessApi, path: str):
    assert slug(files.admin.get(FILES + path)) == (404, "file-not-found")


@pytest.mark.parametrize("path", ["/x", "/../config.yml", f"/{'0' * 64}/..%2f..%2fdata", f"/{'A' * 64}"])
def test_invalid_checksum_reads_no_file(files: InProcessApi, path: str):
    assert files.admin.get(FILES + path).status_code in (404, 422)


# Listing


def test_files_are_listed_by_page_prefix_and_path(files: InProcessApi):
    for path in ("a/1", "a/2", "a/я", "b%/1", "b/1"):
        put(files, path)

    def listed(query: str) -> list[str]:
        paths, cursor = [], ""
        while True:
            page = files.admin.get(f"{FILES}?limit=2{query}{cursor}").json()
            paths += [file["path"] for file in page["results"]]
            if page["next"] is None:
                return paths
            cursor = f"&cursor={page['next']}"

    assert listed("") == ["a/1", "a/2", "a/я", "b%/1", "b/1"]
    assert listed("&prefix=a%2F") == ["a/1", "a/2", "a/я"]
    assert listed("&prefix=b%25") == ["b%/1"]
    assert listed("&path=a%2F1") == ["a/1"]
    assert listed("&path=a") == []


def test_invalid_prefix_or_cursor_is_refused(files: InProcessApi):
    assert slug(files.admin.get(f"{FILES}?prefix=..%2F")) == (400, "invalid-path")
    assert slug(files.admin.get(f"{FILES}?prefix=a%00")) == (400, "invalid-path")
    assert slug(files.admin.get(f"{FILES}?cursor=xyz")) == (422, "schema-violation")


def test_deleted_file_is_gone_and_its_content_is_kept_while_another_file_has_it(files: InProcessApi):
    one, other = created(put(files, "a")), created(put(files, "b"))

    assert files.admin.delete(f"{FILES}/{one['checksum']}/{one['id']}").status_code == 204

    assert slug(files.admin.delete(f"{FILES}/{one['checksum']}/{one['id']}")) == (404, "file-not-found")
    assert files.admin.get(FILES).json()["results"] == [other]
    assert data(files, other).content == b"content"
    files.admin.delete(f"{FILES}/{other['checksum']}/{other['id']}")
    assert slug(data(files, other)) == (404, "file-not-found")


# Texts


@pytest.mark.parametrize("content", ["Текст".encode(), "Ü".encode() * SMALL])
def test_text_of_an_origin_is_stored_and_replaced(files: InProcessApi, content: bytes):
    location = f"{FILES}/{created(put(files, 'a.pdf'))['checksum']}/text/ocr:v1"

    assert files.admin.put(location, content=b"first").json() == {"size": 5}
    assert files.admin.put(location, content=content).json() == {"size": len(content)}

    response = files.admin.get(location)
    assert (response.content, response.headers["Content-Type"]) == (content, "text/plain; charset=utf-8")
    assert slug(files.admin.get(location[:-1] + "2")) == (404, "file-not-found")
    assert not [path for path in stored(files) if "uploads" in path]


def test_invalid_text_is_refused_and_the_former_is_kept(files: InProcessApi):
    location = f"{FILES}/{created(put(files, 'a.pdf'))['checksum']}/text/ocr"
    files.admin.put(location, content=b"first")

    assert slug(files.admin.put(location, content=b"a\xff")) == (422, "schema-violation")
    assert slug(files.admin.put(location, content=b"a" * SMALL * 2 + b"\xc3")) == (422, "schema-violation")
    assert slug(files.admin.put(f"{FILES}/{'0' * 64}/text/ocr", content=b"x")) == (404, "file-not-found")
    assert files.admin.get(location).content == b"first"


def test_same_idempotency_key_stores_a_text_once(files: InProcessApi):
    location = f"{FILES}/{created(put(files, 'a.pdf'))['checksum']}/text/ocr"
    key = {"Idempotency-Key": "k"}

    assert files.admin.put(location, content=b"first", headers=key).status_code == 200
    files.admin.put(location, content=b"second")

    assert files.admin.put(location, content=b"first", headers=key).json() == {"size": 5}
    assert slug(files.admin.put(location, content=b"third", headers=key)) == (422, "idempotency-mismatch")
    assert files.admin.get(location).content == b"second"


# Entities


def test_file_is_put_with_its_document_and_folder_entities(files: InProcessApi):
    file = created(put(files, "a/b/report.pdf", b"%PDF-1.4", "&entity=true&origin=crawl"))

    document = files.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()
    folder = files.admin.get(f"/v1/datasets/test/entities/{document['properties']['parent'][0]}").json()
    root = files.admin.get(f"/v1/datasets/test/entities/{folder['properties']['parent'][0]}").json()

    assert (document["schema"], document["caption"], document["origin"]) == ("Pages", "report.pdf", ["crawl"])
    assert document["properties"]["contentHash"] == [hashlib.sha1(b"%PDF-1.4").hexdigest()]
    assert (folder["schema"], folder["caption"], root["caption"]) == ("Folder", "b", "a")
    assert "parent" not in root["properties"]


def test_folders_of_a_deep_path_are_built_in_a_thread_and_validated_once(
    files: InProcessApi, monkeypatch: pytest.MonkeyPatch
):
    """Validating each of two thousand folders once for every folder below it took minutes."""
    file = created(put(files, "a/" * 2000 + "b.txt"))
    checked: list[str] = []
    threads: list[bool] = []

    def build_in_thread(*arguments: Any) -> Any:
        monkeypatch.setattr(FilePath, "check", checked.append)
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        threads.append(True)
        try:
            return entities(*arguments)
        finally:
            monkeypatch.undo()

    entities = documents.entities
    monkeypatch.setattr(documents, "entities", build_in_thread)

    written = files.admin.post(f"{FILES}/{file['checksum']}/{file['id']}/entity")

    assert (written.status_code, written.json()["entities"]) == (200, 2001)
    assert (threads, checked) == ([True], [])


def test_document_of_an_existing_file_is_written_on_request(files: InProcessApi):
    file = created(put(files, "report.txt"))
    location = f"{FILES}/{file['checksum']}/{file['id']}/entity"

    written = files.admin.post(f"{location}?origin=later").json()

    assert (written["id"], written["entities"], written["rejected"]) == (file["id"], 1, 0)
    assert files.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()["origin"] == ["later"]
    assert slug(files.admin.post(f"{FILES}/{file['checksum']}/{'0' * 40}/entity")) == (404, "file-not-found")


def test_document_reports_a_name_that_ftm_rejects(files: InProcessApi):
    file = created(put(files, "\u200b"))

    written = files.admin.post(f"{FILES}/{file['checksum']}/{file['id']}/entity").json()

    assert written["omitted"]["by_property"] == {"PlainText:fileName": 1}


def test_every_write_is_in_the_audit_log(files: InProcessApi):
    file = created(put(files, "a"))
    files.admin.put(f"{FILES}/{file['checksum']}/text/ocr", content=b"x")
    files.admin.delete(f"{FILES}/{file['checksum']}/{file['id']}")

    with files.services.database.read() as connection:
        actions = connection.execute(text("SELECT action FROM audit ORDER BY id")).scalars().all()
    assert actions[-3:] == ["put_file", "put_file_text", "delete_file"]
