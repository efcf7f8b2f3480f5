"""The Python package against a server process."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from tarn_client import Dataset, Lake

from tests.server import Server


@pytest.fixture
def lake(server: Server) -> Iterator[Lake]:
    with Lake(server.url, server.admin_key) as lake:
        yield lake


@pytest.fixture
def dataset(lake: Lake) -> Dataset:
    return lake.create(f"c{uuid4().hex[:12]}", title="From a notebook")


def person(number: int) -> dict[str, Any]:
    return {"id": f"p{number:05}", "schema": "Person", "properties": {"name": [f"Person {number}"]}}
