"""The lake: the entry point of the client; list, open and create datasets."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from tarn_client.dataset import Dataset


class Lake:
    """A server, with one key.

    Temporary failures are retried for `retry_timeout` seconds. `timeout` limits
    the seconds between two parts of a response.
    """

    def __init__(
        self, url: str, key: str | None = None, *, retry_timeout: float = 120.0, timeout: float = 120.0
    ) -> None:
        """Raises InvalidRequest for an invalid URL or key. No request is sent."""
        from tarn_client.connection import Connection  # late import: httpx takes longer than everything else here

        self.connection = Connection(url, key, retry_timeout=retry_timeout, timeout=timeout)

    def __enter__(self) -> "Lake":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    def dataset(self, name: str) -> Dataset:
        """Return a dataset by its name. No request is sent: a missing dataset raises Problem when it is used."""
        return Dataset(self.connection, name)

    def datasets(self) -> Iterator[Dataset]:
        """Return the datasets that the key may read."""
        for dataset in self.connection.each("/v1/datasets"):
            yield self.dataset(dataset["name"])

    def create(self, name: str, **metadata: Any) -> Dataset:
        """Create a dataset, with a title and other metadata of FtM datasets."""
        self.connection.write("POST", "/v1/datasets", {"name": name, **metadata})
        return self.dataset(name)

    def whoami(self) -> dict[str, Any]:
        """Return the key's tenant, grants and limits."""
        return self.connection.read("/v1/whoami")
