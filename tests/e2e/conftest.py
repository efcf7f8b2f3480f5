"""One server for the tests of this folder that only talk to it."""

from collections.abc import Iterator

import pytest

from tests.server import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server
