"""Fetching from the object stores that the operator allowed, each with its own options and credentials."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tarn.archive.fetching.sources import ListedFile, ListingFailure, PathFilter, Source, refused
from tarn.errors import FileNotFound, StartRefused
from tarn.storage.connection import Connection
from tarn.storage.s3_options import s3_options
from tarn.storage.store import ObjectMissing, Store

SCHEMES = frozenset({"s3", "gs", "az"})


def source_connection(uri: str, options: Mapping[str, str]) -> Connection:
    """Return the connection to a store. Raises StartRefused for an invalid option."""
    try:
        connection = Connection(uri, s3_options(options) if uri.startswith("s3:") else dict(options))
        connection.object_store()
    except StartRefused as error:
        reason = str(error).removeprefix("TARN_STORAGE_OPTIONS: ")
        raise StartRefused(f"TARN_FETCH_STORES: {uri}: {reason}") from None
    return connection


@dataclass(frozen=True)
class SourceStores:
    """The object stores that may be fetched from. Safe to share between threads and to pickle to other processes."""

    connections: tuple[Connection, ...]
    limit: int

    def __getstate__(self) -> dict[str, Any]:
        return {"connections": self.connections, "limit": self.limit}

    @cached_property
    def _stores(self) -> dict[str, Store]:
        """Return the stores by address, the longest first."""
        longest_first = sorted(self.connections, key=lambda connection: len(connection.uri), reverse=True)
        return {connection.uri: Store(connection) for connection in longest_first}

    def open(self, uri: str) -> Source:
        """Open a file. Raises SchemaViolation, FileNotFound, BodyTooLarge, Unavailable."""
        store, key = self.place(uri)
        if not key:
            raise refused("it is a folder")
        try:
            entry, chunks = store.open(key)
        except ObjectMissing:
            raise FileNotFound("there is no such file") from None
        return Source(uri, chunks, self.limit, name=key.rsplit("/", 1)[-1], size=entry.size)

    def files(self, uri: str, path_filter: PathFilter) -> Iterator[ListedFile | ListingFailure]:
        """Yield the files below a folder, ordered by path. Raises SchemaViolation, Unavailable."""
        top = uri.rstrip("/")
        store, folder = self.place(top)
        return self._below(store, top, folder, path_filter)

    def _below(
        self, store: Store, top: str, folder: str, path_filter: PathFilter
    ) -> Iterator[ListedFile | ListingFailure]:
        for entry in store.list(folder):
            path = entry.path[len(folder) :].lstrip("/")
            if path_filter.takes(path):
                yield ListedFile(f"{top}/{path}", path, entry.size)

    def place(self, uri: str) -> tuple[Store, str]:
        """Return the store of an address, and the key in it, which is empty for its root. Raises SchemaViolation."""
        for top, store in self._stores.items():
            key = uri.removeprefix(top)
            if key == "" or (key != uri and key.startswith("/")):
                key = key[1:]
                if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
                    raise refused("the key has an empty segment, . or .. in it")
                return store, key
        raise refused("object stores are fetched from only where the operator opened them")
