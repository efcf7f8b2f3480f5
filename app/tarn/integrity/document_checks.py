"""Checks of a dataset's configuration and of the mirrors in the layout (`HEAD`, refs, tags, locks, queue items).

SQL is authoritative. A mirror that is only late is not reported: `snapshots/HEAD` may be some snapshots behind, `.LOCK`
and system tags change with every flush. Reported is what would mislead a reader of the layout without SQL: a `HEAD`
that names something that is not part of history, a missing or wrong ref, and a tag, lock or queue item that is missing
or has no row in SQL.
"""

from collections.abc import Iterator
from datetime import timedelta

import orjson
from sqlalchemy import select

from tarn.coordination import layout_mirrors
from tarn.datasets.config_documents import read_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import snapshots
from tarn.errors import DocumentInvalid
from tarn.integrity.findings import Findings
from tarn.lake.recorded_history import RecordedHistory, RefRecord, recorded
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.finding import FindingKind
from tarn.model.ids import now
from tarn.model.names import RefName
from tarn.storage.store import ObjectMissing, Store

MIRROR_DELAY = timedelta(minutes=1)
"""Anything younger than this may not be mirrored yet."""


def check_config(store: Store, dataset: Dataset, findings: Findings) -> None:
    path = dataset.layout.config
    try:
        config, _ = read_document(store, path, DatasetConfig.from_yaml)
    except ObjectMissing:
        findings.add(FindingKind.CONFIG_MISSING, "the dataset's configuration is missing", path)
    except DocumentInvalid as error:
        findings.add(FindingKind.CONFIG_INVALID, error.detail, path)
    else:
        if config.id != dataset.id:
            findings.add(FindingKind.CONFIG_FOREIGN, f"it belongs to dataset {config.id} instead of {dataset.id}", path)


def check_hints(database: Database, store: Store, dataset: Dataset, state: RecordedHistory, findings: Findings) -> None:
    if not head_hint_holds(database, store, dataset, state):
        findings.add(FindingKind.HINT_WRONG, "it does not name a snapshot of the dataset", dataset.layout.snapshot_head)
    for path, detail in (*wrong_refs(database, store, dataset), *layout_mirrors.find_wrong(database, store, dataset)):
        findings.add(FindingKind.HINT_WRONG, detail, path)


def head_hint_holds(database: Database, store: Store, dataset: Dataset, state: RecordedHistory) -> bool:
    """Return whether `snapshots/HEAD` names a snapshot that is or was part of history, or may still be missing."""
    try:
        hint = orjson.loads(store.get(dataset.layout.snapshot_head))
        seq, named = int(hint["seq"]), str(hint["id"])
    except ObjectMissing:
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
    refs = _refs_by_path(database, dataset)
    wrong = dict(_wrong_mirrors(store, dataset, refs))
    if wrong:
        after = _refs_by_path(database, dataset)
        wrong = {path: detail for path, detail in wrong.items() if after.get(path) == refs.get(path)}
    return [*wrong.items()]


def _refs_by_path(database: Database, dataset: Dataset) -> dict[str, RefRecord]:
    """Return the refs by the paths of their mirrors."""
    with database.read() as connection:
        return {dataset.layout.ref(RefName(ref.name)): ref for ref in recorded(connection, dataset).refs}


def _wrong_mirrors(store: Store, dataset: Dataset, refs: dict[str, RefRecord]) -> Iterator[tuple[str, str]]:
    cutoff = now() - MIRROR_DELAY
    for path, ref in refs.items():
        if ref.updated > cutoff:
            continue
        try:
            mirror = orjson.loads(store.get(path))
            if (mirror["seq"], mirror["snapshot"]) != (ref.seq, ref.id):
                yield path, f"the ref {ref.name!r} names another snapshot"
        except ObjectMissing:
            yield path, f"the mirror of the ref {ref.name!r} is missing"
        except (ValueError, TypeError, KeyError):
            yield path, f"the mirror of the ref {ref.name!r} cannot be read"
    for entry in store.list(dataset.layout.refs):
        if entry.path not in refs and entry.modified < cutoff:
            yield entry.path, "the dataset has no such ref"
