"""Maintenance schedule: finds datasets that are due for compact, optimize, vacuum or exports, and enqueues the jobs.

A dataset is checked when its head has moved, and once an hour, as retention depends on the time. It has one open job of
these kinds at a time, so that no dataset is served twice before another is served once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import Enum

import structlog
from sqlalchemy import and_, func, select

from tarn.archive import file_index
from tarn.datasets import registry
from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.db.tables import datasets as datasets_table
from tarn.db.tables import snapshot_heads
from tarn.db.tables import snapshots as history
from tarn.errors import TarnError
from tarn.lake import export_records, snapshots
from tarn.lake.commit import TABLES
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.export import ExportKind
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, DatasetName
from tarn.model.work.job import FLOOR_HOURS, Operation
from tarn.pipeline.jobs.optimize import SMALL
from tarn.pipeline.tasks.key_ranges import have_many_inserts, inserts_of, range_loads
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

AUTOMATIC_OPERATIONS = (Operation.COMPACT, Operation.OPTIMIZE, Operation.VACUUM)
EXPORTING = (Operation.EXPORT, Operation.MAKE)

MIN_UNMERGED_SHARE = 0.25
"""Minimum number of unmerged rows per base row of a range that is compacted automatically."""

MANY_FILES = 16
"""Small files of one partition from which on they are merged automatically."""

MIN_UNMERGED_ROWS = 5_000
"""Unmerged rows from which on a compaction is enqueued, independent of everything else."""

PAST = 10
"""Snapshots past their retention from which on a vacuum is enqueued."""

NEVER = -1
"""Head number of a dataset that was not checked yet."""

RECHECK_SECONDS = 3600.0
"""Seconds after which a dataset is checked again although its head has not moved."""


class Due(Enum):
    """Whether a job is due."""

    NOW = "now"
    LATER = "later"
    NOT = "not"


class MaintenanceSchedule:
    """Finds due datasets and enqueues maintenance jobs."""

    def __init__(self, database: Database, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._store = store
        self._clock = clock
        self._checked: dict[str, tuple[int | None, float]] = {}
        """By dataset id: the head number that was checked, and when."""

    def enqueue_due(self) -> int:
        """Enqueue the jobs that are due. Returns how many jobs were due."""
        count = 0
        for dataset, seq in self._datasets_to_check():
            try:
                config, _ = registry.read(self._store, dataset)
                due = self._due(dataset, config, seq)
                enqueued = due is None or self._enqueue(dataset, due, AUTOMATIC_OPERATIONS)
                count += due is not None
                due_exports = Due.NOT if seq is None else self._exports_due(dataset, config)
                if due_exports is Due.NOW:
                    enqueued &= self._enqueue(dataset, Operation.MAKE, EXPORTING)
                    count += 1
                if enqueued and due_exports is not Due.LATER:
                    self._checked[dataset.id] = seq, self._clock()
            except TarnError as error:
                log.warning("cannot check the maintenance of a dataset", dataset=dataset.name, problem=error.slug)
        return count

    def _datasets_to_check(self) -> Iterator[tuple[Dataset, int | None]]:
        """Yield the datasets to check with their head number; None: no snapshot yet, but there may be archive files."""
        headed = and_(snapshot_heads.c.dataset_id == datasets_table.c.id, snapshot_heads.c.snapshot.is_not(None))
        with self._database.read() as connection:
            rows = connection.execute(
                select(datasets_table.c.id, datasets_table.c.name, snapshot_heads.c.seq)
                .outerjoin(snapshot_heads, headed)
                .where(datasets_table.c.state == ACTIVE)
            ).all()
        self._checked = {row.id: self._checked[row.id] for row in rows if row.id in self._checked}
        for row in rows:
            seq, moment = self._checked.get(row.id, (NEVER, 0.0))
            if seq != row.seq or moment < self._clock() - RECHECK_SECONDS:
                yield Dataset(row.id, DatasetName(row.name)), row.seq

    def _due(self, dataset: Dataset, config: DatasetConfig, seq: int | None) -> Operation | None:
        if not config.policy.maintain:
            return None
        if seq is not None:
            snapshot = snapshots.read(self._store, dataset, seq)
            if is_worth_compacting(snapshot):
                return Operation.COMPACT
            if has_many_small_files(snapshot, config):
                return Operation.OPTIMIZE
        with self._database.read() as connection:
            has_garbage = file_index.has_garbage(connection, dataset, now(), timedelta(hours=FLOOR_HOURS))
        return Operation.VACUUM if has_garbage or self._has_expirable_snapshots(dataset, config) else None

    def _exports_due(self, dataset: Dataset, config: DatasetConfig) -> "Due":
        """Return whether exports are due now, later or not, according to the dataset's policy."""
        policy = config.policy.exports
        if policy == "off":
            return Due.NOT
        with self._database.read() as connection:
            state = export_records.state(connection, dataset)
        records = state.records.values()
        if len(records) == len(ExportKind) and all(record.content == state.head.content for record in records):
            return Due.NOT
        pause = timedelta(0) if policy == "after_flush" else timedelta(minutes=policy)
        last = max((record.made for record in records), default=None)
        return Due.NOW if last is None or last + pause <= now() else Due.LATER

    def _has_expirable_snapshots(self, dataset: Dataset, config: DatasetConfig) -> bool:
        """Return whether enough snapshots are past their retention to be worth a vacuum."""
        kept = config.policy.retention
        of_dataset = history.c.dataset_id == dataset.id, history.c.expired.is_(None)
        with self._database.read() as connection:
            newest: int = connection.execute(select(func.max(history.c.seq)).where(*of_dataset)).scalar() or 0
            past: int = connection.execute(
                select(func.count())
                .select_from(history)
                .where(
                    *of_dataset,
                    history.c.seq <= newest - kept.count,
                    history.c.created < now() - timedelta(days=kept.days),
                )
            ).scalar_one()
        return past >= PAST

    def _enqueue(self, dataset: Dataset, operation: Operation, kinds: Sequence[Operation]) -> bool:
        """Enqueue a job. Returns False if the dataset has an open job of these kinds; it is checked again after that
        one."""
        with self._database.write() as connection:
            lock_row = select(datasets_table.c.id).where(datasets_table.c.id == dataset.id).with_for_update()
            connection.execute(lock_row)
            if jobs.has_open(connection, dataset.id, kinds):
                return False
            job = jobs.enqueue(connection, operation, dataset.id, LAKEHOUSE, "upkeep")
        log.info("maintenance job enqueued", dataset=dataset.name, operation=operation, job=job.id)
        return True


def is_worth_compacting(snapshot: Snapshot) -> bool:
    """Return whether the unmerged rows are a large share of a range, or the kept inserts a large share of all rows,
    and enough in total to be worth a job."""
    worthwhile = [
        load for load in range_loads(snapshot) if load.unmerged_rows and load.unmerged_share >= MIN_UNMERGED_SHARE
    ]
    files = len(snapshot.statements.files) + len(snapshot.translog.files)
    unmerged_rows = sum(load.unmerged_rows for load in worthwhile)
    if have_many_inserts(snapshot, MIN_UNMERGED_SHARE):
        unmerged_rows += sum(file.rows for file in inserts_of(snapshot))
    return unmerged_rows >= MIN_UNMERGED_ROWS or (bool(worthwhile) and files >= 4 * MANY_FILES)


def has_many_small_files(snapshot: Snapshot, config: DatasetConfig) -> bool:
    """Return whether one partition has enough small files to be worth an optimize job."""
    counts: dict[tuple[str, str], int] = {}
    for table in TABLES:
        for file in snapshot.table(table).files:
            if file.size < config.target_file_bytes * SMALL:
                partition_key = table, file.partition[PARTITIONED[table]]
                counts[partition_key] = counts.get(partition_key, 0) + 1
    return max(counts.values(), default=0) >= MANY_FILES
