"""A lake on a local disk and one on a real S3 server; a test that uses `store` runs on both."""

import os
from pathlib import Path

import pytest
from tarn.settings import Settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.s3 import S3Server


@pytest.fixture(autouse=True)
def no_ambient_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove AWS credentials of the environment in which the tests run."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def disk(tmp_path: Path) -> Connection:
    return Connection.from_settings(Settings(lake_uri=str(tmp_path / "lake")))


@pytest.fixture(params=["disk", "s3"])
def connection(request: pytest.FixtureRequest) -> Connection:
    fixture = request.getfixturevalue(request.param)
    return fixture.connection() if isinstance(fixture, S3Server) else fixture


@pytest.fixture
def store(connection: Connection) -> Store:
    return Store(connection)


@pytest.fixture(params=["disk", "strict_s3"])
def racing_store(request: pytest.FixtureRequest) -> Store:
    """Provide a store for many concurrent writers."""
    fixture = request.getfixturevalue(request.param)
    return Store(fixture.connection() if isinstance(fixture, S3Server) else fixture)
