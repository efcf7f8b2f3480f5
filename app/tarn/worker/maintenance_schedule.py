"""Upkeep: which datasets are due for maintenance, and the jobs that see to it.

A dataset is looked at when its head has moved, and now and then besides, as what is kept depends on the time. It has
one job of this kind at a time, so that none is served twice before another is served once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import Enum

import structlog
from sqlalchemy import and_, func, select

from tarn.archive import file_index as records
from tarn.datasets import registry as datasets
from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.db.tables import datasets as datasets_table
from tarn.db.tables import snapshot_heads
from tarn.db.tables import snapshots as history
from tarn.errors import TarnError
from tarn.lake import export_records as exports
from tarn.lake import snapshots
from tarn.lake.commit import TABLES
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.dataset import DatasetConfig
from tarn.model.export import Kind
from tarn.model.ids import now
from tarn.model.job import FLOOR_HOURS, Operation
from tarn.model.names import LAKEHOUSE, DatasetName
from tarn.model.snapshot import Snapshot
from tarn.pipeline.jobs.optimize import SMALL
from tarn.pipeline.tasks.key_ranges import have_many_inserts, inserts_of, range_loads
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

KINDS = (Operation.COMPACT, Operation.OPTIMIZE, Operation.VACUUM)
EXPORTING = (Operation.EXPORT, Operation.MAKE)

GAIN = 0.25
"""Rows that folding a range would touch, for each settled one, from which on it is done unasked."""

MANY_FILES = 16
"""Small files of one partition from which on they are packed unasked."""

WORTH_A_JOB = 5_000
"""Rows of which folding is worth a job, whatever else there is."""

PAST = 10
"""Snapshots that may be past their time before they are given up."""

NEVER = -1
"""The head of a dataset that was not looked at."""

RECHECK_SECONDS = 3600.0
"""Seconds after which a dataset is looked at though nothing happened."""


class Due(Enum):
    """Whether something is to be done."""

    NOW = "now"
    LATER = "later"
    NOT = "not"


class MaintenanceSchedule:
    """Looks for what is due."""

    def __init__(self, database: Database, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._store = store
        self._clock = clock
        self._looked: dict[str, tuple[int | None, float]] = {}
        """By dataset: the head that was looked at, and when."""

    def ask(self) -> int:
        """Ask for what is due. Returns how many jobs that made."""
        made = 0
        for dataset, seq in self._to_look_at():
            try:
                config, _ = datasets.read(self._store, dataset)
                due = self._due(dataset, config, seq)
                asked = due is None or self._enqueue(dataset, due, KINDS)
                made += due is not None
                due_exports = Due.NOT if seq is None else self._exports_due(dataset, config)
                if due_exports is Due.NOW:
                    asked &= self._enqueue(dataset, Operation.MAKE, EXPORTING)
                    made += 1
                if asked and due_exports is not Due.LATER:
                    self._looked[dataset.id] = seq, self._clock()
            except TarnError as error:
                log.warning("cannot tell what a dataset needs", dataset=dataset.name, problem=error.slug)
        return made

    def _to_look_at(self) -> Iterator[tuple[Dataset, int | None]]:
        """Datasets with the number of their head; None: they have no snapshot, and maybe files."""
        headed = and_(snapshot_heads.c.dataset_id == datasets_table.c.id, snapshot_heads.c.snapshot.is_not(None))
        with self._database.read() as connection:
            rows = connection.execute(
                select(datasets_table.c.id, datasets_table.c.name, snapshot_heads.c.seq)
                .outerjoin(snapshot_heads, headed)
                .where(datasets_table.c.state == ACTIVE)
            ).all()
        self._looked = {row.id: self._looked[row.id] for row in rows if row.id in self._looked}
        for row in rows:
            seq, moment = self._looked.get(row.id, (NEVER, 0.0))
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
            has_garbage = records.has_garbage(connection, dataset, now(), timedelta(hours=FLOOR_HOURS))
        return Operation.VACUUM if has_garbage or self._is_long(dataset, config) else None

    def _exports_due(self, dataset: Dataset, config: DatasetConfig) -> "Due":
        """Whether exports are to be made now, as the dataset's policy says, once enough time has passed, or not."""
        policy = config.policy.exports
        if policy == "off":
            return Due.NOT
        with self._database.read() as connection:
            state = exports.state(connection, dataset)
        made = state.made.values()
        if len(made) == len(Kind) and all(one.content == state.head.content for one in made):
            return Due.NOT
        pause = timedelta(0) if policy == "after_flush" else timedelta(minutes=policy)
        last = max((one.made for one in made), default=None)
        return Due.NOW if last is None or last + pause <= now() else Due.LATER

    def _is_long(self, dataset: Dataset, config: DatasetConfig) -> bool:
        """Whether more snapshots are past their time than is worth a mention."""
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
        """False if the dataset has such a job already: what is due after it is seen then."""
        with self._database.write() as connection:
            held = select(datasets_table.c.id).where(datasets_table.c.id == dataset.id).with_for_update()
            connection.execute(held)
            if jobs.has_open(connection, dataset.id, kinds):
                return False
            job = jobs.enqueue(connection, operation, dataset.id, LAKEHOUSE, "upkeep")
        log.info("maintenance is due", dataset=dataset.name, operation=operation, job=job.id)
        return True


def is_worth_compacting(snapshot: Snapshot) -> bool:
    """Whether what is loose is a good part of a range, or inserts of a good part are kept, and not too little to be
    worth a job."""
    due = [load for load in range_loads(snapshot) if load.loose and load.gain >= GAIN]
    files = len(snapshot.statements.files) + len(snapshot.translog.files)
    loose = sum(load.loose for load in due)
    if have_many_inserts(snapshot, GAIN):
        loose += sum(file.rows for file in inserts_of(snapshot))
    return loose >= WORTH_A_JOB or (bool(due) and files >= 4 * MANY_FILES)


def has_many_small_files(snapshot: Snapshot, config: DatasetConfig) -> bool:
    counts: dict[tuple[str, str], int] = {}
    for table in TABLES:
        for file in snapshot.table(table).files:
            if file.size < config.target_file_bytes * SMALL:
                place = table, file.partition[PARTITIONED[table]]
                counts[place] = counts.get(place, 0) + 1
    return max(counts.values(), default=0) >= MANY_FILES
