"""Vacuum: expire snapshots that are past their retention, and delete the files that nothing needs any more.

Why nothing is lost:
- Only files that were listed before the vacuum's snapshot was published are deleted. A build on that snapshot or a
  later one writes new files; a build on an earlier one does not apply after it (`app/tarn/lake/commit.py`). So no
  future snapshot can name a listed file that no snapshot names now.
- Running reads are collected after the publication, when no read can begin on an expired snapshot
  (`app/tarn/lake/active_readers.py`).
- A manifest is deleted only below where history begins, and once no read needs what it names. So a vacuum that dies
  leaves files that nothing names, and manifests of expired snapshots; the next vacuum deletes them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, TypeVar

import structlog

from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import DELETE_BATCH, Dataset
from tarn.db.engine import Database
from tarn.errors import ManifestInvalid, SnapshotConflict
from tarn.integrity.archive_vacuum import Collector
from tarn.journal.expiry import sweep
from tarn.lake import active_readers, retention, snapshots
from tarn.lake.commit import TABLES, Build, HeadMoved, SnapshotPublisher, StepCallback
from tarn.lake.delta_logs import DeltaLogs
from tarn.lake.delta_tables import CHECKPOINT_EVERY
from tarn.lake.retention import HistoryStart, RetentionRule
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.snapshot import Head, Snapshot, SnapshotOperation
from tarn.model.ids import new_id, now, parse_stamp
from tarn.model.work.cancellation import checked
from tarn.model.work.job import DeletedFile, MadeSnapshot, Progress, Report, VacuumOptions, VacuumResult
from tarn.settings import Settings
from tarn.storage.store import Entry, Store
from tarn.storage.store_clock import store_time

log = structlog.get_logger(__name__)

Item = TypeVar("Item")

MANIFEST = re.compile(r"/(\d{12,})\.json$")

TRIES = 5
"""Attempts to publish before giving up because the head keeps moving. Publishing takes milliseconds."""

READERS = 8
"""Manifests that are read concurrently."""

READ_BETWEEN = 64
"""Manifests that are read between two progress reports."""

SHOWN = 1000
"""Files that a result lists."""


class Manifest(NamedTuple):
    """A manifest in the storage listing, part of history or not."""

    seq: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class StorageListing:
    """The storage listing from before the vacuum's snapshot."""

    data: dict[str, Entry]
    """Data files that are old enough, by path."""
    manifests: list[Manifest]


@dataclass(slots=True)
class VacuumOutcome:
    """The deleted files; in a dry run, those that would be deleted."""

    files: int = 0
    size: int = 0
    first: list[DeletedFile] = field(default_factory=list)

    def add(self, entries: Sequence[Entry]) -> None:
        self.files += len(entries)
        self.size += sum(entry.size for entry in entries)
        room = SHOWN - len(self.first)
        self.first += [DeletedFile(path=entry.path, size=entry.size) for entry in entries[:room]]


class Vacuum:
    """Vacuum of datasets, one at a time."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        publisher: SnapshotPublisher,
        reached: StepCallback = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._publisher = publisher
        self._logs = DeltaLogs(store)
        self._collector = Collector(database, store, settings, reached)
        self._reached = reached

    def run(
        self, dataset: Dataset, options: VacuumOptions, report: Report, keep_from: int | None = None
    ) -> VacuumResult:
        """Expire what is past its retention, and delete what nothing needs. Safe to repeat after a crash.

        1. list     data files that are old enough, and manifests
        2. decide   where history is to begin; if nothing expires and no file is unneeded, nothing is published
        3. publish  a snapshot that states where history begins: builds on an earlier snapshot do not apply after it
        4. wait     until every API process has reported what it reads
        5. delete   data files, manifests, entries of Delta logs, former versions of documents, unneeded files of the
                    archive (`app/tarn/integrity/archive_vacuum.py`) and abandoned stages

        With `keep_from`, every snapshot below that number expires, and unneeded files are deleted whatever their age.
        Raises DatasetNotFound, Locked, SnapshotConflict, ManifestInvalid (without its manifest the files of a kept
        snapshot are unknown), and what `report` raises.
        """
        config, _ = registry.read(self._store, dataset)
        keep = retention.PRESENT if keep_from is not None else RetentionRule.of(config.policy.retention, options)
        listed = self.listed(dataset, keep.unnamed_hours)
        self._reached("listed")
        head, start = self._decided(dataset, keep, keep_from)
        unnamed = self._unnamed(dataset, listed, range(min(start.then, head.seq), head.seq + 1), report)
        self._reached("decided")
        made = None
        if not options.dry_run and (
            start.then > start.now or self._is_any_free(dataset, listed, unnamed, start.now, report)
        ):
            made = self._published(dataset, config, start)
            unnamed = self._without(dataset, unnamed, range(head.seq + 1, made.seq + 1))
            self._reached("published")
        return self._finished(dataset, keep, listed, unnamed, made, start, options.dry_run, report)

    def listed(self, dataset: Dataset, hours: float) -> StorageListing:
        """List the data files of both tables older than so many hours by the store's clock, and all manifests."""
        past = retention.before(store_time(self._store), hours)
        data: dict[str, Entry] = {}
        for folder in (dataset.layout.statements, dataset.layout.translog):
            data |= {entry.path: entry for entry in checked(self._store.list(folder)) if _is_data(folder, entry, past)}
        manifests = checked(self._store.list(dataset.layout.snapshots))
        found = [(MANIFEST.search(entry.path), entry) for entry in manifests]
        return StorageListing(data, [Manifest(int(named[1]), entry) for named, entry in found if named is not None])

    # Step 2

    def _decided(self, dataset: Dataset, keep: RetentionRule, keep_from: int | None) -> tuple[Head, HistoryStart]:
        with self._database.read() as connection:
            head = recorded_head(connection, dataset)
            start = retention.history_start(connection, dataset, keep, now())
            if start is None:
                return head, HistoryStart(head.seq + 1, head.seq + 1)
            if keep_from is not None:
                then = retention.latest_start(connection, dataset, min(keep_from, head.seq + 1))
                start = HistoryStart(start.now, max(start.now, then))
        return head, start

    def _unnamed(self, dataset: Dataset, listed: StorageListing, kept: range, report: Report) -> dict[str, Entry]:
        """Return the listed data files that none of these snapshots names."""
        left = dict(listed.data)
        # The newest and the oldest name most files: usually nothing is left for those in between.
        ends = [*kept[-1:], *kept[:1]]
        for some in [ends, *_some(kept[1:-1], READ_BETWEEN)]:
            if not left:
                break
            report(None)
            left = self._without(dataset, left, some)
        return left

    def _without(self, dataset: Dataset, left: dict[str, Entry], seqs: Iterable[int]) -> dict[str, Entry]:
        named = self._files(dataset, seqs)
        return {path: entry for path, entry in left.items() if path not in named}

    def _files(self, dataset: Dataset, seqs: Iterable[int]) -> set[str]:
        """Return the data files that snapshots name. Raises ManifestInvalid for a kept one that cannot be read."""

        def named(seq: int) -> list[str]:
            try:
                return [*_paths(dataset, snapshots.read(self._store, dataset, seq))]
            except ManifestInvalid:
                # Another vacuum may have expired it meanwhile.
                if self._is_history(dataset, seq):
                    raise
                return []

        with ThreadPoolExecutor(READERS) as pool:
            return {path for paths in checked(pool.map(named, seqs)) for path in paths}

    def _is_history(self, dataset: Dataset, seq: int) -> bool:
        with self._database.read() as connection:
            recorded_head(connection, dataset)
            first = retention.first_kept(connection, dataset)
        return first is not None and seq >= first

    def _is_any_free(
        self, dataset: Dataset, listed: StorageListing, unnamed: dict[str, Entry], first: int, report: Report
    ) -> bool:
        """Return whether any file can be deleted: files held by running reads are no reason to publish a snapshot."""

        def free(oldest_read: int | None) -> bool:
            return not unnamed.keys() <= self._held(dataset, listed, first, oldest_read)

        if not unnamed:
            return False
        # The reads in the latest reports may have ended by now.
        return free(active_readers.oldest_reported(self._database, dataset)) or free(
            active_readers.oldest_running(self._database, self._settings, dataset, report)
        )

    # Step 3

    def _published(self, dataset: Dataset, config: DatasetConfig, start: HistoryStart) -> Snapshot:
        identity = new_id()
        for _ in range(TRIES):
            with self._database.read() as connection:
                base = recorded_head(connection, dataset)
                first = retention.first_kept(connection, dataset)
            build = Build(
                dataset=dataset,
                operation=SnapshotOperation.VACUUM,
                id=identity,
                base=base,
                segment=None,
                added={},
                checksum=config.checksum,
                # Another vacuum may have gone further meanwhile.
                retained_from=None if first is None else max(first, start.then),
            )
            try:
                return self._publisher.publish(build)
            except HeadMoved:
                log.info("the head changed during a vacuum; trying again", dataset=dataset.name)
        raise SnapshotConflict(
            f"all {TRIES} attempts to publish the vacuum of {dataset.name!r} lost to other writers; retry",
            expected=base.id,
            head=None,
        )

    # Steps 4 and 5

    def _finished(
        self,
        dataset: Dataset,
        keep: RetentionRule,
        listed: StorageListing,
        unnamed: dict[str, Entry],
        made: Snapshot | None,
        start: HistoryStart,
        dry_run: bool,
        report: Report,
    ) -> VacuumResult:
        first, oldest_read = start.then, active_readers.oldest_reported(self._database, dataset)
        if not dry_run:
            first = self._first(dataset)
            # A ref may have been set since: then fewer snapshots expire.
            unnamed = self._without(dataset, unnamed, range(first, start.then))
            if made is not None or any(manifest.seq < first for manifest in listed.manifests):
                oldest_read = active_readers.oldest_running(self._database, self._settings, dataset, report)
                self._reached("readers reported")
        held = self._held(dataset, listed, first, oldest_read)
        low = first if oldest_read is None else min(first, oldest_read)
        done = VacuumOutcome()
        delete = self._deleting(dataset, done, report, dry_run)
        free = [entry for path, entry in unnamed.items() if path not in held] if made is not None or dry_run else []
        delete("data", free)
        delete("manifests", [manifest.entry for manifest in listed.manifests if manifest.seq < low])
        for step, entries in self._rest(dataset, keep, start.then if dry_run else None, low):
            delete(step, entries)
        past = retention.before(store_time(self._store), keep.unnamed_hours)
        for gone in self._collector.run(dataset, past, dry_run):
            report(Progress(done=done.files, unit="files"))
            done.add(gone)
        if not dry_run:
            sweep(self._database, self._settings)
            self._reached("swept")
        return VacuumResult(
            operation="vacuum",
            dry_run=dry_run,
            snapshot=None if made is None else MadeSnapshot(dataset=dataset.name, seq=made.seq, id=made.id),
            retained_from=first,
            expired=first - start.now,
            files=done.files,
            size=done.size,
            left=len(unnamed) - len(free),
            first_files=done.first,
        )

    def _first(self, dataset: Dataset) -> int:
        """Return the oldest kept snapshot, or the number of the next one if there is none."""
        with self._database.read() as connection:
            head = recorded_head(connection, dataset)
            first = retention.first_kept(connection, dataset)
        return head.seq + 1 if first is None else first

    def _held(self, dataset: Dataset, listed: StorageListing, first: int, oldest_read: int | None) -> set[str]:
        """Return the files of expired snapshots that running reads still need."""
        if oldest_read is None:
            return set()
        return self._files(dataset, [one.seq for one in listed.manifests if oldest_read <= one.seq < first])

    def _rest(
        self, dataset: Dataset, keep: RetentionRule, tried: int | None, low: int
    ) -> Iterator[tuple[str, list[Entry]]]:
        """Yield what else can be deleted: entries of Delta logs below what snapshots pin, and old document versions.

        With `tried`, as if history began there. A log is left untouched while any read is below where history begins: a
        backup also copies what opens the tables there.
        """
        oldest = self._oldest(dataset, tried)
        # Log entries contain bounds of files, and so some of the values that must be erased immediately.
        within = 1 if keep.erases else CHECKPOINT_EVERY
        if oldest is not None and low >= oldest.seq:
            for table in TABLES:
                entries = self._logs.unneeded_entries(
                    dataset, table, oldest.table(table), change=tried is None, checkpoint_every=within
                )
                yield f"{table} log", entries
        yield "versions", self._old_versions(dataset, keep)

    def _oldest(self, dataset: Dataset, tried: int | None) -> Snapshot | None:
        """Return the oldest kept snapshot, or None if there is none."""
        while True:
            with self._database.read() as connection:
                head = recorded_head(connection, dataset)
                first = retention.first_kept(connection, dataset)
            if first is None:
                return None
            seq = first if tried is None else min(tried, head.seq)
            try:
                return snapshots.read(self._store, dataset, seq)
            except ManifestInvalid:
                # Another vacuum may have expired it meanwhile.
                if self._is_history(dataset, seq):
                    raise

    def _old_versions(self, dataset: Dataset, keep: RetentionRule) -> list[Entry]:
        """Return the former versions of documents that expire by the retention rule for snapshots."""
        of_name: dict[str, list[tuple[datetime, Entry]]] = {}
        for entry in checked(self._store.list(dataset.layout.versions.folder)):
            written, name = entry.path.split("/")[-2:]
            try:
                of_name.setdefault(name, []).append((parse_stamp(written), entry))
            except ValueError:
                continue
        old: list[Entry] = []
        for dated in of_name.values():
            dated.sort(key=lambda one: one[0])
            expired = keep.expired_count([moment for moment, _ in dated], now())
            old += [entry for _, entry in dated[:expired]]
        return old

    def _deleting(
        self, dataset: Dataset, done: VacuumOutcome, report: Report, dry_run: bool
    ) -> Callable[[str, list[Entry]], None]:
        """Return a function that deletes objects in batches, each only if the dataset and the job still exist.

        Otherwise it could delete a new dataset's files: log entries have the same names in a dataset of the same name.
        """

        def delete(step: str, entries: list[Entry]) -> None:
            for some in _some(entries, DELETE_BATCH):
                if not dry_run:
                    report(Progress(done=done.files, unit="files"))
                    with self._database.read() as connection:
                        recorded_head(connection, dataset)
                    self._reached(f"deleting {step}")
                    self._store.delete([entry.path for entry in some])
                done.add(some)
            if not dry_run:
                self._reached(f"{step} deleted")

        return delete


def _is_data(folder: str, entry: Entry, past: datetime) -> bool:
    is_log = entry.path.startswith(f"{folder}/_delta_log/")
    return not is_log and entry.path.endswith(".parquet") and entry.modified <= past


def _paths(dataset: Dataset, snapshot: Snapshot) -> Iterator[str]:
    for file in snapshot.statements.files:
        yield f"{dataset.layout.statements}/{file.path}"
    for file in snapshot.translog.files:
        yield f"{dataset.layout.translog}/{file.path}"


def _some(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
