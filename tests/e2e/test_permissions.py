"""Modes of the files that the server's processes write."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import clean_environment, running

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """Set the usual umask of shells and service managers, under which all users may read new files."""
    former = os.umask(0o022)
    yield
    os.umask(former)


def modes(folder: Path) -> dict[str, str]:
    """Return the mode of every file and folder below a folder, without those that vanish meanwhile."""
    result = {}
    for path in folder.rglob("*"):
        try:
            result[str(path.relative_to(folder))] = stat.filemode(path.lstat().st_mode)
        except FileNotFoundError:
            continue
    return result


def open_to_others(folder: Path) -> dict[str, str]:
    return {path: mode for path, mode in modes(folder).items() if mode[4:] != "------"}


def tarn(folder: Path, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tarn.cli", *arguments],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.xdist_group("spark")
def test_files_written_by_the_server_are_not_accessible_to_other_users(tmp_path: Path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    lines = b"".join(
        b'{"id": "p%d", "schema": "Person", "properties": {"name": ["P"]}}\n' % number for number in range(2000)
    )
    with running(tmp_path, TMPDIR=str(scratch)) as server:
        client = server.client()
        client.timeout = 120  # the first flush starts Spark
        client.post("/v1/datasets", json={"name": "leaks"}).raise_for_status()
        client.put("/v1/datasets/leaks/files?path=a.txt", content=b"a file").raise_for_status()
        kind = {"Content-Type": "application/x-ndjson"}
        client.post("/v1/datasets/leaks/entities", content=lines, headers=kind).raise_for_status()
        client.post("/v1/datasets/leaks/entities?commit=force", json=[JANE]).raise_for_status()
        client.post("/v1/datasets/leaks/operations/make?wait=60").raise_for_status()
        client.post("/v1/datasets/leaks/entities/query", json={}).raise_for_status()
        written = modes(tmp_path / "data")
        others = open_to_others(tmp_path / "data") | open_to_others(scratch)
        tarn(tmp_path, "backup", "kept")
    restored = tmp_path / "restored"
    restored.mkdir()
    tarn(restored, "restore", "../kept")
    tarn(restored, "migrate", TARN_DATABASE_URL="sqlite:///other/migrated.db")

    assert written.keys() >= {"tarn.db", "tarn.db-wal", "tarn.db-shm", "admin.key", "lake/leaks/entities.ftm.json"}
    assert any(path.startswith("lake/leaks/") and path.endswith(".parquet") for path in written)
    assert others == {}
    assert open_to_others(tmp_path / "kept") == {}
    assert {"data/tarn.db", "other/migrated.db"} <= modes(restored).keys()
    assert open_to_others(restored) == {}


def test_group_umask_opens_all_files_to_the_group_but_the_administrator_key(tmp_path: Path):
    with running(tmp_path, TARN_UMASK="027") as server:
        server.client().post("/v1/datasets", json={"name": "leaks"}).raise_for_status()
        written = modes(tmp_path / "data")

    assert written["tarn.db"] == written["tarn.db-wal"] == written["lake/leaks/config.yml"] == "-rw-r-----"
    assert written["lake/leaks"] == "drwxr-x---"
    assert written["admin.key"] == "-rw-------"
    assert {mode[7:] for mode in written.values()} == {"---"}


def test_files_of_an_earlier_version_that_others_may_read_are_logged(tmp_path: Path):
    with running(tmp_path) as server:
        first = server.log.read_text()
    (tmp_path / "data" / "tarn.db").chmod(0o644)
    (tmp_path / "data" / "lake").chmod(0o755)

    with running(tmp_path) as server:
        second = server.log.read_text().removeprefix(first)

    assert "other users may read" not in first
    assert "-rw-r--r--" in second
    assert "drwxr-xr-x" in second
