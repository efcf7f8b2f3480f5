"""A server process, and the command run against it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from app.cli.commands import app

TARN = [sys.executable, "-m", "app.cli"]
READY = "Tarn listens on "


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings of Tarn, but with these."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("TARN_")} | variables


@dataclass(frozen=True)
class Server:
    url: str
    directory: Path

    @property
    def admin_key(self) -> str:
        return (self.directory / "data" / "admin.key").read_text().strip()


@dataclass(frozen=True)
class Tarn:
    """The command in this process, speaking to a server with a key. It must exit with the code that is expected."""

    url: str
    key: str

    def __call__(self, *args: str, code: int = 0, stdin: str | None = None) -> Result:
        environment = {"TARN_URL": self.url, "TARN_KEY": self.key}
        result = CliRunner().invoke(app, args, input=stdin, env=environment, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    def json(self, *args: str, stdin: str | None = None) -> Any:
        return json.loads(self(*args, "--json", stdin=stdin).stdout)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`tarn serve` with its defaults, on a free port."""
    directory = tmp_path_factory.mktemp("server")
    log = directory / "log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*TARN, "serve"],
            cwd=directory,
            env=clean_environment(TARN_PORT="0"),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if line.startswith(READY)), None)
            assert ready is not None, log.read_text()
            yield Server(ready.removeprefix(READY).strip(), directory)
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.fixture
def tarn(server: Server) -> Tarn:
    """The command as the administrator gives it."""
    return Tarn(server.url, server.admin_key)


@pytest.fixture
def name() -> str:
    """A name that nothing on the shared server has yet."""
    return f"n{uuid4().hex[:12]}"


@pytest.fixture
def dataset(tarn: Tarn, name: str) -> str:
    tarn("datasets", "create", name, "--title", "Donations")
    return name


@pytest.fixture
def tenant(tarn: Tarn, name: str) -> str:
    tarn("tenants", "create", name, "--title", "A tenant")
    return name
