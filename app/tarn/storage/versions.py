"""Documents that are replaced whole, their former contents kept under `versions/`."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta

from tarn.errors import PathExists, VersionNotFound
from tarn.model.dataset import Version
from tarn.model.ids import parse_stamp
from tarn.model.names import FileName
from tarn.storage.layout import Versions
from tarn.storage.store import Missing, Store


def replace(
    store: Store,
    path: str,
    versions: Versions,
    data: bytes,
    moment: datetime,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Replace a small document whole. True if anything was written; equal bytes write nothing.

    The former content is kept first, then the new one is put: a crash between the two leaves the document as it was,
    and one version more that says the same. `check` is called right before the put; what it raises ends it there.
    """
    with suppress(Missing):
        former = store.get(path)
        if former == data:
            return False
        _keep(path, versions, moment, lambda place: store.put_new(place, former))
    check()
    store.put(path, data)
    return True


def replace_with(store: Store, path: str, versions: Versions, source: str, moment: datetime) -> None:
    """Replace a document of any size by the object at `source`, which stays; the former content is kept.

    No bytes pass through memory. A crash leaves the document as it was or as it is to be.
    """
    with suppress(Missing):
        _keep(path, versions, moment, lambda place: store.copy_new(path, place))
    store.copy(source, path)


def replace_stream(store: Store, path: str, versions: Versions, chunks: Iterable[bytes], moment: datetime) -> int:
    """Replace a document of any size by what comes in chunks, and return its size; the former content is kept.

    If `chunks` raises, and in a crash, the document is as it was.
    """
    with suppress(Missing):
        _keep(path, versions, moment, lambda place: store.copy_new(path, place))
    return store.put_stream(path, chunks)


def retire(store: Store, path: str, versions: Versions, moment: datetime) -> None:
    """Take a document out of its place; its content is kept."""
    with suppress(Missing):
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
    """Every former content, newest first; of one moment, the last name first."""
    found = []
    for entry in store.list(versions.folder):
        stamp, name = entry.path.split("/")[-2:]
        found.append(Version(timestamp=stamp, name=name, size=entry.size))
    return sorted(found, key=lambda version: (version.timestamp, version.name), reverse=True)


def version_path(versions: Versions, stamp: str, name: FileName) -> str:
    """Where one former content is, if there is such a one. Raises VersionNotFound for what is no timestamp."""
    try:
        return versions.at(parse_stamp(stamp), name)
    except ValueError:
        raise VersionNotFound(f"there is no version {stamp} of {name}") from None
