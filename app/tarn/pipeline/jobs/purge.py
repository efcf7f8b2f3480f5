"""Purge job: erase entities permanently. Their statements are removed from every file, and all older snapshots
expire."""

from collections.abc import Sequence
from datetime import timedelta

import duckdb
import structlog

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.vacuum import Vacuum
from tarn.journal import rejected, segments
from tarn.lake import export_records, refs, snapshots
from tarn.lake.commit import TABLES
from tarn.lake.scans import Scans, prune
from tarn.model.datasets.export import DELTA_INDEX, ExportKind, ExportRecord
from tarn.model.datasets.ranges import Range
from tarn.model.datasets.snapshot import Snapshot, SnapshotOperation
from tarn.model.ids import now
from tarn.model.work.cancellation import interrupting
from tarn.model.work.job import PurgeOptions, PurgeResult, Report, ResumeLater, VacuumOptions
from tarn.pipeline.jobs.compact import plan_folds
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.rewrite import RewriteBase, RewritePlan, Rewriter
from tarn.pipeline.tasks.key_ranges import merge_adjacent, range_loads
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

RETRY_DELAY = timedelta(minutes=1)
"""Delay before a retry while running reads still need files that are to be deleted."""


class Purge:
    """The purge job."""

    def __init__(self, database: Database, rewriter: Rewriter, flush: Flush, vacuum: Vacuum) -> None:
        self._database = database
        self._rewriter = rewriter
        self._flush = flush
        self._vacuum = vacuum

    def run(self, dataset: Dataset, options: PurgeOptions, report: Report) -> PurgeResult:
        """Erase all statements of the entities. Run again after a crash, it finishes.

        1. flush    everything acknowledged by now, so that the journal holds only flushed rows of them
        2. erase    fold the ranges that contain them without them, into a snapshot
        3. forget   delete flushed journal rows, rejected events, refs on older snapshots, and exports of them
        4. vacuum   expire every older snapshot and delete the files that only they need, at once

        Raises ResumeLater while a read that began before still needs some of the files.
        """
        erased = tuple(sorted(set(options.entity_ids)))
        self._flush.run_one(dataset, report)
        rewritten = self._rewriter.run(dataset, SnapshotOperation.PURGE, lambda base: self._plan(base, erased), report)
        head = self._rewriter.base(dataset)
        if head is None:
            return PurgeResult(operation="purge", snapshot=None, statements=0, expired=0, refs=[], files=0)
        first = rewritten.snapshot or self._first_to_keep(dataset, head.snapshot)
        deleted_refs = self._delete_older(dataset, erased, first)
        vacuumed = self._vacuum.run(dataset, VacuumOptions(), report, keep_from=first.seq)
        if vacuumed.left:
            log.info("files with purged entities are still being read", dataset=dataset.name, files=vacuumed.left)
            raise ResumeLater(now() + RETRY_DELAY)
        log.info("entities purged", dataset=dataset.name, entities=len(erased), statements=first.rows.ended)
        return PurgeResult(
            operation="purge",
            snapshot=rewritten.made,
            statements=first.rows.ended if first.operation is SnapshotOperation.PURGE else 0,
            expired=vacuumed.expired,
            refs=deleted_refs,
            files=vacuumed.files,
        )

    def _plan(self, base: RewriteBase, erased: tuple[str, ...]) -> RewritePlan | None:
        keys = _keys_of(self._rewriter.store, base, erased)
        affected = [load.keys for load in range_loads(base.snapshot) if any(load.keys.holds(key) for key in keys)]
        if not affected:
            return None
        ranges: Sequence[Range] = merge_adjacent(affected)
        return plan_folds(self._rewriter.store, base, ranges, self._rewriter.task_runner().cores, erased)

    def _first_to_keep(self, dataset: Dataset, head: Snapshot) -> Snapshot:
        """Return the oldest snapshot to keep if there is nothing to erase: the oldest retained one if a purge made it
        (an earlier attempt of this job), else the head."""
        if head.retained_from is None:
            return head
        oldest = snapshots.read_if_exists(self._rewriter.store, dataset, head.retained_from)
        return oldest if oldest is not None and oldest.operation is SnapshotOperation.PURGE else head

    def _delete_older(self, dataset: Dataset, erased: tuple[str, ...], first: Snapshot) -> list[str]:
        segments.purge_done(self._database)
        with self._database.write() as connection:
            rejected.erase(connection, dataset.id, erased)
            deleted_refs = refs.remove_below(connection, dataset, first.seq)
            older = export_records.delete_records_below(connection, dataset, first.seq)
        store = self._rewriter.store
        for name in deleted_refs:
            refs.mirror(store, dataset, name, None)
        self._delete_exports(dataset, older)
        return [str(name) for name in deleted_refs]

    def _delete_exports(self, dataset: Dataset, older: Sequence[ExportRecord]) -> None:
        """Delete older exports, with their former versions and all deltas."""
        store, layout = self._rewriter.store, dataset.layout
        names = {name for kind in ExportKind for name in kind.form.names} | {DELTA_INDEX}
        versions = [entry.path for entry in store.list(layout.versions.folder)]
        paths = [path for path in versions if path.rsplit("/", 1)[-1] in names]
        if older:
            paths += [layout.export(made.kind, made.name) for made in older]
            paths += [entry.path for entry in store.list(layout.export_deltas)]
            paths += [entry.path for entry in store.list(layout.export_parts)]
            paths.append(layout.delta_index)
        store.delete(paths)


def _keys_of(store: Store, base: RewriteBase, erased: tuple[str, ...]) -> list[str]:
    """Return every key under which a row of these entities is stored, live or not."""
    keys: set[str] = set()
    scans = Scans(store.connection, base.dataset.layout)
    where = "WHERE entity_id IN (SELECT unnest($ids)) OR canonical_id IN (SELECT unnest($ids))"
    with duckdb.connect(config={"threads": 2, "memory_limit": "256MB"}) as duck, interrupting(duck.interrupt):
        store.connection.prepare(duck)
        for table in TABLES:
            files = base.snapshot.table(table).files
            possible = {
                file.path: file
                for column in ("entity_id", "canonical_id")
                for file in prune(files, ids=erased, column=column)
            }
            if possible:
                rows = scans.select(table, possible.values(), ["canonical_id"], where)
                distinct = duck.execute(f"SELECT DISTINCT canonical_id FROM ({rows})", {"ids": list(erased)})  # noqa: S608 - a query of `Scans`
                keys |= {key for (key,) in distinct.fetchall()}
    return sorted(keys)
