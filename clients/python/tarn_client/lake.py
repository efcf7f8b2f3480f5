"""A lake: where datasets are found and made."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tarn_client.connection import Connection
from tarn_client.dataset import Dataset
from tarn_client.pages import pages

PATIENCE, TIMEOUT = 120.0, 120.0


class Lake:
    """A server, as the holder of one key sees it.

    What fails for a while is tried again for `patience` seconds. `timeout` is how long the server may be silent.
    """

    def __init__(
        self, url: str, key: str | None = None, *, patience: float = PATIENCE, timeout: float = TIMEOUT
    ) -> None:
        self.connection = Connection(url, key, patience, timeout)

    def __enter__(self) -> "Lake":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    def dataset(self, name: str) -> Dataset:
        """A dataset by its name. Nothing is asked: whether there is one shows when it is used."""
        return Dataset(self.connection, name)

    def datasets(self) -> Iterator[Dataset]:
        """The datasets that the key may read."""
        for page in pages(self.connection, "/v1/datasets"):
            yield from (self.dataset(found["name"]) for found in page["results"])

    def create(self, name: str, **metadata: Any) -> Dataset:
        """Make a dataset, with a title and whatever else FtM's datasets have."""
        self.connection.write("POST", "/v1/datasets", body={"name": name, **metadata})
        return self.dataset(name)

    def whoami(self) -> dict[str, Any]:
        """The tenant, key, grants and limits that the key stands for."""
        found: dict[str, Any] = self.connection.read("/v1/whoami")
        return found
