"""Fixtures of the tests of the Python client, which run against a server process."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from tarn_client import Dataset, Lake

from tests.server import Server


@pytest.fixture
def lake(server: Server) -> Iterator[Lake]:
    """Provide a client with the administrator's key."""
    with Lake(server.url, server.admin_key) as lake:
        yield lake


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    """Create a dataset with a unique name."""
    return lake.create(f"c{uuid4().hex[:12]}", title="Test")


def person(number: int) -> dict[str, Any]:
    return {"id": f"p{number:05}", "schema": "Person", "properties": {"name": [f"Person {number}"]}}
