"""Checks of a dataset's configuration and of the mirrors in the layout (hints, refs, tags, locks, queue items).

Mirrors are hints, and SQL is authoritative. A mirror that is only late is not reported: `snapshots/HEAD` may be some
snapshots behind, `.LOCK` and Tarn's own tags change with every flush. Reported is what would mislead a reader of the
layout without SQL: a hint at something that is not part of history, a missing or wrong ref, and a tag, lock or queue
item that is missing or has no row in SQL.
"""

from collections.abc import Iterator
from datetime import timedelta

import orjson
from sqlalchemy import select

from tarn.coordination import layout_mirrors
from tarn.datasets.documents import read_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import snapshots
from tarn.errors import DocumentInvalid
from tarn.integrity.findings import Findings
from tarn.lake.recorded_history import Pin, RecordedHistory, recorded
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.finding import FindingKind
from tarn.model.ids import now
from tarn.model.names import RefName
from tarn.storage.store import Missing, Store

MIRROR_DELAY = timedelta(minutes=1)
"""Anything younger than this may not be mirrored yet."""


def check_config(store: Store, dataset: Dataset, found: Findings) -> None:
    path = dataset.layout.config
    try:
        config, _ = read_document(store, path, DatasetConfig.from_yaml)
    except Missing:
        found.add(FindingKind.CONFIG_MISSING, "the dataset's configuration is missing", path)
    except DocumentInvalid as error:
        found.add(FindingKind.CONFIG_INVALID, error.detail, path)
    else:
        if config.id != dataset.id:
            found.add(FindingKind.CONFIG_FOREIGN, f"it belongs to dataset {config.id} instead of {dataset.id}", path)


def check_hints(database: Database, store: Store, dataset: Dataset, state: RecordedHistory, found: Findings) -> None:
    if not head_hint_holds(database, store, dataset, state):
        found.add(FindingKind.HINT_WRONG, "it does not name a snapshot of the dataset", dataset.layout.snapshot_head)
    for path, detail in (*wrong_refs(database, store, dataset), *layout_mirrors.find_wrong(database, store, dataset)):
        found.add(FindingKind.HINT_WRONG, detail, path)


def head_hint_holds(database: Database, store: Store, dataset: Dataset, state: RecordedHistory) -> bool:
    """Return whether `snapshots/HEAD` names a snapshot that is or was part of history, or may still be missing."""
    try:
        hint = orjson.loads(store.get(dataset.layout.snapshot_head))
        seq, named = int(hint["seq"]), str(hint["id"])
    except Missing:
        return len(state.kept) < 2
    except (ValueError, TypeError, KeyError):
        return False
    with database.read() as connection:
        known = select(snapshots.c.seq).where(
            snapshots.c.dataset_id == dataset.id, snapshots.c.seq == seq, snapshots.c.id == named
        )
        return connection.execute(known).first() is not None


def wrong_refs(database: Database, store: Store, dataset: Dataset) -> list[tuple[str, str]]:
    """Return the wrong mirrors of refs: their paths and what is wrong. Refs that change meanwhile are left out."""
    pins = _pins(database, dataset)
    wrong = dict(_wrong_mirrors(store, dataset, pins))
    if wrong:
        after = _pins(database, dataset)
        wrong = {path: detail for path, detail in wrong.items() if after.get(path) == pins.get(path)}
    return [*wrong.items()]


def _pins(database: Database, dataset: Dataset) -> dict[str, Pin]:
    """Return the refs by the paths of their mirrors."""
    with database.read() as connection:
        return {dataset.layout.ref(RefName(pin.name)): pin for pin in recorded(connection, dataset).pins}


def _wrong_mirrors(store: Store, dataset: Dataset, pins: dict[str, Pin]) -> Iterator[tuple[str, str]]:
    settled = now() - MIRROR_DELAY
    for path, pin in pins.items():
        if pin.updated > settled:
            continue
        try:
            mirror = orjson.loads(store.get(path))
            if (mirror["seq"], mirror["snapshot"]) != (pin.seq, pin.id):
                yield path, f"the ref {pin.name!r} names another snapshot"
        except Missing:
            yield path, f"the mirror of the ref {pin.name!r} is missing"
        except (ValueError, TypeError, KeyError):
            yield path, f"the mirror of the ref {pin.name!r} cannot be read"
    for entry in store.list(dataset.layout.refs):
        if entry.path not in pins and entry.modified < settled:
            yield entry.path, "the dataset has no such ref"
