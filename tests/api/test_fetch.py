"""Files that the server fetches: through the guarded fetcher, under the requested path, and atomically."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tarn.settings import Settings, load_settings

from tests.archive.web import Canary, Scripted, answer, listening, redirect, scripted
from tests.in_process_api import ONE_DATABASE, InProcessApi

pytestmark = ONE_DATABASE

FETCH = "/v1/datasets/test/files/fetch"
CONTENT = b"%PDF-1.4 \xff"
ALLOWED_HOST = "127.0.0.2"
"""A loopback address that may be fetched from; the canary's may not."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "報告.pdf").write_bytes(CONTENT)
    return folder


@pytest.fixture
def settings(database_url: str, tmp_path: Path, source: Path) -> Settings:
    return load_settings(
        database_url=database_url,
        lake_uri=str(tmp_path / "lake"),
        admin_key_file=tmp_path / "admin.key",
        fetch_roots=(source,),
        fetch_private_hosts=(ALLOWED_HOST,),
        fetch_max_bytes=1 << 20,
    )


@pytest.fixture
def web() -> Iterator[Scripted]:
    with scripted(ALLOWED_HOST) as server:
        server.scripts = {
            "/a/report.pdf": answer(CONTENT),
            "/": answer(CONTENT),
            "/short": lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nno more"],
            "/empty": answer(b""),
            "/large": answer(bytes((1 << 20) + 1)),
            "/broken": answer(status="503 Service Unavailable"),
        }
        yield server


@contextmanager
def canary() -> Iterator[Canary]:
    with listening() as listener:
        canary = Canary((listener,))
        yield canary
        assert not canary.touched()


def stored(tmp_path: Path) -> list[Path]:
    lake = tmp_path / "lake" / "test"
    return [path for name in ("archive", "uploads") for path in (lake / name).rglob("*") if path.is_file()]


def url_of(web: Scripted, path: str) -> str:
    return f"http://{ALLOWED_HOST}:{web.port}{path}"


@pytest.mark.usefixtures("dataset")
def test_file_is_fetched_from_the_web_under_its_name_there(api: InProcessApi, web: Scripted):
    response = api.admin.post(f"{FETCH}?origin=web", {"uri": url_of(web, "/a/report.pdf"), "meta": {"a": 1}})

    file = response.json()
    assert (response.status_code, response.headers["Location"]) == (
        201,
        f"/v1/datasets/test/files/{file['checksum']}/{file['id']}",
    )
    assert (file["path"], file["origin"], file["meta"], file["size"]) == ("report.pdf", "web", {"a": 1}, len(CONTENT))
    assert file["mime_type"] == "application/pdf"
    assert api.admin.get(f"/v1/datasets/test/files/{file['checksum']}/data").content == CONTENT


@pytest.mark.usefixtures("dataset")
def test_local_file_is_fetched_below_an_allowed_folder(api: InProcessApi, source: Path):
    checksum = hashlib.sha256(CONTENT).hexdigest()
    body = {"uri": (source / "報告.pdf").as_uri(), "path": "in/報告.pdf", "checksum": checksum}

    file = api.admin.post(f"{FETCH}?entity=true", body).json()

    assert (file["path"], file["checksum"]) == ("in/報告.pdf", checksum)
    document = api.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()
    assert (document["schema"], document["properties"]["fileName"]) == ("Pages", ["報告.pdf"])


@pytest.mark.usefixtures("dataset")
def test_empty_file_is_fetched(api: InProcessApi, web: Scripted, source: Path):
    (source / "empty.txt").touch()

    for uri in (url_of(web, "/empty"), (source / "empty.txt").as_uri()):
        response = api.admin.post(FETCH, {"uri": uri})
        assert (response.status_code, response.json()["size"], response.json()["checksum"]) == (
            201,
            0,
            hashlib.sha256().hexdigest(),
        )


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(
    ("path", "options", "status", "problem"),
    [
        ("/a/report.pdf", {"checksum": "0" * 64}, 422, "schema-violation"),
        ("/a/report.pdf", {"path": "../up.pdf"}, 400, "invalid-path"),
        ("/", {}, 400, "invalid-path"),
        ("/short", {}, 502, "source-failed"),
        ("/broken", {}, 502, "source-failed"),
        ("/large", {}, 413, "body-too-large"),
        ("/nothing", {}, 404, "file-not-found"),
    ],
)
def test_fetch_that_fails_stores_nothing(
    api: InProcessApi, web: Scripted, tmp_path: Path, path: str, options: dict[str, Any], status: int, problem: str
):
    response = api.admin.post(FETCH, {"uri": url_of(web, path), **options})

    assert (response.status_code, response.json()["type"]) == (status, f"/problems/{problem}")
    assert api.admin.get("/v1/datasets/test/files").json()["results"] == []
    assert stored(tmp_path) == []


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:{port}/",
        "http://localhost:{port}/",
        "http://2130706433:{port}/",
        "http://0177.0.0.1:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://a:b@127.0.0.1:{port}/",
        "gopher://127.0.0.1:{port}/",
        "ftp://127.0.0.1:{port}/",
        "file://127.0.0.1:{port}/etc/passwd",
        "file:///etc/passwd",
        "s3://127.0.0.1:{port}/bucket",
        "http://169.254.169.254/latest/meta-data/",
    ],
)
def test_forbidden_address_is_refused_without_connecting(api: InProcessApi, tmp_path: Path, uri: str):
    with canary() as listener:
        response = api.admin.post(FETCH, {"uri": uri.format(port=listener.port)})

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "uri")
    assert stored(tmp_path) == []


@pytest.mark.usefixtures("dataset")
def test_redirect_into_a_forbidden_address_is_not_followed(api: InProcessApi, web: Scripted):
    with canary() as listener:
        web.scripts["/moved"] = redirect(f"http://127.0.0.1:{listener.port}/")
        assert api.admin.post(FETCH, {"uri": url_of(web, "/moved")}).status_code == 422


@pytest.mark.usefixtures("dataset")
def test_fetch_with_an_idempotency_key_is_done_once(api: InProcessApi, web: Scripted):
    headers, body = {"Idempotency-Key": "once"}, {"uri": url_of(web, "/a/report.pdf")}

    first = api.admin.post(FETCH, body, headers=headers)
    again = api.admin.post(FETCH, body, headers=headers)

    assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
    assert len(web.requests) == 1
    assert api.admin.post(FETCH, {"uri": url_of(web, "/")}, headers=headers).status_code == 422


@pytest.mark.usefixtures("dataset")
def test_fetch_whose_precondition_fails_at_a_given_path_does_not_connect(api: InProcessApi, web: Scripted):
    body, first = {"uri": url_of(web, "/a/report.pdf"), "path": "a.pdf"}, {"If-None-Match": "*"}
    response = api.admin.post(FETCH, body, headers=first)

    late = api.admin.post(FETCH, body | {"uri": url_of(web, "/large")}, headers=first)
    wrong = api.admin.post(FETCH, body, headers={"If-Match": '"x"'})

    assert (response.status_code, len(web.requests)) == (201, 1)
    assert (late.status_code, wrong.status_code, late.json()["expected"]) == (412, 412, "*")
    again = api.admin.post(FETCH, body | {"meta": {"a": 1}}, headers={"If-Match": response.headers["ETag"]})
    assert (again.json()["id"], again.json()["meta"]) == (response.json()["id"], {"a": 1})


@pytest.mark.usefixtures("dataset")
def test_concurrent_fetches_with_if_none_match_at_the_source_path_succeed_once(
    api: InProcessApi, web: Scripted, tmp_path: Path
):
    web.scripts["/b/report.pdf"] = answer(b"other")
    ready = threading.Barrier(2)

    def fetch(path: str) -> Any:
        ready.wait(30)
        return api.admin.post(FETCH, {"uri": url_of(web, path)}, headers={"If-None-Match": "*"})

    with ThreadPoolExecutor(2) as pool:
        responses = [*pool.map(fetch, ["/a/report.pdf", "/b/report.pdf"])]

    assert sorted(response.status_code for response in responses) == [201, 412]
    (winner,) = [response.json() for response in responses if response.status_code == 201]
    assert api.admin.get("/v1/datasets/test/files").json()["results"] == [winner]
    assert [file.stem for file in stored(tmp_path) if file.suffix == ".json"] == [winner["id"]]


@pytest.mark.usefixtures("dataset")
def test_fetch_requires_write_and_does_not_connect_for_other_callers(api: InProcessApi, web: Scripted):
    reader = api.tenant("reader", test="read")
    unrelated = api.tenant("unrelated", other="admin")

    assert reader.post(FETCH, {"uri": url_of(web, "/a/report.pdf")}).status_code == 403
    assert unrelated.post(FETCH, {"uri": url_of(web, "/a/report.pdf")}).status_code == 404
    assert api.anonymous.post(FETCH, {"uri": url_of(web, "/a/report.pdf")}).status_code == 401
    assert web.requests == []
