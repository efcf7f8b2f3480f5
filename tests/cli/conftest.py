"""Fixtures of CLI tests: the command `tarn`, run against a server process."""

import json
import sys
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from tarn.cli.application import app
from typer.testing import CliRunner, Result

from tests.server import Server

TARN = [sys.executable, "-m", "tarn.cli"]


@dataclass(frozen=True)
class Tarn:
    """The command, run in this process with a server's URL and a key. It must exit with the expected code."""

    url: str
    key: str

    def __call__(self, *args: str, code: int = 0, stdin: str | None = None) -> Result:
        environment = {"TARN_URL": self.url, "TARN_KEY": self.key}
        result = CliRunner().invoke(app, args, input=stdin, env=environment, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result

    def json(self, *args: str, stdin: str | None = None) -> Any:
        return json.loads(self(*args, "--json", stdin=stdin).stdout)


@pytest.fixture
def tarn(server: Server) -> Tarn:
    """Return the command with the administrator's key."""
    return Tarn(server.url, server.admin_key)


@pytest.fixture
def name() -> str:
    """Return a name that is unused on the shared server."""
    return f"n{uuid4().hex[:12]}"


@pytest.fixture
def dataset(tarn: Tarn, name: str) -> str:
    tarn("datasets", "create", name, "--title", "Donations")
    return name


@pytest.fixture
def tenant(tarn: Tarn, name: str) -> str:
    tarn("tenants", "create", name, "--title", "A tenant")
    return name
