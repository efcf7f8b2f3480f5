"""Vacuum: snapshots that are past their time are given up, and what nothing needs any more is deleted.

Why nothing is lost:
- Deleted is only what was listed before the vacuum's snapshot was published. What is built on that snapshot, or later,
  writes files of its own; what was built before does not hold after it (`app/tarn/lake/commit.py`). So nobody can come
  to name a listed file that no snapshot names now.
- Running reads are asked for after the publication, when nobody can begin to read what is given up
  (`app/tarn/lake/active_readers.py`).
- A manifest is deleted only below where history begins, and once nobody reads what it names. So a vacuum that dies
  leaves files that nothing names, and manifests below the tail; the next one deletes them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, TypeVar

import structlog

from tarn.datasets import registry as datasets
from tarn.datasets.registry import DELETE_BATCH, Dataset
from tarn.db.engine import Database
from tarn.errors import ManifestInvalid, SnapshotConflict
from tarn.integrity.archive_vacuum import Collector
from tarn.journal.expiry import sweep
from tarn.lake import active_readers as readers
from tarn.lake import retention, snapshots
from tarn.lake.commit import TABLES, Build, HeadMoved, Reached, SnapshotPublisher
from tarn.lake.delta_logs import DeltaLogs
from tarn.lake.delta_tables import CHECKPOINT_EVERY
from tarn.lake.retention import HistoryStart, Keep
from tarn.model.cancellation import checked
from tarn.model.dataset import DatasetConfig
from tarn.model.ids import new_id, now, parse_stamp
from tarn.model.job import MadeSnapshot, Progress, Report, Unneeded, VacuumOptions, VacuumResult
from tarn.model.snapshot import Change, Head, Snapshot
from tarn.settings import Settings
from tarn.storage.store import Entry, Store
from tarn.storage.store_clock import store_time

log = structlog.get_logger(__name__)

Item = TypeVar("Item")

MANIFEST = re.compile(r"/(\d{12,})\.json$")

TRIES = 5
"""Heads that may move away under a vacuum that is ready to publish, which takes it milliseconds."""

READERS = 8
"""Manifests that are read at once."""

READ_BETWEEN = 64
"""Manifests that are read between two reports."""

SHOWN = 1000
"""Files that a result names."""


class Manifest(NamedTuple):
    """A manifest that was listed, part of history or not."""

    seq: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class StorageListing:
    """What there was before the vacuum's snapshot."""

    data: dict[str, Entry]
    """Data files that are old enough, by path."""
    manifests: list[Manifest]


@dataclass(slots=True)
class VacuumOutcome:
    """What was deleted; in a dry run, what would be."""

    files: int = 0
    size: int = 0
    first: list[Unneeded] = field(default_factory=list)

    def add(self, entries: Sequence[Entry]) -> None:
        self.files += len(entries)
        self.size += sum(entry.size for entry in entries)
        room = SHOWN - len(self.first)
        self.first += [Unneeded(path=entry.path, size=entry.size) for entry in entries[:room]]


class Vacuum:
    """Vacuums datasets, one at a time."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        publisher: SnapshotPublisher,
        reached: Reached = lambda _: None,
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
        """Give up what is past its time and delete what nothing needs. Run again after a crash, it finishes.

        1. list     data files that are old enough, and manifests
        2. decide   where history is to begin; if nothing is given up and no file is unneeded, nothing is published
        3. publish  a snapshot that says where history begins: what was built before it does not hold after it
        4. wait     until every API process has told what it reads
        5. delete   data files, manifests, entries of Delta logs, former versions of documents; files of the archive
                    that are not needed (`app/tarn/integrity/archive_vacuum.py`); stages left alone

        With `keep_from`, every snapshot below that number is given up, and what nothing needs is deleted whatever its
        age. Raises DatasetNotFound, Locked, SnapshotConflict, ManifestInvalid (a kept snapshot that cannot be read
        names files that nobody knows), and what `report` raises.
        """
        config, _ = datasets.read(self._store, dataset)
        keep = retention.PRESENT if keep_from is not None else Keep.of(config.policy.retention, options)
        listed = self.listed(dataset, keep.unnamed_hours)
        self._reached("listed")
        head, tail = self._decided(dataset, keep, keep_from)
        unnamed = self._unnamed(dataset, listed, range(min(tail.then, head.seq), head.seq + 1), report)
        self._reached("decided")
        made = None
        if not options.dry_run and (
            tail.then > tail.now or self._is_any_free(dataset, listed, unnamed, tail.now, report)
        ):
            made = self._published(dataset, config, tail)
            unnamed = self._without(dataset, unnamed, range(head.seq + 1, made.seq + 1))
            self._reached("published")
        return self._finished(dataset, keep, listed, unnamed, made, tail, options.dry_run, report)

    def listed(self, dataset: Dataset, hours: float) -> StorageListing:
        """Data files of both tables that are older than so many hours by the store's own clock, and all manifests."""
        past = retention.before(store_time(self._store), hours)
        data: dict[str, Entry] = {}
        for folder in (dataset.layout.statements, dataset.layout.translog):
            data |= {entry.path: entry for entry in checked(self._store.list(folder)) if _is_data(folder, entry, past)}
        manifests = checked(self._store.list(dataset.layout.snapshots))
        found = [(MANIFEST.search(entry.path), entry) for entry in manifests]
        return StorageListing(data, [Manifest(int(named[1]), entry) for named, entry in found if named is not None])

    # Step 2

    def _decided(self, dataset: Dataset, keep: Keep, keep_from: int | None) -> tuple[Head, HistoryStart]:
        with self._database.read() as connection:
            head = snapshots.recorded(connection, dataset)
            tail = retention.history_start(connection, dataset, keep, now())
            if tail is None:
                return head, HistoryStart(head.seq + 1, head.seq + 1)
            if keep_from is not None:
                then = retention.latest_start(connection, dataset, min(keep_from, head.seq + 1))
                tail = HistoryStart(tail.now, max(tail.now, then))
        return head, tail

    def _unnamed(self, dataset: Dataset, listed: StorageListing, kept: range, report: Report) -> dict[str, Entry]:
        """The listed data files that none of these snapshots names."""
        left = dict(listed.data)
        # The newest and the oldest name most of what there is: as a rule nothing is left for those between.
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
        """The data files that snapshots name. Raises ManifestInvalid for one that is kept and cannot be read."""

        def named(seq: int) -> list[str]:
            try:
                return [*_paths(dataset, snapshots.read(self._store, dataset, seq))]
            except ManifestInvalid:
                # Another vacuum may have given it up meanwhile.
                if self._is_history(dataset, seq):
                    raise
                return []

        with ThreadPoolExecutor(READERS) as pool:
            return {path for paths in checked(pool.map(named, seqs)) for path in paths}

    def _is_history(self, dataset: Dataset, seq: int) -> bool:
        with self._database.read() as connection:
            snapshots.recorded(connection, dataset)
            first = retention.first_kept(connection, dataset)
        return first is not None and seq >= first

    def _is_any_free(
        self, dataset: Dataset, listed: StorageListing, unnamed: dict[str, Entry], first: int, report: Report
    ) -> bool:
        """Whether any file could be deleted: those that wait for a running read are no reason for a snapshot."""

        def free(oldest_read: int | None) -> bool:
            return not unnamed.keys() <= self._held(dataset, listed, first, oldest_read)

        if not unnamed:
            return False
        # What was told last may be over by now.
        return free(readers.oldest_reported(self._database, dataset)) or free(
            readers.oldest_running(self._database, self._settings, dataset, report)
        )

    # Step 3

    def _published(self, dataset: Dataset, config: DatasetConfig, tail: HistoryStart) -> Snapshot:
        identity = new_id()
        for _ in range(TRIES):
            with self._database.read() as connection:
                base = snapshots.recorded(connection, dataset)
                first = retention.first_kept(connection, dataset)
            build = Build(
                dataset=dataset,
                operation=Change.VACUUM,
                id=identity,
                base=base,
                segment=None,
                added={},
                checksum=config.checksum,
                # Another vacuum may have gone further meanwhile.
                retained_from=None if first is None else max(first, tail.then),
            )
            try:
                return self._publisher.publish(build)
            except HeadMoved:
                log.info("the head moved away under a vacuum", dataset=dataset.name)
        raise SnapshotConflict(
            f"{TRIES} tries to vacuum {dataset.name!r} lost to other writers", expected=base.id, head=None
        )

    # Steps 4 and 5

    def _finished(
        self,
        dataset: Dataset,
        keep: Keep,
        listed: StorageListing,
        unnamed: dict[str, Entry],
        made: Snapshot | None,
        tail: HistoryStart,
        dry_run: bool,
        report: Report,
    ) -> VacuumResult:
        first, oldest_read = tail.then, readers.oldest_reported(self._database, dataset)
        if not dry_run:
            first = self._first(dataset)
            # A ref may have been set since: then less is given up.
            unnamed = self._without(dataset, unnamed, range(first, tail.then))
            if made is not None or any(manifest.seq < first for manifest in listed.manifests):
                oldest_read = readers.oldest_running(self._database, self._settings, dataset, report)
                self._reached("told")
        held = self._held(dataset, listed, first, oldest_read)
        low = first if oldest_read is None else min(first, oldest_read)
        done = VacuumOutcome()
        delete = self._deleting(dataset, done, report, dry_run)
        free = [entry for path, entry in unnamed.items() if path not in held] if made is not None or dry_run else []
        delete("data", free)
        delete("manifests", [manifest.entry for manifest in listed.manifests if manifest.seq < low])
        for step, found in self._rest(dataset, keep, tail.then if dry_run else None, low):
            delete(step, found)
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
            expired=first - tail.now,
            files=done.files,
            size=done.size,
            left=len(unnamed) - len(free),
            first_files=done.first,
        )

    def _first(self, dataset: Dataset) -> int:
        """Where history begins: before the next snapshot, if there is none."""
        with self._database.read() as connection:
            head = snapshots.recorded(connection, dataset)
            first = retention.first_kept(connection, dataset)
        return head.seq + 1 if first is None else first

    def _held(self, dataset: Dataset, listed: StorageListing, first: int, oldest_read: int | None) -> set[str]:
        """Files of snapshots that are given up, and still read by somebody who began before."""
        if oldest_read is None:
            return set()
        return self._files(dataset, [one.seq for one in listed.manifests if oldest_read <= one.seq < first])

    def _rest(self, dataset: Dataset, keep: Keep, tried: int | None, low: int) -> Iterator[tuple[str, list[Entry]]]:
        """What there is besides data: entries of Delta logs below what snapshots pin, and old versions of documents.

        With `tried`, as if history began there. A log is left whole while anybody reads below where history begins: a
        backup copies what opens the tables there, too.
        """
        oldest = self._oldest(dataset, tried)
        # A log's entries hold bounds of files, and so some of what is to be forgotten at once.
        within = 1 if keep.erases else CHECKPOINT_EVERY
        if oldest is not None and low >= oldest.seq:
            for table in TABLES:
                found = self._logs.superfluous(dataset, table, oldest.table(table), change=tried is None, within=within)
                yield f"{table} log", found
        yield "versions", self._old_versions(dataset, keep)

    def _oldest(self, dataset: Dataset, tried: int | None) -> Snapshot | None:
        """The oldest snapshot that is kept; None: there is none."""
        while True:
            with self._database.read() as connection:
                head = snapshots.recorded(connection, dataset)
                first = retention.first_kept(connection, dataset)
            if first is None:
                return None
            seq = first if tried is None else min(tried, head.seq)
            try:
                return snapshots.read(self._store, dataset, seq)
            except ManifestInvalid:
                # Another vacuum may have given it up meanwhile.
                if self._is_history(dataset, seq):
                    raise

    def _old_versions(self, dataset: Dataset, keep: Keep) -> list[Entry]:
        """Former contents of documents: of each, what the rule for snapshots gives up."""
        of_name: dict[str, list[tuple[datetime, Entry]]] = {}
        for entry in checked(self._store.list(dataset.layout.versions.folder)):
            written, name = entry.path.split("/")[-2:]
            try:
                of_name.setdefault(name, []).append((parse_stamp(written), entry))
            except ValueError:
                continue
        old: list[Entry] = []
        for found in of_name.values():
            found.sort(key=lambda one: one[0])
            given_up = keep.given_up([moment for moment, _ in found], now())
            old += [entry for _, entry in found[:given_up]]
        return old

    def _deleting(
        self, dataset: Dataset, done: VacuumOutcome, report: Report, dry_run: bool
    ) -> Callable[[str, list[Entry]], None]:
        """How things are deleted: some at a time, each time only if the dataset and the job are still there.

        A log's entries have the same names in the next dataset of this name.
        """

        def delete(step: str, entries: list[Entry]) -> None:
            for some in _some(entries, DELETE_BATCH):
                if not dry_run:
                    report(Progress(done=done.files, unit="files"))
                    with self._database.read() as connection:
                        snapshots.recorded(connection, dataset)
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
