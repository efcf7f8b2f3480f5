"""Reconcile a database and a lake that were restored to different moments.

Restoring a database and a bucket separately gives two states that never existed together. For each dataset the rules
of the commit decide what holds (`app/tarn/recovery/reconcile_history.py`); files, exports and uploads follow what the
lake has (`app/tarn/recovery/reconcile_files.py`). For datasets themselves:

| found                                             | done                                                            |
|---------------------------------------------------|-----------------------------------------------------------------|
| in the lake, and unknown to the database          | recorded, with the history that it has                          |
| in the lake, and deleted in the database          | its files are deleted                                           |
| in the database, without a configuration          | the newest former one; or else that of a new dataset            |
| in both under one name, with different ids        | the later one stays: the lake's, if the database does not know  |
|                                                   | its id; the database's, if it knows the lake's to be deleted    |

No other process may run meanwhile: it is refused while workers or API processes send heartbeats.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta

import structlog
from sqlalchemy import Connection, insert, select, update

from tarn.access.revision import bump
from tarn.datasets import registry
from tarn.datasets.config_documents import read_document
from tarn.datasets.registry import ACTIVE, DELETE_BATCH, DELETED, Dataset
from tarn.db import outbox
from tarn.db.engine import Database
from tarn.db.tables import datasets as dataset_table
from tarn.db.tables import journal_head, readers, snapshot_heads, workers
from tarn.db.tables import snapshots as history
from tarn.errors import DocumentInvalid, StartRefused
from tarn.integrity.verify import verify
from tarn.journal import reconcile
from tarn.journal.dataset_removal import remove_journal
from tarn.lake import leases
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.recovery import LostSnapshot, Reconciled, Reconciliation
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
from tarn.model.names import DatasetName
from tarn.model.work.job import VerifyOptions
from tarn.recovery import reconcile_files
from tarn.recovery.completeness import StoredSnapshots
from tarn.recovery.reconcile_history import OWNER, HistoryReconciler
from tarn.settings import Settings
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)


def require_no_heartbeats(database: Database, settings: Settings) -> None:
    """Raise StartRefused while a worker or an API process sends heartbeats."""
    moment = now()
    with database.read() as connection:
        for table, process, after in (
            (workers, "worker", settings.worker_silent_after),
            (readers, "reading process", settings.reader_silent_after),
        ):
            alive = select(table).where(table.c.seen > moment - timedelta(seconds=after)).order_by(table.c.seen.desc())
            if (row := connection.execute(alive.limit(1)).first()) is not None:
                seconds = max(0, round((moment - row.seen).total_seconds()))
                raise StartRefused(
                    f"a {process}, {row.pid} on {row.host}, sent a heartbeat {seconds} s ago: stop it, and if it is "
                    f"stopped already, wait until {after:.0f} s have passed since its last heartbeat"
                )


class Reconcile:
    """Reconciles all datasets of a lake, one after the other."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._reached = reached
        self._histories = HistoryReconciler(database, store, settings, reached)

    def run(self, apply: bool) -> Reconciliation:
        """Find the differences between database and lake, and with `apply` resolve them. Safe to repeat after a crash.

        Reported are the datasets that differ. Without `apply` nothing is changed. Raises what database and store raise.
        """
        if apply:
            with self._database.write() as connection:
                leases.release_all(connection)
        reports = list(self._unknown_datasets(apply))
        replaced = {one.dataset for one in reports if not apply}
        with self._database.read() as connection:
            known = registry.page(connection, lambda _: True, None, None)
        # In a dry run these names are skipped: their folders will belong to another dataset.
        reports += [self._one(dataset, apply) for dataset in known if dataset.name not in replaced]
        if apply:
            with self._database.write() as connection:
                bump(connection)
        return Reconciliation(applied=apply, datasets=[one for one in reports if one.is_changed or one.findings])

    def _one(self, dataset: Dataset, apply: bool) -> Reconciled:
        plan = self._histories.plan(dataset)
        lost_config = self._has_no_config(dataset)
        reconcile_files.plan(self._database, self._store, dataset, plan.report)
        plan.report.lost.configuration = lost_config
        if not apply:
            return plan.report
        if lost_config:
            registry.reset_configuration(self._database, self._store, dataset)
        elif self._config(dataset.name) != dataset.id:
            registry.restore_configuration(self._database, self._store, dataset)
        report = self._histories.apply(plan)
        reconcile_files.apply(self._database, self._store, dataset, report)
        self._reached("files reconciled")
        verified = verify(
            self._database, self._store, self._settings, OWNER, dataset, VerifyOptions(repair=True), lambda _: None
        )
        report.findings = [one for one in verified.findings if not one.repaired and not one.kind.about_data]
        self._reached(f"{dataset.name} reconciled")
        return report

    def _has_no_config(self, dataset: Dataset) -> bool:
        """Return whether neither the configuration nor a former version of it exists for this very dataset."""
        if self._config(dataset.name) == dataset.id:
            return False
        return not registry.has_former_configuration(self._store, dataset)

    # Datasets that the database does not have

    def _unknown_datasets(self, apply: bool) -> Iterator[Reconciled]:
        for folder in self._store.folders(""):
            try:
                name = DatasetName(folder)
            except ValueError:
                continue  # a folder of the lake itself
            id = self._config(name)
            if id is None:
                continue
            with self._database.read() as connection:
                state = connection.execute(select(dataset_table.c.state).where(dataset_table.c.id == id)).scalar()
                other = registry.find(connection, name)
            if state == DELETED:
                yield self._delete_again(Dataset(id, name), apply)
            elif state is None:
                yield self._record_dataset(Dataset(id, name), other, apply)

    def _config(self, name: DatasetName) -> str | None:
        """Return the id in the configuration in a folder, or None."""
        try:
            config, _ = read_document(self._store, DatasetLayout(name).config, DatasetConfig.from_yaml)
        except (ObjectMissing, DocumentInvalid):
            return None
        return config.id

    def _delete_again(self, dataset: Dataset, apply: bool) -> Reconciled:
        """Delete the files of a dataset that the database knows to be deleted."""
        if apply:
            listing = [entry.path for entry in self._store.list(dataset.layout.root)]
            # The configuration goes last: until then a repeated run after a crash finds the rest.
            listing.sort(key=lambda path: path == dataset.layout.config)
            for start in range(0, len(listing), DELETE_BATCH):
                self._store.delete(listing[start : start + DELETE_BATCH])
        return Reconciled(dataset=dataset.name, id=dataset.id, found="deleted", head_before=None, head=None)

    def _record_dataset(self, dataset: Dataset, other: Dataset | None, apply: bool) -> Reconciled:
        """Record a dataset that was created after the database was saved, and delete a former one of its name."""
        stored = StoredSnapshots(self._store, dataset)
        chain, incomplete = _newest_chain(stored)
        head = chain[-1] if chain else None
        removed = [seq for seq in stored.numbers if seq > (head.seq if head else 0)]
        report = Reconciled(
            dataset=dataset.name,
            id=dataset.id,
            found="only in the lake",
            head_before=None,
            head=None if head is None else head.seq,
            recorded=[manifest.seq for manifest in chain],
            aside=[dataset.layout.snapshot(seq) for seq in removed],
        )
        report.lost.snapshots = incomplete
        if other is not None:
            with self._database.read() as connection:
                report.lost.batches = reconcile.waiting_batches(connection, other.id)
            report.lost.everything = bool(report.lost.batches)
        if apply:
            if other is not None:
                self._mark_deleted(other)
            with self._database.write() as connection:
                self._insert(connection, dataset, chain, max(stored.numbers, default=0))
            self._reached("dataset recorded")
        return report

    def _mark_deleted(self, dataset: Dataset) -> None:
        """Mark a dataset as deleted that the lake does not have any more."""
        remove_journal(self._database, dataset.id, lambda *_: None)
        with self._database.write() as connection:
            connection.execute(update(dataset_table).where(dataset_table.c.id == dataset.id).values(state=DELETED))

    def _insert(self, connection: Connection, dataset: Dataset, chain: list[Snapshot], last: int) -> None:
        config, _ = registry.read(self._store, dataset)
        head = chain[-1] if chain else None
        segment = 0 if head is None else head.segment
        commit = max((reconcile.last_commit(manifest) for manifest in chain), default=0)
        connection.execute(
            insert(dataset_table).values(
                id=dataset.id, name=dataset.name, state=ACTIVE, created=config.created, revision=0
            )
        )
        connection.execute(
            insert(journal_head).values(dataset_id=dataset.id, commit=commit, segment=segment + 1, rows=0, size=0)
        )
        connection.execute(
            insert(snapshot_heads).values(
                dataset_id=dataset.id,
                seq=last if head is None else head.seq,
                snapshot=None if head is None else head.id,
                content=0 if head is None else head.content,
                segment=segment,
            )
        )
        outbox.start_stream(connection, dataset.id, dataset.name)
        if chain and chain[0].parent is not None:
            # Record the last expired snapshot, by its id, so that history does not seem to begin with its child.
            first = chain[0]
            connection.execute(
                insert(history).values(
                    dataset_id=dataset.id,
                    seq=first.seq - 1,
                    id=first.parent,
                    content=0,
                    segment=0,
                    created=first.created - timedelta(microseconds=1),
                    expired=now(),
                )
            )
        for manifest in chain:
            connection.execute(
                insert(history).values(
                    dataset_id=dataset.id,
                    seq=manifest.seq,
                    id=manifest.id,
                    content=manifest.content,
                    segment=manifest.segment,
                    created=manifest.created,
                )
            )


def _newest_chain(stored: StoredSnapshots) -> tuple[list[Snapshot], list[LostSnapshot]]:
    """Return the contiguous complete snapshots up to the newest complete one, and the incomplete ones after it."""
    incomplete: list[LostSnapshot] = []
    chain: list[Snapshot] = []
    for seq in reversed(stored.numbers):
        manifest = stored.readable_manifest(seq)
        lacks = None if manifest is None else stored.first_missing_part(manifest)
        if manifest is not None and lacks is None and (not chain or chain[-1].parent == manifest.id):
            chain.append(manifest)
        elif chain:
            break
        elif manifest is not None:
            lost = LostSnapshot(seq=seq, id=manifest.id, created=manifest.created, lacks=lacks or "")
            incomplete.append(lost)
    return chain[::-1], incomplete[::-1]
