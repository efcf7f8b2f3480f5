"""Fixtures of archive tests: a dataset with an archive, a scripted server, a canary, and a fetcher that resolves both
by name.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from tarn.access.bootstrap import ensure_admin
from tarn.archive.fetching.fetch import Fetcher
from tarn.db.engine import Database
from tarn.settings import Settings, load_settings
from tarn.storage.store import Store

from tests.archive.dataset_archive import DatasetArchive
from tests.archive.web import Canary, Scripted, listening, scripted

NAMES = {"files.test": ["127.0.0.1"], "canary.test": ["127.0.0.1"]}
"""Both on the loopback; only the first is opened."""

FetcherOf = Callable[..., Fetcher]


def resolve(host: str, port: int) -> Sequence[str]:
    if host not in NAMES:
        raise socket.gaierror
    return NAMES[host]


@pytest.fixture(autouse=True)
def no_ambient_identity(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture
def canary() -> Iterator[Canary]:
    """Listen on every loopback address of this machine, at one port."""
    with ExitStack() as stack:
        first = stack.enter_context(listening())
        listeners = [first]
        if socket.has_ipv6:
            with suppress(OSError):
                listeners.append(stack.enter_context(listening("::1", first.getsockname()[1])))
        canary = Canary(tuple(listeners))
        yield canary
        assert not canary.touched()


@pytest.fixture
def fetcher_of(tmp_path) -> FetcherOf:
    """Return a function that builds a fetcher with given settings, which may fetch from `files.test` but from no
    other local host.
    """

    def build(resolve: Any = resolve, clock: Any = None, **settings: Any) -> Fetcher:
        given = {
            "lake_uri": str(tmp_path / "lake"),
            "database_url": f"sqlite:///{tmp_path}/tarn.db",
            "admin_key_file": tmp_path / "admin.key",
            "fetch_private_hosts": ("files.test",),
            "fetch_timeout": 20,
        } | settings
        return Fetcher.from_settings(load_settings(**given), resolve, **({"clock": clock} if clock else {}))

    return build


@pytest.fixture
def fetcher(fetcher_of: FetcherOf) -> Fetcher:
    return fetcher_of()


@pytest.fixture
def dataset_archive(settings: Settings, database: Database, store: Store) -> DatasetArchive:
    ensure_admin(database, settings)
    return DatasetArchive.make(settings, database, store)
