"""Versioned documents: replace a document and keep its former contents under `versions/`."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta

from tarn.errors import PathExists, VersionNotFound
from tarn.model.datasets.dataset import Version
from tarn.model.ids import parse_stamp
from tarn.model.names import FileName
from tarn.storage.layout import Versions
from tarn.storage.store import ObjectMissing, Store


def replace(
    store: Store,
    path: str,
    versions: Versions,
    data: bytes,
    moment: datetime,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Replace a small document. Return whether anything was written: equal bytes are not written again.

    The former content is kept first, then the new one is put: a crash between the two leaves the document unchanged,
    with one more version of equal content. `check` is called right before the put, which an exception prevents.
    """
    with suppress(ObjectMissing):
        former = store.get(path)
        if former == data:
            return False
        _keep(path, versions, moment, lambda place: store.put_new(place, former))
    check()
    store.put(path, data)
    return True


def replace_with(store: Store, path: str, versions: Versions, source: str, moment: datetime) -> None:
    """Replace a document of any size by the object at `source`, which stays; the former content is kept.

    No bytes pass through memory. A crash leaves either the former or the new document.
    """
    with suppress(ObjectMissing):
        _keep(path, versions, moment, lambda place: store.copy_new(path, place))
    store.copy(source, path)


def replace_stream(store: Store, path: str, versions: Versions, chunks: Iterable[bytes], moment: datetime) -> int:
    """Replace a document of any size by a stream of chunks, and return its size; the former content is kept.

    If `chunks` raises or the process crashes, the document is unchanged.
    """
    with suppress(ObjectMissing):
        _keep(path, versions, moment, lambda place: store.copy_new(path, place))
    return store.put_stream(path, chunks)


def retire(store: Store, path: str, versions: Versions, moment: datetime) -> None:
    """Delete a document; its content is kept as a version."""
    with suppress(ObjectMissing):
        _keep(path, versions, moment, lambda place: store.copy_new(path, place))
    store.delete([path])


def _keep(path: str, versions: Versions, moment: datetime, write: Callable[[str], None]) -> None:
    """Write a version at the first free microsecond from `moment` on."""
    filename = FileName(path.rsplit("/", 1)[-1])
    while True:
        try:
            return write(versions.at(moment, filename))
        except PathExists:
            moment += timedelta(microseconds=1)


def list_versions(store: Store, versions: Versions) -> list[Version]:
    """Return every former content, newest first; at equal times, by name descending."""
    found = []
    for entry in store.list(versions.folder):
        stamp, name = entry.path.split("/")[-2:]
        found.append(Version(timestamp=stamp, name=name, size=entry.size))
    return sorted(found, key=lambda version: (version.timestamp, version.name), reverse=True)


def version_path(versions: Versions, stamp: str, name: FileName) -> str:
    """Return the path of a former content, which may not exist. Raises VersionNotFound for an invalid timestamp."""
    try:
        return versions.at(parse_stamp(stamp), name)
    except ValueError:
        raise VersionNotFound(f"there is no version {stamp} of {name}") from None
