"""One scenario through each generated client against a running server: type-checked, and with the same responses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copy
from uuid import uuid4

import pytest

from clients import generate
from clients.document import HERE
from tests.server import Server

pytestmark = pytest.mark.xdist_group("spark")

SCENARIO = {
    "written": [2, 4],
    "flushed": "done",
    "caption": "jane Doe",
    "missing": [404, "entity-not-found"],
    "streamed": 2,
    "made": "done",
    "exported": 2,
}


def run(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def arguments(server: Server) -> tuple[str, str, str]:
    return server.url, server.admin_key, f"g{uuid4().hex[:12]}"


@pytest.mark.long
def test_python_client_type_checks_and_completes_the_scenario(server: Server, tmp_path: Path):
    generate.python(tmp_path)
    copy(HERE / "scenario.py", tmp_path)

    run(tmp_path, sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "scenario.py")
    result = json.loads(run(tmp_path, sys.executable, "scenario.py", *arguments(server)))

    assert result == SCENARIO


def test_typescript_client_type_checks_and_completes_the_scenario(server: Server, tmp_path: Path):
    if not generate.TOOLS.exists():
        pytest.skip("openapi-typescript is not in .tools: `make tools` puts it there where npm is installed")
    generate.typescript(tmp_path)
    copy(generate.TYPESCRIPT / "scenario.ts", tmp_path)
    (tmp_path / "node_modules").symlink_to(generate.TOOLS / "node_modules")

    run(tmp_path, tmp_path / "node_modules" / ".bin" / "tsc", "--project", ".")
    result = json.loads(run(tmp_path, "node", "dist/scenario.js", *arguments(server)))

    assert result == SCENARIO
