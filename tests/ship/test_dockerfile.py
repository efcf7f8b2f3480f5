"""Tests of the Dockerfile that need no container engine: lint, and its build steps run locally."""

import compileall
import http.server
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tarn.settings import load_settings

from tests.ship.dockerfile import ROOT, Instruction, copied_from_the_tree, final_stage, image_environment, instructions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "clients" / "python" / "pyproject.toml").read_text())
CLIENT_PACKAGES = ("pyspark_tarn", "tarn_client")


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_hadolint_reports_nothing():
    result = run(Path(sys.executable).parent / "hadolint", "--no-color", ROOT / "Dockerfile")
    assert (result.returncode, result.stdout) == (0, "")


def test_every_stage_starts_from_the_debian_release_that_has_jre_17():
    assert {each.parts[0] for each in instructions() if each.word == "FROM"} == {"python:3.11-slim-bookworm"}
    assert any("openjdk-17-jre-headless=17.*" in each.parts for each in final_stage("RUN"))


def test_image_runs_as_a_numeric_user_that_is_not_root():
    assert [each.parts for each in final_stage("USER")] == [["10001:10001"]]
    assert any("--uid 10001" in each.text and "--gid 10001" in each.text for each in final_stage("RUN"))


def test_entrypoint_is_a_console_script_of_the_package():
    (entrypoint,) = final_stage("ENTRYPOINT")
    (command,) = final_stage("CMD")
    assert entrypoint.parts[0] in PROJECT["project"]["scripts"]
    assert command.parts == ["api"]


def test_every_folder_written_to_by_default_is_a_volume():
    (volume,) = final_stage("VOLUME")
    (workdir,) = final_stage("WORKDIR")
    environment = image_environment()
    writable = {workdir.text, environment["HOME"], environment["TMPDIR"], environment["SPARK_LOCAL_DIRS"], "/tmp"}
    assert writable == set(volume.parts)


def test_tarn_accepts_the_settings_of_the_image(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TARN_")]:
        monkeypatch.delenv(name)
    for name, value in image_environment().items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.host == "0.0.0.0"
    assert settings.lake_uri == "/data/lake"
    assert [each.parts for each in final_stage("EXPOSE")] == [[str(settings.port)]]


def test_spark_uses_the_python_of_the_installed_package():
    environment = image_environment()
    (copied,) = (each for each in final_stage("COPY") if "--from=build" in each.flags)
    assert environment["PYSPARK_PYTHON"] == f"{copied.parts[-1]}/bin/python"
    assert environment["PATH"].startswith(f"{copied.parts[-1]}/bin:")


def test_build_context_contains_only_copied_files():
    copied = {source for each in copied_from_the_tree() for source in each.parts[:-1]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    included = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert included == {
        source for source in copied if not any(Path(source).is_relative_to(each) for each in copied - {source})
    }
    assert "*" in lines
    assert [source for source in copied if not (ROOT / source).exists()] == []


def missing_build_requirements() -> list[str]:
    """Return the build requirements that this environment lacks for `pip wheel --no-build-isolation`."""

    def met(requirement: Requirement) -> bool:
        try:
            return version(requirement.name) in requirement.specifier
        except PackageNotFoundError:
            return False

    return [each for each in PROJECT["build-system"]["requires"] if not met(Requirement(each))]


def copy(step: Instruction, source: Path) -> None:
    """Copy the sources of a COPY step into a folder that replaces the image's."""
    for name in step.parts[:-1]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / name, source / name)


@pytest.mark.long
@pytest.mark.skipif(bool(missing_build_requirements()), reason=f"not installed here: {missing_build_requirements()}")
def test_each_install_step_builds_from_the_files_copied_before_it(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    wheels: list[Path] = []

    def install(step: Instruction) -> None:
        target = tmp_path / f"step-{len(wheels)}"
        projects = [source / part.partition("[")[0] for part in step.parts if part.startswith(".")]
        options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", target)
        built = run(sys.executable, "-m", "pip", "wheel", *options, *projects)
        assert built.returncode == 0, built.stdout + built.stderr
        wheels.extend(sorted(target.glob("*.whl")))

    copies, installs = copied_from_the_tree(), [each for each in instructions() if each.text.startswith("pip install")]
    for step in (each for each in instructions() if each in copies or each in installs):
        copy(step, source) if step in copies else install(step)

    versions = {name: project["project"]["version"] for name, project in (("tarn", PROJECT), ("tarn_client", CLIENT))}
    named = [f"{name}-{version}-py3-none-any.whl" for name, version in versions.items()]
    assert [wheel.name for wheel in wheels] == named * 2
    with zipfile.ZipFile(wheels[-2]) as wheel:
        packed = set(wheel.namelist())
        scripts = next(name for name in packed if name.endswith("entry_points.txt"))
        assert f"tarn = {PROJECT['project']['scripts']['tarn']}" in wheel.read(scripts).decode()
    modules = {str(path.relative_to(ROOT / "app")) for path in (ROOT / "app" / "tarn").rglob("*.py")}
    migrations = {
        f"tarn/{path.relative_to(ROOT)}"
        for pattern in ("*.py", "*.mako")
        for path in (ROOT / "migrations").rglob(pattern)
    }
    assert {"tarn/settings.py", "tarn/migrations/__init__.py"} <= modules | migrations
    assert modules | migrations <= packed
    assert {name.partition("/")[0] for name in packed if ".dist-info/" not in name} == {"tarn"}
    with zipfile.ZipFile(wheels[-1]) as wheel:
        client = {name for name in wheel.namelist() if ".dist-info/" not in name}
    folder = ROOT / "clients" / "python"
    modules = {str(path.relative_to(folder)) for name in CLIENT_PACKAGES for path in (folder / name).rglob("*.py")}
    assert client == modules | {"tarn_client/py.typed"}


def test_package_requires_the_client_of_the_same_version():
    needed = [Requirement(each) for each in PROJECT["project"]["dependencies"]]
    assert f"tarn-client=={CLIENT['project']['version']}" in {str(each) for each in needed}


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/healthz" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def port(request) -> Iterator[int]:
    """Start a server whose /healthz returns the status of the parameter; return its port."""
    handler = type("Answer", (Health,), {"status": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def health_check(port: int) -> int:
    """Return the exit code of the image's health check, with a proxy in the environment that must not be used."""
    (check,) = final_stage("HEALTHCHECK")
    command = check.text.partition("CMD ")[2]
    python, *arguments = json.loads(command)
    assert python == "python"
    environment = {**os.environ, "TARN_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return run(sys.executable, *arguments, env=environment).returncode


@pytest.mark.parametrize("port", [200], indirect=True)
def test_health_check_passes_on_a_healthy_api(port):
    assert health_check(port) == 0


@pytest.mark.parametrize("port", [503], indirect=True)
def test_health_check_fails_on_an_unhealthy_api(port):
    assert health_check(port) == 1


# Commands of the package, installed as in the image


READ_ONLY = (
    """mount --bind "$1" "$1" && mount --bind "$2" "$2" && mount -o remount,bind,ro / && shift 2 && exec "$@" """
)
"""Runs a command on a root file system that is read-only except for two folders."""


TARN = ("-m", "tarn.cli")


class Image:
    """The package in a separate virtual environment, where only the volumes of the image are writable."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python = python
        self.root = folder / "root"
        self.scratch = folder / "scratch"
        self.data = folder / "data"

    def environment(self, **more: str) -> dict[str, str]:
        """Return the variables of the image, with its folders replaced by local ones."""
        folders = {"/scratch": str(self.scratch), "/data": str(self.data), "/opt/tarn": str(self.python.parents[1])}
        variables = image_environment()
        for image_folder, local_folder in folders.items():
            variables = {name: value.replace(image_folder, local_folder) for name, value in variables.items()}
        variables["PATH"] = variables["PATH"].replace("$PATH", os.environ["PATH"])
        return variables | more

    def popen(self, *command: str | Path, **more: str) -> subprocess.Popen[str]:
        read_only = ("unshare", "--mount", "sh", "-c", READ_ONLY, "sh", self.scratch, self.data)
        return subprocess.Popen(
            [*(() if os.geteuid() else read_only), *command],
            cwd=self.root,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **more: str) -> tuple[int, str]:
        """Run Python with these arguments; return its exit code and output."""
        process = self.popen(self.python, *command, **more)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """Install the wheels of the last step without dependencies, which are taken from this environment."""
    if missing_build_requirements():
        pytest.skip(f"not installed here: {missing_build_requirements()}")
    if os.geteuid() == 0 and run("unshare", "--mount", "true").returncode:
        pytest.skip("root may write everywhere, and is not permitted to mount a read-only file system here")
    # This folder is on the root file system, which is made read-only.
    with tempfile.TemporaryDirectory(prefix="tarn-image-", dir="/var/tmp") as name:
        folder = Path(name)
        source = folder / "source"
        source.mkdir()
        for step in copied_from_the_tree():
            copy(step, source)
        offline = ("--no-index", "--no-deps", "--no-build-isolation")
        projects = (source, source / "clients" / "python")
        built = run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, *projects)
        assert built.returncode == 0, built.stdout + built.stderr
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        (packages,) = (folder / "venv" / "lib").glob("*/site-packages")
        for path in folder.glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(packages)
        compileall.compile_dir(packages, quiet=1)
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        installed = Image(folder / "venv" / "bin" / "python", folder)
        installed.root.mkdir(mode=0o555)
        installed.scratch.mkdir()
        installed.data.mkdir()
        yield installed


def test_installed_package_prints_its_version_and_is_not_the_working_copy(image):
    assert image.run(*TARN, "--version") == (0, f"tarn {PROJECT['project']['version']}\n")
    code, location = image.run("-c", "import tarn; print(tarn.__file__)")
    assert code == 0
    assert Path(location.strip()).is_relative_to(image.python.parents[1])


def test_migrate_and_api_work_where_only_the_volumes_are_writable(image):
    assert image.run("-c", "open('file', 'w')")[0] == 1
    assert image.run(*TARN, "migrate") == (0, "")
    api = image.popen(image.python, *TARN, "api", TARN_PORT="0", TARN_HOST="127.0.0.1")
    try:
        assert api.stdout is not None
        ready = next(line for line in api.stdout if line.startswith("Tarn listens on "))
        port = int(ready.rsplit(":", 1)[1])
        assert health_check(port) == 0
    finally:
        api.terminate()
        api.communicate(timeout=60)
    assert api.returncode == 0
    assert {path.name for path in image.data.iterdir()} >= {"tarn.db", "lake", "admin.key"}


def test_worker_without_a_migrated_database_is_refused_with_a_message(image):
    code, output = image.run(*TARN, "worker", TARN_DATABASE_URL=f"sqlite:///{image.scratch}/none.db")
    assert code == 2
    assert output.startswith("tarn: ")


def test_every_command_of_the_chart_and_of_compose_exists():
    named = set(run(sys.executable, "-m", "tarn.cli", "--help").stdout.split())
    assert {"api", "worker", "migrate", "executor", "serve"} <= named
