"""Reconcile: a database and a lake that were saved at different moments, made one again.

Whoever restores a database and a bucket each by its own means gets two states that never were together. For each
dataset the rules of the commit say what holds (`app/tarn/recovery/reconcile_history.py`); files, exports and uploads
follow what the lake has (`app/tarn/recovery/reconcile_files.py`). Datasets themselves:

| found                                             | done                                                            |
|---------------------------------------------------|-----------------------------------------------------------------|
| in the lake, and the database never heard of it   | recorded, with the history that it has                          |
| in the lake, and deleted in the database          | its files are deleted                                           |
| in the database, without a configuration          | the newest former one; or else that of a new dataset            |
| in both under one name, with different ids        | the one that the other side knows to be deleted, or has not yet |
|                                                   | heard of, decides which is the later one: that one stays        |

Nobody may be at work meanwhile: it refuses while workers or APIs give signs of life.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta

import structlog
from sqlalchemy import Connection, insert, select, update

from tarn.access.revision import bump
from tarn.datasets import registry as datasets
from tarn.datasets.documents import read_document
from tarn.datasets.registry import ACTIVE, DELETE_BATCH, DELETED, Dataset
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.db.tables import datasets as dataset_table
from tarn.db.tables import journal_head, readers, snapshot_heads, workers
from tarn.db.tables import snapshots as history
from tarn.errors import DocumentInvalid, StartRefused
from tarn.integrity.verify import verify
from tarn.journal import reconcile as recovery
from tarn.journal.dataset_removal import remove_journal
from tarn.model.dataset import DatasetConfig
from tarn.model.ids import now
from tarn.model.job import VerifyOptions
from tarn.model.names import DatasetName
from tarn.model.recovery import LostSnapshot, Reconciled, Reconciliation
from tarn.model.snapshot import Snapshot
from tarn.recovery import reconcile_files
from tarn.recovery.completeness import StoredSnapshots
from tarn.recovery.reconcile_history import OWNER, HistoryReconciler
from tarn.recovery.restore import free
from tarn.settings import Settings
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)


def require_no_heartbeats(database: Database, settings: Settings) -> None:
    """Raise StartRefused while a worker or an API process gives signs of life."""
    moment = now()
    with database.read() as connection:
        for table, what, after in (
            (workers, "worker", settings.worker_silent_after),
            (readers, "process that reads", settings.reader_silent_after),
        ):
            alive = select(table).where(table.c.seen > moment - timedelta(seconds=after)).order_by(table.c.seen.desc())
            if (row := connection.execute(alive.limit(1)).first()) is not None:
                seconds = max(0, round((moment - row.seen).total_seconds()))
                raise StartRefused(
                    f"a {what}, {row.pid} on {row.host}, gave a sign of life {seconds} s ago: stop it, and if it is "
                    f"stopped already, wait until it has been silent for {after:.0f} s"
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
        """Find what differs, and with `apply` make it one. Run again after a crash, it goes on.

        Told are the datasets that differ. Without `apply` nothing is changed. Raises what database and store raise.
        """
        if apply:
            with self._database.write() as connection:
                free(connection)
        told = list(self._strangers(apply))
        taken = {one.dataset for one in told if not apply}
        with self._database.read() as connection:
            found = datasets.page(connection, lambda _: True, None, None)
        # What is only told of a name is not done: what there is under it will be another dataset's.
        told += [self._one(dataset, apply) for dataset in found if dataset.name not in taken]
        if apply:
            with self._database.write() as connection:
                bump(connection)
        return Reconciliation(applied=apply, datasets=[one for one in told if one.is_changed or one.findings])

    def _one(self, dataset: Dataset, apply: bool) -> Reconciled:
        plan = self._histories.plan(dataset)
        lost_config = self._has_no_config(dataset)
        reconcile_files.plan(self._database, self._store, dataset, plan.said)
        plan.said.lost.configuration = lost_config
        if not apply:
            return plan.said
        if lost_config:
            datasets.reset_configuration(self._database, self._store, dataset)
        elif self._config(dataset.name) != dataset.id:
            datasets.restore_configuration(self._database, self._store, dataset)
        said = self._histories.apply(plan)
        reconcile_files.apply(self._database, self._store, dataset, said)
        self._reached("files fitted")
        looked = verify(
            self._database, self._store, self._settings, OWNER, dataset, VerifyOptions(repair=True), lambda _: None
        )
        said.findings = [one for one in looked.findings if not one.repaired and not one.kind.about_data]
        self._reached(f"{dataset.name} reconciled")
        return said

    def _has_no_config(self, dataset: Dataset) -> bool:
        """Whether neither the configuration nor a former one of this very dataset is there."""
        if self._config(dataset.name) == dataset.id:
            return False
        return not datasets.has_former_configuration(self._store, dataset)

    # Datasets that the database does not have

    def _strangers(self, apply: bool) -> Iterator[Reconciled]:
        for folder in self._store.folders(""):
            try:
                name = DatasetName(folder)
            except ValueError:
                continue  # the lake's own
            found = self._config(name)
            if found is None:
                continue
            with self._database.read() as connection:
                state = connection.execute(select(dataset_table.c.state).where(dataset_table.c.id == found)).scalar()
                other = datasets.find(connection, name)
            if state == DELETED:
                yield self._delete_again(Dataset(found, name), apply)
            elif state is None:
                yield self._adopt(Dataset(found, name), other, apply)

    def _config(self, name: DatasetName) -> str | None:
        """The id of the dataset whose configuration is in a folder."""
        try:
            config, _ = read_document(self._store, DatasetLayout(name).config, DatasetConfig.from_yaml)
        except (Missing, DocumentInvalid):
            return None
        return config.id

    def _delete_again(self, dataset: Dataset, apply: bool) -> Reconciled:
        """Delete the files of a dataset that the database knows to be deleted."""
        if apply:
            listing = [entry.path for entry in self._store.list(dataset.layout.root)]
            # The configuration goes last: until then the rest is found again after a crash.
            listing.sort(key=lambda path: path == dataset.layout.config)
            for start in range(0, len(listing), DELETE_BATCH):
                self._store.delete(listing[start : start + DELETE_BATCH])
        return Reconciled(dataset=dataset.name, id=dataset.id, found="deleted", head_before=None, head=None)

    def _adopt(self, dataset: Dataset, other: Dataset | None, apply: bool) -> Reconciled:
        """Record a dataset that was made after the database was saved. One that had its name before is deleted."""
        held = StoredSnapshots(self._store, dataset)
        chain, unfit = _newest_chain(held)
        head = chain[-1] if chain else None
        aside = [seq for seq in held.numbers if seq > (head.seq if head else 0)]
        said = Reconciled(
            dataset=dataset.name,
            id=dataset.id,
            found="only in the lake",
            head_before=None,
            head=None if head is None else head.seq,
            recorded=[manifest.seq for manifest in chain],
            aside=[dataset.layout.snapshot(seq) for seq in aside],
        )
        said.lost.snapshots = unfit
        if other is not None:
            with self._database.read() as connection:
                said.lost.batches = recovery.waiting_batches(connection, other.id)
            said.lost.everything = bool(said.lost.batches)
        if apply:
            if other is not None:
                self._bury(other)
            with self._database.write() as connection:
                self._insert(connection, dataset, chain, max(held.numbers, default=0))
            self._reached("adopted")
        return said

    def _bury(self, dataset: Dataset) -> None:
        """End a dataset of which the lake has nothing any more."""
        remove_journal(self._database, dataset.id, lambda *_: None)
        with self._database.write() as connection:
            connection.execute(update(dataset_table).where(dataset_table.c.id == dataset.id).values(state=DELETED))

    def _insert(self, connection: Connection, dataset: Dataset, chain: list[Snapshot], last: int) -> None:
        config, _ = datasets.read(self._store, dataset)
        head = chain[-1] if chain else None
        segment = 0 if head is None else head.segment
        commit = max((recovery.last_commit(manifest) for manifest in chain), default=0)
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
        events.start_stream(connection, dataset.id, dataset.name)
        if chain and chain[0].parent is not None:
            # What was given up before has left its last id, and history must not seem to begin with its child.
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


def _newest_chain(held: StoredSnapshots) -> tuple[list[Snapshot], list[LostSnapshot]]:
    """The whole snapshots that follow each other without a gap, up to the newest whole one; and those after it."""
    unfit: list[LostSnapshot] = []
    chain: list[Snapshot] = []
    for seq in reversed(held.numbers):
        manifest = held.own(seq)
        lacks = None if manifest is None else held.lacks(manifest)
        if manifest is not None and lacks is None and (not chain or chain[-1].parent == manifest.id):
            chain.append(manifest)
        elif chain:
            break
        elif manifest is not None:
            lost = LostSnapshot(seq=seq, id=manifest.id, created=manifest.created, lacks=lacks or "")
            unfit.append(lost)
    return chain[::-1], unfit[::-1]
