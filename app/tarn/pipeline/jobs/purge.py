"""Purge: entities erased for good. What is known of them leaves every file, and with it every older snapshot goes."""

from collections.abc import Sequence
from datetime import timedelta

import duckdb
import structlog

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.integrity.vacuum import Vacuum
from tarn.journal import rejected, segments
from tarn.lake import export_records as exports
from tarn.lake import refs, snapshots
from tarn.lake.commit import TABLES
from tarn.lake.delta_tables import folder_of
from tarn.model.cancellation import interrupting
from tarn.model.export import DELTA_INDEX, ExportRecord, Kind
from tarn.model.ids import now
from tarn.model.job import PurgeOptions, PurgeResult, Report, ResumeLater, VacuumOptions
from tarn.model.ranges import Range
from tarn.model.snapshot import Change, File, Snapshot
from tarn.pipeline.jobs.compact import plan_folds
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.rewrite import RewriteBase, RewritePlan, Rewriter
from tarn.pipeline.tasks.key_ranges import merge_adjacent, range_loads
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

RETRY_DELAY = timedelta(minutes=1)
"""Until running reads are asked again whether they still need what is to be deleted."""


class Purge:
    """Purges."""

    def __init__(self, database: Database, rewriting: Rewriter, flush: Flush, vacuum: Vacuum) -> None:
        self._database = database
        self._rewriting = rewriting
        self._flush = flush
        self._vacuum = vacuum

    def run(self, dataset: Dataset, options: PurgeOptions, report: Report) -> PurgeResult:
        """Erase what is known of entities. Run again after a crash, it finishes.

        1. flush    what is acknowledged by now, so that the journal holds nothing of them but what is done
        2. erase    fold the ranges that hold them without them, into a snapshot
        3. forget   rows of the journal, events that were set aside, refs on older snapshots, exports of them
        4. vacuum   give up every older snapshot and delete what only they need, at once

        Raises NotYet while a read that began before still needs some of it.
        """
        erased = tuple(sorted(set(options.entity_ids)))
        flushed = self._flush.run([dataset], lambda: report(None))[dataset.id]
        if flushed.error is not None:
            raise flushed.error
        done = self._rewriting.run(dataset, Change.PURGE, lambda base: self._plan(base, erased), report)
        head = self._rewriting.base(dataset)
        if head is None:
            return PurgeResult(operation="purge", snapshot=None, statements=0, expired=0, refs=[], files=0)
        first = done.snapshot or self._begun(dataset, head.snapshot)
        gone = self._forget(dataset, erased, first)
        emptied = self._vacuum.run(dataset, VacuumOptions(), report, keep_from=first.seq)
        if emptied.left:
            log.info("what is erased is still being read", dataset=dataset.name, files=emptied.left)
            raise ResumeLater(now() + RETRY_DELAY)
        log.info("purged", dataset=dataset.name, entities=len(erased), statements=first.rows.ended)
        return PurgeResult(
            operation="purge",
            snapshot=done.made(dataset),
            statements=first.rows.ended if first.operation is Change.PURGE else 0,
            expired=emptied.expired,
            refs=gone,
            files=emptied.files,
        )

    def _plan(self, base: RewriteBase, erased: tuple[str, ...]) -> RewritePlan | None:
        keys = _keys_of(self._rewriting.store, base, erased)
        chosen = [load.keys for load in range_loads(base.snapshot) if any(load.keys.holds(key) for key in keys)]
        if not chosen:
            return None
        ranges: Sequence[Range] = merge_adjacent(chosen)
        return plan_folds(self._rewriting.store, base, ranges, self._rewriting.kernels().cores, erased)

    def _begun(self, dataset: Dataset, head: Snapshot) -> Snapshot:
        """Where a purge that finds nothing left begins history: at the one that erased, if that is what is oldest."""
        if head.retained_from is None:
            return head
        oldest = snapshots.read_if_exists(self._rewriting.store, dataset, head.retained_from)
        return oldest if oldest is not None and oldest.operation is Change.PURGE else head

    def _forget(self, dataset: Dataset, erased: tuple[str, ...], first: Snapshot) -> list[str]:
        segments.purge_done(self._database)
        with self._database.write() as connection:
            rejected.erase(connection, dataset.id, erased)
            gone = refs.remove_below(connection, dataset, first.seq)
            older = exports.delete_records_below(connection, dataset, first.seq)
        store = self._rewriting.store
        for name in gone:
            refs.mirror(store, dataset, name, None)
        self._drop(dataset, older)
        return [str(name) for name in gone]

    def _drop(self, dataset: Dataset, older: Sequence[ExportRecord]) -> None:
        """Delete files that were exported before, with their former versions and all deltas."""
        store, layout = self._rewriting.store, dataset.layout
        names = {name for kind in Kind for name in kind.form.names} | {DELTA_INDEX}
        versions = [entry.path for entry in store.list(layout.versions.folder)]
        paths = [path for path in versions if path.rsplit("/", 1)[-1] in names]
        if older:
            paths += [layout.export(made.kind, made.name) for made in older]
            paths += [entry.path for entry in store.list(layout.export_deltas)]
            paths += [entry.path for entry in store.list(layout.export_parts)]
            paths.append(layout.delta_index)
        store.delete(paths)


def _keys_of(store: Store, base: RewriteBase, erased: tuple[str, ...]) -> list[str]:
    """Every key under which something is stored of these entities, live or not."""
    found: set[str] = set()
    with duckdb.connect(config={"threads": 2, "memory_limit": "256MB"}) as duck, interrupting(duck.interrupt):
        store.connection.prepare(duck)
        for table in TABLES:
            files = [file for file in base.snapshot.table(table).files if _may_hold(file, erased)]
            if not files:
                continue
            folder = folder_of(base.dataset, table)
            urls = [store.connection.file_url(f"{folder}/{file.path}") for file in files]
            rows = duck.execute(
                "SELECT DISTINCT canonical_id FROM read_parquet($urls, hive_partitioning = false) "
                "WHERE entity_id IN (SELECT unnest($ids)) OR canonical_id IN (SELECT unnest($ids))",
                {"urls": urls, "ids": list(erased)},
            ).fetchall()
            found |= {key for (key,) in rows}
    return sorted(found)


def _may_hold(file: File, ids: Sequence[str]) -> bool:
    """Whether the bounds of either column leave room for one of these, which are sorted."""
    for name in ("entity_id", "canonical_id"):
        bounds = file.columns.get(name)
        if bounds is None or bounds.min is None or bounds.max is None:
            return True
        if any(str(bounds.min) <= one <= str(bounds.max) for one in ids):
            return True
    return False
