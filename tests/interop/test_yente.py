"""yente, installed from the package index into a separate environment, loads data from a real server.

yente's own code reads the manifest and the catalog, chooses between a full load and deltas, fetches them with the key,
verifies the checksum and builds the documents that it would index. Not covered: Elasticsearch and OpenSearch, and
therefore what yente does with them (writing the index, moving its alias, search and matching). Without a package index
and without an earlier environment in `.tools`, all tests are skipped.
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
"""Time limit of an installation or an export, in seconds."""


@pytest.fixture(scope="session")
def yente() -> Path:
    """Return the Python of an environment with yente, which is created once and kept."""
    folder = ROOT / ".tools" / f"yente-{VERSION}"
    python, marker = folder / "bin" / "python", folder / ".done"
    if not marker.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=TIMEOUT)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"yente=={VERSION}"]
        installation = subprocess.run(install, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if installation.returncode:
            pytest.skip(f"yente {VERSION} cannot be installed from the package index: {installation.stderr[-500:]}")
        marker.touch()
    return python


class Lake:
    """A server with datasets to load, and a tenant with read access to them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.admin = server.client()
        self.admin.timeout = 120  # the first flush starts Spark
        self._request("POST", "/v1/admin/tenants", json={"name": "screening"})
        self._request("POST", "/v1/admin/tenants/screening/grants", json={"dataset": "*", "level": "read"})
        self.key = self._request("POST", "/v1/admin/tenants/screening/keys", json={}).json()["key"]

    def create(self, name: str, **metadata: Any) -> None:
        self._request("POST", "/v1/datasets", json={"name": name, "title": name.title(), **metadata})

    def write(self, dataset: str, *entities: dict[str, Any]) -> None:
        self._request("POST", f"/v1/datasets/{dataset}/entities?origin=crawl", json=list(entities))

    def delete(self, dataset: str, entity: str) -> None:
        self._request("DELETE", f"/v1/datasets/{dataset}/entities/{entity}")

    def make(self, dataset: str) -> None:
        path = f"/v1/jobs/{self._request('POST', f'/v1/datasets/{dataset}/operations/make').json()['id']}"
        wait_until(lambda: self._request("GET", path).json()["state"] not in ("queued", "running"), TIMEOUT)
        job = self._request("GET", path).json()
        assert job["state"] == "done", job

    def exported(self, dataset: str) -> dict[str, Any]:
        lines = self._request("GET", f"/v1/datasets/{dataset}/exports/entities.ftm.json").content.splitlines()
        return {entity["id"]: entity for entity in map(json.loads, lines)}

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.admin.request(method, path, **options).raise_for_status()


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """Start a server with four datasets: two that yente can load, one without exports, and one compressed."""
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
    """Run yente's code with a manifest as in its documentation, and the key in the environment."""
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


def result_of(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return what the driver printed."""
    assert process.returncode == 0, process.stderr
    # yente logs to standard output; the document is the last line.
    return json.loads(process.stdout.splitlines()[-1])


def apply_operations(operations: list[dict[str, Any]], entities: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(entities)
    for operation in operations:
        result.pop(operation["entity"]["id"], None)
        if operation["op"] != "DEL":
            result[operation["entity"]["id"]] = operation["entity"]
    return result


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
    process = load(yente, tmp_path, lake, path=path, environment={"YENTE_STREAM_LOAD": stream}, catalog=catalog)

    result = result_of(process)
    assert result.keys() == {"people", "group", "never", "packed"}
    for name in ("people", "group"):
        assert (result[name]["needs_update"], result[name]["is_incremental"]) == (True, False)
        assert result[name]["checksum"] is not None
        assert apply_operations(result[name]["operations"], {}) == lake.exported(name)
        assert {document["_id"] for document in result[name]["documents"]} == lake.exported(name).keys()
        assert result[name]["model"]["entities_url"].startswith(f"{lake.server.url}/v1/")
    for name in ("never", "packed"):
        assert (result[name]["needs_update"], result[name]["model"]["entities_url"]) == (False, None)
    assert process.stdout.count("Cannot identify resource with FtM entities") == 2


def test_scope_loads_one_dataset(yente: Path, tmp_path: Path, lake: Lake):
    result = result_of(load(yente, tmp_path, lake, catalog={"scope": "group"}))

    assert [name for name, dataset in result.items() if dataset["needs_update"]] == ["group"]


def test_deltas_update_any_version_to_the_newest(yente: Path, tmp_path: Path, lake: Lake):
    first = result_of(load(yente, tmp_path, lake))["people"]
    versions, states = [first["target_version"]], [apply_operations(first["operations"], {})]
    changes = [(person("new", country=["de"]), "p0"), (person("p1", country=["fr"]), "new")]
    for written, deleted in changes:
        lake.write("people", written)
        lake.delete("people", deleted)
        lake.make("people")
        result = result_of(load(yente, tmp_path, lake, {"people": versions[-1]}))["people"]
        assert (result["needs_update"], result["is_incremental"]) == (True, True)
        assert result["target_version"] == result["model"]["version"] > versions[-1]
        states.append(apply_operations(result["operations"], states[-1]))
        versions.append(result["target_version"])
        assert states[-1] == lake.exported("people")
        assert {operation["op"] for operation in result["operations"]} >= {"DEL"}
        assert len(result["operations"]) == len(result["documents"]) == 2

    both = result_of(load(yente, tmp_path, lake, {"people": versions[0]}))["people"]
    current = result_of(load(yente, tmp_path, lake, {"people": versions[-1]}))["people"]
    old = result_of(load(yente, tmp_path, lake, {"people": "20000101000000-abc"}))["people"]

    assert both["is_incremental"]
    assert apply_operations(both["operations"], states[0]) == states[-1]
    assert current["needs_update"] is False
    assert (old["needs_update"], old["is_incremental"]) == (True, False)
    assert apply_operations(old["operations"], {}) == states[-1]


def test_wrong_key_is_an_error_with_the_status(yente: Path, tmp_path: Path, lake: Lake):
    process = load(yente, tmp_path, lake, key="tarn_wrong_key")

    assert process.returncode != 0
    assert "401 Unauthorized" in process.stderr
