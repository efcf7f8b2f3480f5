"""Repair a dataset: restore what one part of it has lost from the other parts.

| lost or wrong                        | restored from                                                      |
|--------------------------------------|--------------------------------------------------------------------|
| a record, or the recorded head       | the manifests, where parent and child agree on them                |
| a manifest                           | its record, its neighbours and the Delta log (`rebuild_manifest`)   |
| a record of expiry                   | the manifest: one that is there and was never expired is kept      |
| a snapshot that waits to be recorded | its manifest, as the next publisher would do it                    |
| counts of the journal's head         | its batches                                                        |
| the configuration                    | the newest former one of the same dataset                          |
| mirrors of what SQL decides          | SQL                                                                |
| the index of the archive             | its record files; a lost record file is written from the index     |
| bytes that are counted for texts     | the texts in the archive                                           |

Nothing else is repaired: rows, data files and Delta logs are never invented. Overwritten documents are kept below
`versions/`.
"""

from collections.abc import Callable, Set

import orjson
import structlog
from sqlalchemy import insert, select, update

from tarn.coordination import layout_mirrors
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal_head, snapshot_heads, snapshots
from tarn.db.upsert import upsert
from tarn.integrity import archive_checks, document_checks, journal_checks, row_checks
from tarn.integrity.findings import Findings
from tarn.integrity.history_checks import History
from tarn.integrity.rebuild_manifest import CannotRebuild, LostManifest, rebuild
from tarn.integrity.row_checks import SnapshotRows
from tarn.lake import refs
from tarn.lake.commit import SnapshotPublisher
from tarn.lake.leases import Lease, Leases
from tarn.lake.recorded_history import RecordedHistory, SnapshotRecord, is_kept, recorded
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
from tarn.model.names import RefName
from tarn.model.work.job import Report
from tarn.settings import Settings
from tarn.storage import versions
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

CONFIG = {FindingKind.CONFIG_MISSING, FindingKind.CONFIG_INVALID, FindingKind.CONFIG_FOREIGN}
RECORDS = {FindingKind.RECORD_MISSING, FindingKind.RECORD_WRONG, FindingKind.HEAD_WRONG, FindingKind.EXPIRY_WRONG}
FILES = {FindingKind.FILE_UNRECORDED, FindingKind.FILE_RECORD_MISSING, FindingKind.TEXT_MISCOUNTED}
MANIFESTS = {FindingKind.MANIFEST_MISSING, FindingKind.MANIFEST_INVALID, FindingKind.MANIFEST_FOREIGN}


def repair(
    database: Database,
    store: Store,
    settings: Settings,
    owner: str,
    dataset: Dataset,
    kinds: Set[FindingKind],
    report: Report,
) -> None:
    """Repair findings of these kinds where possible. Every step checks again before it writes.

    Raises Locked while another owner holds the dataset's lease, and LockLost if another owner took it meanwhile.
    """
    if kinds & CONFIG and registry.restore_configuration(database, store, dataset):
        log.warning("restored the configuration of a dataset", dataset=dataset.name)
    if kinds & (RECORDS | MANIFESTS):
        leases = Leases(database, store, owner, settings.lease_seconds)
        lease = leases.take(dataset)
        try:
            _HistoryRepair(database, store, settings, lease, lambda: leases.renew(lease), report).run()
        finally:
            leases.release(lease)
    if FindingKind.SNAPSHOT_UNRECORDED in kinds:
        SnapshotPublisher(database, store, settings, owner).recover(dataset)
    if FindingKind.JOURNAL_MISCOUNTED in kinds:
        recount(database, dataset)
    if kinds & FILES:
        archive_checks.repair(database, store, dataset, report)
    if FindingKind.HINT_WRONG in kinds:
        _rewrite_mirrors(database, store, dataset)


class _HistoryRepair:
    """Repairs the history of a dataset, under its lease."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        lease: Lease,
        renew: Callable[[], None],
        report: Report,
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._dataset = lease.dataset
        self._renew = renew
        self._report = report

    def run(self) -> None:
        self._repair_records()
        self._repair_head()
        self._repair_expiry()
        self._repair_manifests()

    def _read_history(self) -> tuple[RecordedHistory, History]:
        self._report(None)
        self._renew()
        with self._database.read() as connection:
            state = recorded(connection, self._dataset)
        return state, History(self._database, self._store, self._dataset, state, Findings())

    # SQL

    def _repair_records(self) -> None:
        """Write records from manifests, where their parent and child confirm them."""
        state, history = self._read_history()
        first, last = history.bounds()
        before = state.id_of(first - 1)
        for seq in range(first, last + 1):
            manifest, record = history.readable_manifest(seq), state.records.get(seq)
            if manifest is not None and record != _record(manifest):
                is_its = record is not None and record.id == manifest.id
                if is_its or (history.expected_id(seq) == manifest.id and manifest.parent == before):
                    self._record(manifest)
                    before = manifest.id
                    continue
            before = None if record is None else record.id

    def _record(self, manifest: Snapshot) -> None:
        values = _record(manifest)._asdict()
        key = {"dataset_id": self._dataset.id, "seq": values.pop("seq")}
        with self._database.write() as connection:
            connection.execute(
                upsert(connection, snapshots)
                .values(**key, **values)
                .on_conflict_do_update(index_elements=["dataset_id", "seq"], set_=values)
            )
        log.warning("restored the record of a snapshot", dataset=self._dataset.name, seq=manifest.seq)

    def _repair_head(self) -> None:
        """Make the newest recorded snapshot the head, if its manifest exists."""
        state, history = self._read_history()
        head, newest = state.head, max(state.kept, default=None)
        if newest is None or (head is not None and head.seq > newest):
            return
        manifest = history.readable_manifest(newest)
        if manifest is None or state.kept[newest] != _record(manifest):
            return
        values = {"seq": newest, "snapshot": manifest.id, "content": manifest.content, "segment": manifest.segment}
        with self._database.write() as connection:
            if head is None:
                connection.execute(insert(snapshot_heads).values(dataset_id=self._dataset.id, **values))
            else:
                own = (snapshot_heads.c.dataset_id == self._dataset.id, snapshot_heads.c.seq == head.seq)
                connection.execute(update(snapshot_heads).where(*own).values(**values))

    def _repair_expiry(self) -> None:
        """Mark snapshots as kept whose manifests exist and which no snapshot expired."""
        state, history = self._read_history()
        head = None if state.head is None else history.readable_manifest(state.head.seq)
        if head is None:
            return
        wrong = [seq for seq in state.misplaced if history.readable_manifest(seq) is not None]
        if state.expired_range is not None:
            since = max(head.retained_from or state.expired_range.first, state.expired_range.first)
            wrong += [
                seq for seq in range(since, state.expired_range.last + 1) if history.readable_manifest(seq) is not None
            ]
        if not wrong:
            return
        with self._database.write() as connection:
            connection.execute(
                update(snapshots)
                .where(snapshots.c.dataset_id == self._dataset.id, snapshots.c.seq.in_(wrong))
                .values(expired=None)
            )

    # Manifests

    def _repair_manifests(self) -> None:
        """Rebuild lost manifests, the oldest first, so that the parent of each is available."""
        state, history = self._read_history()
        first, last = history.bounds()
        with row_checks.opened(self._store, self._settings) as duck:
            rows = SnapshotRows(duck, self._store, self._dataset)
            parent: Snapshot | None = None
            for seq in range(first, last + 1):
                manifest, record = history.readable_manifest(seq), state.kept.get(seq)
                if manifest is not None and (record is None or manifest.id in (record.id, history.expected_id(seq))):
                    parent = manifest
                    continue
                is_first = seq == first and state.expired_range is None
                if record is None or (parent is None and not is_first):
                    parent = None
                    continue
                after = history.readable_manifest(seq + 1)
                child = after if after is not None and after.parent == record.id else None
                parent = self._rebuild(rows, LostManifest(record, parent, child))

    def _rebuild(self, rows: SnapshotRows, lost: LostManifest) -> Snapshot | None:
        path = self._dataset.layout.snapshot(lost.record.seq)
        try:
            manifest = rebuild(self._store, rows, self._dataset, lost)
        except CannotRebuild as why:
            log.warning(
                "cannot rebuild a lost manifest", dataset=self._dataset.name, seq=lost.record.seq, reason=str(why)
            )
            return None
        self._report(None)
        self._renew()
        if not is_kept(self._database, self._dataset, lost.record.seq):
            return None
        if self._store.head(path) is None:
            self._store.put_new(path, manifest.to_json())
        else:
            versions.replace(self._store, path, self._dataset.layout.versions, manifest.to_json(), now(), self._renew)
        log.warning(
            "rebuilt a lost manifest", dataset=self._dataset.name, seq=lost.record.seq, unknown=manifest.rebuilt
        )
        return manifest


def _record(manifest: Snapshot) -> SnapshotRecord:
    return SnapshotRecord(manifest.seq, manifest.id, manifest.content, manifest.segment, manifest.created)


def recount(database: Database, dataset: Dataset) -> None:
    """Recompute the counts of unflushed rows in the journal's head, while its row is locked."""
    own = journal_head.c.dataset_id == dataset.id
    with database.write() as connection:
        connection.execute(select(journal_head.c.dataset_id).where(own).with_for_update())
        rows, size, oldest = journal_checks.waiting(connection, dataset)
        connection.execute(update(journal_head).where(own).values(rows=rows, size=size, oldest=oldest))


def _rewrite_mirrors(database: Database, store: Store, dataset: Dataset) -> None:
    """Rewrite the mirrors of head, refs, tags, locks and queue items from SQL."""
    with database.read() as connection:
        state = recorded(connection, dataset)
    if state.head is not None and state.head.id is not None:
        hint = {"seq": state.head.seq, "id": state.head.id}
        store.put_hint(dataset.layout.snapshot_head, orjson.dumps(hint))
    for path, _ in document_checks.wrong_refs(database, store, dataset):
        name = path.removeprefix(f"{dataset.layout.refs}/").removesuffix(".json")
        if any(ref.name == name for ref in state.refs):
            with database.read() as connection:
                ref = refs.get(connection, dataset, RefName(name))
            refs.mirror(store, dataset, ref.name, ref)
        else:
            store.delete([path])
    layout_mirrors.repair(database, store, dataset)
