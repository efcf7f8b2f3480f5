"""Documents and mirrors, looked over.

Mirrors are hints, and SQL is right. One that is only late is not worth a word: `snapshots/HEAD` may be some snapshots
behind, `.LOCK` and the core's tags come and go with every flush. What is told is what would lead somebody astray who
reads the layout without SQL: a hint at something that is no part of history, a ref that is missing, or is not what it
should be, a tag, lock or queue item that is missing, or is none.
"""

from collections.abc import Iterator
from datetime import timedelta

import orjson
from sqlalchemy import select

from tarn.coordination import layout_mirrors as mirrors
from tarn.datasets.documents import read_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import snapshots
from tarn.errors import DocumentInvalid
from tarn.integrity.findings import Findings
from tarn.lake.recorded_history import Pin, RecordedHistory, recorded
from tarn.model.dataset import DatasetConfig
from tarn.model.finding import FindingKind
from tarn.model.ids import now
from tarn.model.names import RefName
from tarn.storage.store import Missing, Store

ON_ITS_WAY = timedelta(minutes=1)
"""What is younger than this may still be mirrored."""


def check_config(store: Store, dataset: Dataset, found: Findings) -> None:
    path = dataset.layout.config
    try:
        config, _ = read_document(store, path, DatasetConfig.from_yaml)
    except Missing:
        found.add(FindingKind.CONFIG_MISSING, "the dataset's configuration is not there", path)
    except DocumentInvalid as error:
        found.add(FindingKind.CONFIG_INVALID, error.detail, path)
    else:
        if config.id != dataset.id:
            found.add(FindingKind.CONFIG_FOREIGN, f"it is of {config.id}, and not of {dataset.id}", path)


def check_hints(database: Database, store: Store, dataset: Dataset, state: RecordedHistory, found: Findings) -> None:
    if not head_hint_holds(database, store, dataset, state):
        found.add(FindingKind.HINT_WRONG, "it names no snapshot of the dataset", dataset.layout.snapshot_head)
    for path, detail in (*wrong_refs(database, store, dataset), *mirrors.find_wrong(database, store, dataset)):
        found.add(FindingKind.HINT_WRONG, detail, path)


def head_hint_holds(database: Database, store: Store, dataset: Dataset, state: RecordedHistory) -> bool:
    """Whether `snapshots/HEAD` names a snapshot that is or was part of history. After the first it may be missing."""
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
    """Mirrors of refs that are not what they should be: their paths, and why. Refs that change meanwhile are not."""
    pins = _pins(database, dataset)
    wrong = dict(_unlike(store, dataset, pins))
    if wrong:
        after = _pins(database, dataset)
        wrong = {path: detail for path, detail in wrong.items() if after.get(path) == pins.get(path)}
    return [*wrong.items()]


def _pins(database: Database, dataset: Dataset) -> dict[str, Pin]:
    """Refs by the paths of their mirrors."""
    with database.read() as connection:
        return {dataset.layout.ref(RefName(pin.name)): pin for pin in recorded(connection, dataset).pins}


def _unlike(store: Store, dataset: Dataset, pins: dict[str, Pin]) -> Iterator[tuple[str, str]]:
    settled = now() - ON_ITS_WAY
    for path, pin in pins.items():
        if pin.updated > settled:
            continue
        try:
            mirror = orjson.loads(store.get(path))
            if (mirror["seq"], mirror["snapshot"]) != (pin.seq, pin.id):
                yield path, f"the ref {pin.name!r} is for another snapshot"
        except Missing:
            yield path, f"the ref {pin.name!r} is not shown"
        except (ValueError, TypeError, KeyError):
            yield path, f"the ref {pin.name!r} cannot be read"
    for entry in store.list(dataset.layout.refs):
        if entry.path not in pins and entry.modified < settled:
            yield entry.path, "there is no such ref"
