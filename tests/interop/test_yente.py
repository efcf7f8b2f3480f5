"""yente, installed from the package index into an environment of its own, loads a real server.

Its own code reads the manifest and the catalog, chooses between a full load and deltas, fetches them with the key,
checks the checksum and makes the documents that it would index. Skipped: Elasticsearch and OpenSearch, and so
everything that yente does from there on (writing the index, moving its alias, search and matching). Without a package
index, and without an earlier environment in `.tools`, all of it is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import Server, clean_environment, running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
VERSION = os.environ.get("YENTE_VERSION", "5.5.0")
DRIVER = Path(__file__).with_name("yente_driver.py")

TIMEOUT = 900
"""Seconds that an installation, or an export, may take."""


@pytest.fixture(scope="session")
def yente() -> Path:
    """The Python of an environment with yente, made once and kept."""
    folder = ROOT / ".tools" / f"yente-{VERSION}"
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=TIMEOUT)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"yente=={VERSION}"]
        made = subprocess.run(install, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if made.returncode:
            pytest.skip(f"yente {VERSION} cannot be installed from the package index: {made.stderr[-500:]}")
        done.touch()
    return python


class Lake:
    """A server with datasets to load, and a tenant that may only read."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.admin = server.client()
        self.admin.timeout = 120  # the first flush starts Spark
        self._call("POST", "/v1/admin/tenants", json={"name": "screening"})
        self._call("POST", "/v1/admin/tenants/screening/grants", json={"dataset": "*", "level": "read"})
        self.key = self._call("POST", "/v1/admin/tenants/screening/keys", json={}).json()["key"]

    def create(self, name: str, **metadata: Any) -> None:
        self._call("POST", "/v1/datasets", json={"name": name, "title": name.title(), **metadata})

    def write(self, dataset: str, *entities: dict[str, Any]) -> None:
        self._call("POST", f"/v1/datasets/{dataset}/entities?origin=crawl", json=list(entities))

    def delete(self, dataset: str, entity: str) -> None:
        self._call("DELETE", f"/v1/datasets/{dataset}/entities/{entity}")

    def make(self, dataset: str) -> None:
        path = f"/v1/jobs/{self._call('POST', f'/v1/datasets/{dataset}/operations/make').json()['id']}"
        wait_until(lambda: self._call("GET", path).json()["state"] not in ("queued", "running"), TIMEOUT)
        job = self._call("GET", path).json()
        assert job["state"] == "done", job

    def exported(self, dataset: str) -> dict[str, Any]:
        lines = self._call("GET", f"/v1/datasets/{dataset}/exports/entities.ftm.json").content.splitlines()
        return {entity["id"]: entity for entity in map(json.loads, lines)}

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.admin.request(method, path, **options).raise_for_status()


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    with running(tmp_path_factory.mktemp("lake")) as server:
        lake = Lake(server)
        lake.create("people")
        lake.create("group", children=["people", "elsewhere"])
        lake.create("never")
        lake.create("packed", compression="gzip")
        for number in range(50):
            lake.write("people", person(f"p{number}"))
        lake.write("group", person("g"))
        lake.write("packed", person("z"))
        for name in ("people", "group", "packed"):
            lake.make(name)
        yield lake


def person(name: str, **properties: list[str]) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [f"Person {name}"], **properties}}


def load(
    yente: Path,
    folder: Path,
    lake: Lake,
    loaded: Mapping[str, str] | None = None,
    path: str = "/v1/catalog.json",
    key: str | None = None,
    environment: Mapping[str, str] | None = None,
    catalog: Mapping[str, Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run yente's code on a manifest as its documentation shows one, with the key from the environment."""
    entry = {"url": f"{lake.server.url}{path}", "auth_token": "$LAKE_KEY", **(catalog or {})}
    manifest = folder / "manifest.yml"
    manifest.write_text(json.dumps({"catalogs": [entry]}))  # JSON is YAML
    return subprocess.run(
        [str(yente), str(DRIVER), str(manifest), json.dumps(dict(loaded or {}))],
        env=clean_environment(
            LAKE_KEY=key or lake.key, YENTE_LOG_JSON="true", YENTE_DATA_PATH=str(folder), **(environment or {})
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    # yente logs to standard output; the document is the last line.
    return json.loads(done.stdout.splitlines()[-1])


def apply_operations(operations: list[dict[str, Any]], entities: Mapping[str, Any]) -> dict[str, Any]:
    known = dict(entities)
    for operation in operations:
        known.pop(operation["entity"]["id"], None)
        if operation["op"] != "DEL":
            known[operation["entity"]["id"]] = operation["entity"]
    return known


@pytest.mark.parametrize(
    ("path", "catalog", "stream"),
    [
        ("/v1/catalog.json", {}, "true"),
        ("/v1/catalog.json", {}, "false"),
        ("/v1/catalog.json", {"resource_name": "entities.ftm.json"}, "true"),
        ("/v1/catalog", {}, "true"),
    ],
)
def test_catalog_and_full_datasets_are_loaded(
    yente: Path, tmp_path: Path, lake: Lake, path: str, catalog: dict[str, str], stream: str
):
    done = load(yente, tmp_path, lake, path=path, environment={"YENTE_STREAM_LOAD": stream}, catalog=catalog)

    found = result_of(done)
    assert found.keys() == {"people", "group", "never", "packed"}
    for name in ("people", "group"):
        assert (found[name]["needs_update"], found[name]["is_incremental"]) == (True, False)
        assert found[name]["checksum"] is not None
        assert apply_operations(found[name]["operations"], {}) == lake.exported(name)
        assert {one["_id"] for one in found[name]["documents"]} == lake.exported(name).keys()
        assert found[name]["model"]["entities_url"].startswith(f"{lake.server.url}/v1/")
    for name in ("never", "packed"):
        assert (found[name]["needs_update"], found[name]["model"]["entities_url"]) == (False, None)
    assert done.stdout.count("Cannot identify resource with FtM entities") == 2


def test_scope_loads_one_dataset(yente: Path, tmp_path: Path, lake: Lake):
    found = result_of(load(yente, tmp_path, lake, catalog={"scope": "group"}))

    assert [name for name, one in found.items() if one["needs_update"]] == ["group"]


def test_deltas_lead_from_any_version_to_the_newest(yente: Path, tmp_path: Path, lake: Lake):
    first = result_of(load(yente, tmp_path, lake))["people"]
    versions, states = [first["target_version"]], [apply_operations(first["operations"], {})]
    changes = [(person("new", country=["de"]), "p0"), (person("p1", country=["fr"]), "new")]
    for written, deleted in changes:
        lake.write("people", written)
        lake.delete("people", deleted)
        lake.make("people")
        found = result_of(load(yente, tmp_path, lake, {"people": versions[-1]}))["people"]
        assert (found["needs_update"], found["is_incremental"]) == (True, True)
        assert found["target_version"] == found["model"]["version"] > versions[-1]
        states.append(apply_operations(found["operations"], states[-1]))
        versions.append(found["target_version"])
        assert states[-1] == lake.exported("people")
        assert {operation["op"] for operation in found["operations"]} >= {"DEL"}
        assert len(found["operations"]) == len(found["documents"]) == 2

    both = result_of(load(yente, tmp_path, lake, {"people": versions[0]}))["people"]
    current = result_of(load(yente, tmp_path, lake, {"people": versions[-1]}))["people"]
    old = result_of(load(yente, tmp_path, lake, {"people": "20000101000000-abc"}))["people"]

    assert both["is_incremental"]
    assert apply_operations(both["operations"], states[0]) == states[-1]
    assert current["needs_update"] is False
    assert (old["needs_update"], old["is_incremental"]) == (True, False)
    assert apply_operations(old["operations"], {}) == states[-1]


def test_wrong_key_is_an_error_that_names_the_status(yente: Path, tmp_path: Path, lake: Lake):
    done = load(yente, tmp_path, lake, key="tarn_wrong_key")

    assert done.returncode != 0
    assert "401 Unauthorized" in done.stderr
