"""Lake root: open or create `lake.json`, and check that the store supports put-if-absent, which commits rely on."""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import orjson

from tarn.errors import PathExists, StartRefused, UnsupportedStore
from tarn.model.ids import new_id, now
from tarn.storage.layout import Layout
from tarn.storage.store import ObjectMissing, Store

MAGIC = "tarn-lake"
VERSION = 1


@dataclass(frozen=True)
class Lake:
    """The content of `lake.json`: the lake's id and time of creation."""

    id: str
    created: datetime


def open_lake(store: Store) -> Lake:
    """Return the lake at the store's root, created if the root is empty; of concurrent creators one wins.

    1. read     a `lake.json` that is there must be ours, in the version we write
    2. empty    without one, any object at the root is foreign: nothing is written. Tarn writes `lake.json` first,
                so objects that another Tarn process wrote meanwhile come with one
    3. probe    the store must support put-if-absent
    4. create   put-if-absent; the loser reads the winner's

    Raises StartRefused, or UnsupportedStore from the probe.
    """
    lake = _read(store)
    if lake is None and (found := _first_object(store)):
        lake = _read(store)
        if lake is None:
            raise StartRefused(
                f"the lake's root holds {found} and no {Layout.lake}: "
                "set TARN_LAKE_URI to an empty location, or to the root of a lake that Tarn created"
            )
    probe_put_if_absent(store)
    return lake or _create(store)


def probe_put_if_absent(store: Store) -> None:
    """Write a probe key twice. Raises UnsupportedStore unless the second write is refused and changes nothing."""
    path = Layout().probe(new_id())
    try:
        store.put_new(path, b"first")
        with suppress(PathExists):
            store.put_new(path, b"second")
            raise UnsupportedStore(
                "the object store overwrites a key that it was asked only to create (If-None-Match: *), and commits "
                "rely on that: use a store that supports conditional writes"
            )
        if store.get(path) != b"first":
            raise UnsupportedStore("the object store reported that it did not overwrite a key, but overwrote it")
    finally:
        store.delete([path])


def _read(store: Store) -> Lake | None:
    try:
        text = store.get(Layout.lake)
    except ObjectMissing:
        return None
    try:
        document = orjson.loads(text)
        magic, version = document["magic"], document["version"]
    except (ValueError, TypeError, KeyError):
        raise StartRefused(
            f"{Layout.lake} at the lake's root is not a valid document with the magic {MAGIC!r}: "
            "it is damaged, or was not written by Tarn"
        ) from None
    if magic != MAGIC:
        raise StartRefused(f"{Layout.lake} at the lake's root has the magic {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        newer = type(version) is int and version > VERSION
        raise StartRefused(
            f"the lake has format version {version!r}, and this release reads and writes version {VERSION}"
            + (": run the newer version of Tarn that wrote it" if newer else "")
        )
    try:
        return Lake(id=str(document["id"]), created=datetime.fromisoformat(document["created"]))
    except (ValueError, TypeError, KeyError):
        raise StartRefused(f"{Layout.lake} at the lake's root has no valid id and time of creation") from None


def _first_object(store: Store) -> str | None:
    """Return any object at the root, except probes left by crashed processes."""
    return next((entry.path for entry in store.list("") if not entry.path.startswith(f"{Layout.probes}/")), None)


def _create(store: Store) -> Lake:
    lake = Lake(id=new_id(), created=now())
    document = {"magic": MAGIC, "version": VERSION, "id": lake.id, "created": lake.created.isoformat()}
    try:
        store.put_new(Layout.lake, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except PathExists:
        winner = _read(store)
        if winner is None:
            raise StartRefused(
                f"{Layout.lake} was created and deleted while this process started: start it again"
            ) from None
        return winner
    return lake
