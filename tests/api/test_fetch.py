"""Files that the server fetches: through the guarded fetcher, with its path, and all or nothing."""

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
"""Another loopback address than the canary's, which is not opened."""


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    folder = tmp_path / "drop"
    folder.mkdir()
    (folder / "報告.pdf").write_bytes(CONTENT)
    return folder


@pytest.fixture
def settings(database_url: str, tmp_path: Path, drop: Path) -> Settings:
    return load_settings(
        database_url=database_url,
        lake_uri=str(tmp_path / "lake"),
        admin_key_file=tmp_path / "admin.key",
        fetch_roots=(drop,),
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
    return [place for name in ("archive", "uploads") for place in (lake / name).rglob("*") if place.is_file()]


def url_of(web: Scripted, path: str) -> str:
    return f"http://{ALLOWED_HOST}:{web.port}{path}"


@pytest.mark.usefixtures("dataset")
def test_file_is_fetched_from_the_web_under_the_name_that_it_has_there(house: InProcessApi, web: Scripted):
    done = house.admin.post(f"{FETCH}?origin=web", {"uri": url_of(web, "/a/report.pdf"), "meta": {"a": 1}})

    file = done.json()
    assert (done.status_code, done.headers["Location"]) == (
        201,
        f"/v1/datasets/test/files/{file['checksum']}/{file['id']}",
    )
    assert (file["path"], file["origin"], file["meta"], file["size"]) == ("report.pdf", "web", {"a": 1}, len(CONTENT))
    assert file["mime_type"] == "application/pdf"
    assert house.admin.get(f"/v1/datasets/test/files/{file['checksum']}/data").content == CONTENT


@pytest.mark.usefixtures("dataset")
def test_file_of_the_server_is_fetched_below_an_opened_folder(house: InProcessApi, drop: Path):
    checksum = hashlib.sha256(CONTENT).hexdigest()
    body = {"uri": (drop / "報告.pdf").as_uri(), "path": "in/報告.pdf", "checksum": checksum}

    file = house.admin.post(f"{FETCH}?entity=true", body).json()

    assert (file["path"], file["checksum"]) == ("in/報告.pdf", checksum)
    document = house.admin.get(f"/v1/datasets/test/entities/{file['id']}").json()
    assert (document["schema"], document["properties"]["fileName"]) == ("Pages", ["報告.pdf"])


@pytest.mark.usefixtures("dataset")
def test_file_without_bytes_is_fetched(house: InProcessApi, web: Scripted, drop: Path):
    (drop / "empty.txt").touch()

    for uri in (url_of(web, "/empty"), (drop / "empty.txt").as_uri()):
        done = house.admin.post(FETCH, {"uri": uri})
        assert (done.status_code, done.json()["size"], done.json()["checksum"]) == (
            201,
            0,
            hashlib.sha256().hexdigest(),
        )


@pytest.mark.usefixtures("dataset")
@pytest.mark.parametrize(
    ("path", "said", "status", "problem"),
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
    house: InProcessApi, web: Scripted, tmp_path: Path, path: str, said: dict[str, Any], status: int, problem: str
):
    done = house.admin.post(FETCH, {"uri": url_of(web, path), **said})

    assert (done.status_code, done.json()["type"]) == (status, f"/problems/{problem}")
    assert house.admin.get("/v1/datasets/test/files").json()["results"] == []
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
def test_forbidden_address_is_refused_and_nobody_is_connected_to(house: InProcessApi, tmp_path: Path, uri: str):
    with canary() as watching:
        done = house.admin.post(FETCH, {"uri": uri.format(port=watching.port)})

    assert (done.status_code, done.json()["errors"][0]["field"]) == (422, "uri")
    assert stored(tmp_path) == []


@pytest.mark.usefixtures("dataset")
def test_redirect_into_a_forbidden_address_is_not_followed(house: InProcessApi, web: Scripted):
    with canary() as watching:
        web.scripts["/moved"] = redirect(f"http://127.0.0.1:{watching.port}/")
        assert house.admin.post(FETCH, {"uri": url_of(web, "/moved")}).status_code == 422


@pytest.mark.usefixtures("dataset")
def test_fetch_under_a_key_is_made_once(house: InProcessApi, web: Scripted):
    headers, body = {"Idempotency-Key": "once"}, {"uri": url_of(web, "/a/report.pdf")}

    first = house.admin.post(FETCH, body, headers=headers)
    again = house.admin.post(FETCH, body, headers=headers)

    assert (first.status_code, again.status_code, first.json()) == (201, 201, again.json())
    assert len(web.requests) == 1
    assert house.admin.post(FETCH, {"uri": url_of(web, "/")}, headers=headers).status_code == 422


@pytest.mark.usefixtures("dataset")
def test_fetch_whose_conditions_fail_at_a_path_that_is_said_connects_to_nobody(house: InProcessApi, web: Scripted):
    body, first = {"uri": url_of(web, "/a/report.pdf"), "path": "a.pdf"}, {"If-None-Match": "*"}
    done = house.admin.post(FETCH, body, headers=first)

    late = house.admin.post(FETCH, body | {"uri": url_of(web, "/large")}, headers=first)
    wrong = house.admin.post(FETCH, body, headers={"If-Match": '"x"'})

    assert (done.status_code, len(web.requests)) == (201, 1)
    assert (late.status_code, wrong.status_code, late.json()["expected"]) == (412, 412, "*")
    again = house.admin.post(FETCH, body | {"meta": {"a": 1}}, headers={"If-Match": done.headers["ETag"]})
    assert (again.json()["id"], again.json()["meta"]) == (done.json()["id"], {"a": 1})


@pytest.mark.usefixtures("dataset")
def test_of_fetches_that_must_be_the_first_at_the_path_that_their_source_names_one_is(
    house: InProcessApi, web: Scripted, tmp_path: Path
):
    web.scripts["/b/report.pdf"] = answer(b"other")
    ready = threading.Barrier(2)

    def fetch(path: str) -> Any:
        ready.wait(30)
        return house.admin.post(FETCH, {"uri": url_of(web, path)}, headers={"If-None-Match": "*"})

    with ThreadPoolExecutor(2) as pool:
        told = [*pool.map(fetch, ["/a/report.pdf", "/b/report.pdf"])]

    assert sorted(done.status_code for done in told) == [201, 412]
    (winner,) = [done.json() for done in told if done.status_code == 201]
    assert house.admin.get("/v1/datasets/test/files").json()["results"] == [winner]
    assert [place.stem for place in stored(tmp_path) if place.suffix == ".json"] == [winner["id"]]


@pytest.mark.usefixtures("dataset")
def test_fetch_needs_write_and_connects_to_nobody_for_others(house: InProcessApi, web: Scripted):
    reader = house.tenant("reader", test="read")
    stranger = house.tenant("stranger", other="admin")

    assert reader.post(FETCH, {"uri": url_of(web, "/a/report.pdf")}).status_code == 403
    assert stranger.post(FETCH, {"uri": url_of(web, "/a/report.pdf")}).status_code == 404
    assert house.nobody.post(FETCH, {"uri": url_of(web, "/a/report.pdf")}).status_code == 401
    assert web.requests == []
