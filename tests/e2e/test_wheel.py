"""The wheels, installed in an empty environment: their contents, and a server among foreign modules."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.server import Server, running
from tests.ship.dockerfile import copied_from_the_tree
from tests.ship.test_dockerfile import copy, missing_build_requirements
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(missing_build_requirements()), reason=f"not installed here: {missing_build_requirements()}"
    ),
]

OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check")
FOREIGN = "from pathlib import Path\nPath(__file__).with_suffix('.imported').touch()\nraise ImportError(__file__)\n"
JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


def pip(command: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, *OFFLINE, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheels of the server and the client from copies of their sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    for step in copied_from_the_tree():
        copy(step, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", target, source, source / "clients" / "python")
    return {wheel.name.partition("-")[0]: wheel for wheel in target.glob("*.whl")}


@pytest.fixture(scope="module")
def command(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheels into an environment that has only their dependencies, and return its command `tarn`."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("*/site-packages")
    pip("install", "--target", packages, *wheels.values())
    # Of the packages here, but not of the working copy: `.pth` files in this folder are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = folder / "bin" / "tarn"
    command.write_text(f"#!{folder}/bin/python\nfrom tarn.cli import main\nmain()\n")
    command.chmod(0o755)
    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with modules that fail when they are imported."""
    (tmp_path / "app").mkdir()
    for name in ("app/__init__.py", "tarn.py", "duckdb.py", "pyspark.py"):
        (tmp_path / name).write_text(FOREIGN)
    return tmp_path


def top_level_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name.partition("/")[0] for name in archive.namelist()}


def served_entity(server: Server) -> tuple[int, dict]:
    """Write an entity, flush it through Spark, and return the snapshot's number and the entity as read back."""
    client = server.client()
    client.timeout = 120  # processes start with the first requests
    client.post("/v1/datasets", json={"name": "test"}).raise_for_status()
    client.post("/v1/datasets/test/entities", json=[JANE]).raise_for_status()
    snapshot = "/v1/datasets/test/snapshots/latest"
    wait_until(lambda: client.get(snapshot).is_success, 240)  # the flush starts Spark
    # A query, and not a point lookup: it runs in the query process.
    page = client.get("/v1/datasets/test/entities", params={"schema": "Person"}).raise_for_status().json()
    (entity,) = page["results"]
    return client.get(snapshot).json()["seq"], entity


def test_wheel_has_one_top_level_name(wheels: dict[str, Path]):
    assert top_level_names(wheels["tarn"]) == {"tarn", "tarn-0.1.0.dist-info"}


@pytest.mark.xdist_group("spark")
def test_installed_server_flushes_in_a_folder_with_foreign_modules(command: Path, folder: Path):
    program = ("env", "-u", "PYTHONPATH", str(command))
    with running(folder, program=program, TARN_FLUSH_AGE="1") as server:
        seq, entity = served_entity(server)
        assert server.stop() == 0

    assert (seq, entity["id"], entity["properties"]["name"]) == (1, "jane", ["Jane Doe"])
    assert list(folder.rglob("*.imported")) == []
