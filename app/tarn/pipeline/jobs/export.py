"""Export jobs: write the export files of a dataset from one snapshot, only those that are stale.

Why an export never looks fresher than it is:
- Its record and its tag carry a time taken before its snapshot was resolved. Anything acknowledged later has a later
  time, or waits in the journal, or changes the head's content: each of these makes the export stale.
- The record is written after the file is in place. A crash between the two leaves a file that is newer than its record
  says.
- A worker that makes exports of a dataset holds a lease on them, and renews it before each file is put in place.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import chain
from threading import Event, Thread
from typing import Any, NamedTuple

import orjson
import structlog
from followthemoney.dataset.versions import Version

from tarn.datasets import registry
from tarn.datasets.config_documents import replace_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import export_leases
from tarn.errors import Locked, LockLost, SnapshotGone, SnapshotNotFound, TarnError
from tarn.lake import catalog, export_deltas, export_records, snapshots
from tarn.lake.commit import StepCallback
from tarn.lake.export_records import ExportState, RequestedFormat
from tarn.lake.leases import Lease, Leases
from tarn.model.datasets.dataset import DatasetConfig
from tarn.model.datasets.export import ExportKind, ExportRecord, OmittedEdges
from tarn.model.datasets.ranges import EVERYTHING, Range
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ftm.statistics import Statistics
from tarn.model.ids import new_id, now
from tarn.model.names import LAKEHOUSE
from tarn.model.work.cancellation import checked
from tarn.model.work.job import (
    Exported,
    ExportOptions,
    ExportResult,
    MadeExport,
    MakeOptions,
    MakeResult,
    Report,
    ResumeLater,
    SkippedExport,
)
from tarn.pipeline.jobs.flush import Flush, TaskRunner
from tarn.pipeline.jobs.rewrite import run_tasks
from tarn.pipeline.jobs.split_ranges import split_range
from tarn.pipeline.tasks.export_tasks import CountDifferences, ExportedRange, ExportRange
from tarn.query.diff import files_of_one
from tarn.query.engine.active_reads import ActiveReads
from tarn.settings import Settings
from tarn.storage import versions
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)

RETRY_DELAY = timedelta(seconds=2)
"""Delay before a retry while another worker makes exports of the dataset."""

INCREMENTAL_KINDS = (ExportKind.STATISTICS, ExportKind.DELTA)
"""Kinds that are derived from the previous export and the changes since, if that snapshot still exists."""

MOST_RECOUNTED = 20_000
"""Rows in files that only one of two snapshots has, up to which statistics are updated from the changes between
them."""

ONE_TASK_ROWS, ONE_TASK_BYTES = 1_000_000, 64 << 20
"""Rows and bytes of files up to which statistics alone are counted by one task, with a thread for each core."""

KEPT_DELTAS = 100
"""Deltas that are kept."""

FRESH = "it is fresh"


class _Run(NamedTuple):
    """One run: its dataset, requested form, snapshot, lease and version."""

    dataset: Dataset
    config: DatasetConfig
    requested_format: RequestedFormat
    state: ExportState
    snapshot: Snapshot | None
    resolved: datetime
    lease: Lease
    version: str
    base: int | None = None
    """The snapshot at which the last delta ends. None: there is no delta or its snapshot has expired, and deltas
    restart."""


class Exports:
    """The export and make jobs."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        flush: Flush,
        task_runner: Callable[[], TaskRunner],
        running: ActiveReads,
        reached: StepCallback = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._flush = flush
        self._task_runner = task_runner
        self._running = running
        self._reached = reached
        self._seconds = settings.lease_seconds
        self._public_url = settings.public_url
        self._leases = Leases(database, store, new_id(), settings.lease_seconds, export_leases, mirrored=False)

    def export(self, dataset: Dataset, options: ExportOptions, report: Report) -> ExportResult:
        """Make the requested exports, those that are stale or, with `force`, all of them."""
        done = self._run(dataset, [kind for kind in ExportKind if kind in options.kinds], options.force, report)
        return ExportResult(operation="export", **done.model_dump())

    def make(self, dataset: Dataset, options: MakeOptions, report: Report) -> MakeResult:
        """Make every export that is stale or, with `force`, all of them."""
        return MakeResult(operation="make", **self._run(dataset, list(ExportKind), options.force, report).model_dump())

    def _run(self, dataset: Dataset, kinds: Sequence[ExportKind], force: bool, report: Report) -> Exported:
        """Flush, resolve the head, and make the stale exports from it. Run again after a crash, it makes the rest.

        Raises ResumeLater while another worker makes exports of the dataset, LockLost, and errors of database, storage
        and Spark.
        """
        config, tag = registry.read(self._store, dataset)
        requested_format = RequestedFormat(config.compression, tag)
        if not force:
            state = self._state(dataset)
            if all(state.stale(kind, requested_format) is None for kind in kinds):
                skipped = [_skipped(state.records[kind], FRESH) for kind in kinds]
                return Exported(
                    snapshot=state.head.id, version=None, made=[], skipped=skipped, invalid=_most_invalid(skipped)
                )
        self._flush.run_one(dataset, report)
        with self._hold_lease(dataset) as lease, self._hold_snapshots(dataset) as hold:
            resolved = now()
            state = self._state(dataset)
            hold(
                min(
                    [
                        state.head.seq,
                        *(record.seq for kind, record in state.records.items() if kind in INCREMENTAL_KINDS),
                    ]
                )
            )
            self._reached("resolved")
            snapshot = None if state.head.id is None else snapshots.read(self._store, dataset, state.head.seq)
            run = _Run(dataset, config, requested_format, state, snapshot, resolved, lease, _version(state))
            return self._make(run, kinds, force, report)

    def _make(self, run: _Run, kinds: Sequence[ExportKind], force: bool, report: Report) -> Exported:
        reasons = {kind: reason for kind in kinds if (reason := _reason(run, kind, force)) is not None}
        contents = [kind for kind in reasons if kind is not ExportKind.INDEX]
        if ExportKind.DELTA in contents and (last := self._last_comparable(run, ExportKind.DELTA)) is not None:
            run = run._replace(base=last.seq)
        counts = self._update_statistics(run, report) if ExportKind.STATISTICS in contents and not force else None
        scanned = [kind for kind in contents if kind is not ExportKind.STATISTICS or counts is None]
        ranges = self._ranges(run, scanned, report) if scanned else []
        if counts is None:
            counts = sum((part.statistics for part in ranges if part.statistics is not None), Statistics())
        self._reached("built")
        exported: list[MadeExport] = []
        for kind in contents:
            report(None)
            made = self._put_counts(run, counts) if kind is ExportKind.STATISTICS else self._put(run, kind, ranges)
            edges = _omitted_edges(run, ranges) if kind is ExportKind.GRAPH else None
            exported.append(
                MadeExport(
                    kind=kind,
                    name=made.name,
                    size=made.size,
                    reason=reasons[kind],
                    invalid=made.invalid,
                    omitted_edges=edges,
                )
            )
        self._delete_parts(run)
        skipped = [
            self._skip_unchanged(run, kind, force)
            for kind in kinds
            if kind not in reasons and kind is not ExportKind.INDEX
        ]
        if ExportKind.INDEX in kinds:
            state = self._state(run.dataset)
            after = run._replace(state=state)
            reason = reasons.get(ExportKind.INDEX) or state.index_stale_reason(run.requested_format)
            if reason is None:
                skipped.append(self._skip_unchanged(after, ExportKind.INDEX, force))
            else:
                made = self._put_index(after)
                exported.append(MadeExport(kind=ExportKind.INDEX, name=made.name, size=made.size, reason=reason))
        invalid = _most_invalid([*exported, *skipped])
        kinds_made = [made.kind for made in exported]
        log.info("exports written", dataset=run.dataset.name, seq=run.state.head.seq, made=kinds_made, invalid=invalid)
        version = run.version if exported else None
        return Exported(snapshot=run.state.head.id, version=version, made=exported, skipped=skipped, invalid=invalid)

    # Exports of statements and entities

    def _ranges(self, run: _Run, kinds: Sequence[ExportKind], report: Report) -> list[ExportedRange]:
        """Run one task for each key range; each writes a part of every file. Returns their outputs in order."""
        folder = run.dataset.layout.export_run(new_id())
        self._delete_parts(run)
        task_runner = self._task_runner()
        parts = self._split(run, kinds, task_runner.cores)
        tasks = [(self._task(run, number, keys, kinds, folder), rows) for number, (keys, rows) in enumerate(parts)]
        return run_tasks(task_runner, tasks, report)

    def _split(self, run: _Run, kinds: Sequence[ExportKind], cores: int) -> list[tuple[Range, int]]:
        """Split the keys into ranges, one for each task; returns them with their rows."""
        files = () if run.snapshot is None else run.snapshot.statements.files
        rows, size = sum(file.rows for file in files), sum(file.size for file in files)
        if list(kinds) == [ExportKind.STATISTICS] and rows <= ONE_TASK_ROWS and size <= ONE_TASK_BYTES:
            # Splitting the range and starting more tasks takes longer than the count.
            return [(EVERYTHING, rows)]
        return split_range(self._store, run.dataset, run.config.target_file_bytes, EVERYTHING, files, cores)

    def _task(self, run: _Run, number: int, keys: Range, kinds: Sequence[ExportKind], folder: str) -> ExportRange:
        return ExportRange(
            number=number,
            dataset=run.dataset.name,
            dataset_id=run.dataset.id,
            seq=None if run.snapshot is None else run.snapshot.seq,
            base=run.base,
            within=keys,
            kinds=tuple(kinds),
            folder=folder,
            compression=run.config.compression,
        )

    def _last_comparable(self, run: _Run, kind: ExportKind) -> ExportRecord | None:
        """Return the last export of a kind, if its snapshot still exists and can be compared with."""
        record = run.state.records.get(kind)
        if record is None or record.snapshot is None or run.snapshot is None:
            return None
        try:
            with self._database.read() as connection:
                snapshots.find(connection, run.dataset, record.snapshot)
        except (SnapshotGone, SnapshotNotFound):
            return None
        return record

    def _update_statistics(self, run: _Run, report: Report) -> Statistics | None:
        """Return the last statistics updated with the changes since; None if everything must be counted."""
        last = self._last_comparable(run, ExportKind.STATISTICS)
        if last is None or run.snapshot is None:
            return None
        former = snapshots.read(self._store, run.dataset, last.seq)
        rows = sum(file.rows for file in files_of_one(former.statements, run.snapshot.statements))
        if rows > MOST_RECOUNTED:
            return None
        try:
            text = self._store.get(run.dataset.layout.export(ExportKind.STATISTICS, last.name))
            known = Statistics.parsed(orjson.loads(text))
        except (ObjectMissing, ValueError):
            return None
        if hashlib.sha1(text, usedforsecurity=False).hexdigest() != last.sha1:
            return None
        task = CountDifferences(0, run.dataset.name, run.dataset.id, last.seq, run.snapshot.seq)
        (change,) = run_tasks(self._task_runner(), [(task, rows)], report)
        return None if change is None else known.replaced(change.former, change.present)

    def _put_counts(self, run: _Run, counts: Statistics) -> ExportRecord:
        document = {"dataset": run.dataset.name, "snapshot": run.state.head.id, "version": run.version}
        detail = {"entities": counts.entities, "things": counts.things, "invalid": counts.invalid}
        return self._put_document(run, ExportKind.STATISTICS, _json(document | counts.document()), detail)

    def _put(self, run: _Run, kind: ExportKind, ranges: Sequence[ExportedRange]) -> ExportRecord:
        name = kind.form.named(run.config.compression)
        joining = _JoinedParts(self._store, [part.parts[kind] for part in ranges])

        def joined() -> Iterator[bytes]:
            """Yield the parts, then renew the lease: LockLost at that point keeps the file from being replaced."""
            yield from joining
            self._reached(f"{kind} joined")
            self._leases.renew(run.lease)

        store, former, moment = self._store, run.dataset.layout.versions, run.resolved
        detail: dict[str, Any] = {}
        if kind.assembles:
            detail = {"invalid": sum(part.invalid.get(kind, 0) for part in ranges)}
        if kind is ExportKind.DELTA:
            detail |= self._keep_delta(run, joined(), joining)
            delta_path = run.dataset.layout.export_delta(detail["kept"][-1]["name"])
            self._replace(run, kind, name, lambda path: versions.replace_with(store, path, former, delta_path, moment))
        else:
            self._replace(run, kind, name, lambda path: versions.replace_stream(store, path, former, joined(), moment))
        record = self._record(run, kind, name, joining.size, joining.sha1, detail)
        if kind is ExportKind.DELTA:
            self._write_delta_index(run, record)
        return record

    def _put_document(self, run: _Run, kind: ExportKind, text: bytes, detail: dict[str, Any]) -> ExportRecord:
        name = kind.form.named(None)
        self._leases.renew(run.lease)
        former = run.dataset.layout.versions
        self._replace(run, kind, name, lambda path: versions.replace(self._store, path, former, text, run.resolved))
        sha1 = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        return self._record(run, kind, name, len(text), sha1, detail)

    def _replace(self, run: _Run, kind: ExportKind, name: str, store_file: Callable[[str], object]) -> None:
        """Put a file in place; a previous file with another name is moved to the former versions."""
        store_file(run.dataset.layout.export(kind, name))
        self._reached(f"{kind} put")
        former = run.state.records.get(kind)
        if former is not None and former.name != name:
            path = run.dataset.layout.export(kind, former.name)
            versions.retire(self._store, path, run.dataset.layout.versions, run.resolved)

    def _record(
        self, run: _Run, kind: ExportKind, name: str, size: int, sha1: str, detail: dict[str, Any]
    ) -> ExportRecord:
        head = run.state.head
        export_record = ExportRecord(
            kind, name, head.id, head.seq, head.content, run.resolved, now(), size, sha1, run.version, detail
        )
        with self._database.write() as connection:
            export_records.record(connection, run.dataset, export_record)
            export_records.record_event(connection, run.dataset, export_record)
        self._reached(f"{kind} recorded")
        self._write_tag(run, kind)
        return export_record

    def _skip_unchanged(self, run: _Run, kind: ExportKind, force: bool) -> SkippedExport:
        """Record that an export still matches the head at this moment, and return it as skipped."""
        export_record = run.state.records[kind]
        if run.state.stale(kind, run.requested_format) is None:
            return _skipped(export_record, FRESH)
        export_record = export_record._replace(resolved=run.resolved)
        with self._database.write() as connection:
            export_records.record(connection, run.dataset, export_record)
        self._write_tag(run, kind)
        if kind is ExportKind.DELTA:
            self._write_delta_index(run, export_record)
        reason = "nothing changed since the last one" if force else "what is visible has not changed"
        return _skipped(export_record, reason)

    def _write_tag(self, run: _Run, kind: ExportKind) -> None:
        """Write the tag into the layout; the record in SQL is authoritative."""
        try:
            path = run.dataset.layout.tag(LAKEHOUSE, kind.form.tag)
            self._store.put_hint(path, run.resolved.isoformat().encode())
        except TarnError as error:
            log.warning("a tag could not be written to the layout", dataset=run.dataset.name, problem=error.slug)

    # Deltas

    def _keep_delta(self, run: _Run, chunks: Iterator[bytes], joining: "_JoinedParts") -> dict[str, Any]:
        """Store a delta under its version. Returns the list of kept deltas. Deltas without a record in SQL are not in
        the list: a run that died before recording one began at the same snapshot as this run."""
        layout = run.dataset.layout
        record = run.state.records.get(ExportKind.DELTA)
        name = run.version + ExportKind.DELTA.form.named(run.config.compression).removeprefix("entities.delta")
        self._store.put_stream(layout.export_delta(name), chunks)
        continues = record is not None and run.base is not None
        delta = {
            "version": run.version,
            "name": name,
            "from": record.version if record is not None and continues else None,
            "snapshot": run.state.head.id,
            "content": run.state.head.content,
            "size": joining.size,
            "restart": not continues or export_deltas.needs_restart(run.state.records),
        }
        known = export_deltas.kept_deltas(run.state.records) if continues else []
        return {"kept": [*known, delta][-KEPT_DELTAS:]}

    def _write_delta_index(self, run: _Run, record: ExportRecord) -> None:
        """Write the index of the kept deltas, after they are recorded in SQL, and delete all other deltas."""
        layout = run.dataset.layout
        self._leases.renew(run.lease)
        self._store.put(layout.delta_index, _json(export_deltas.index(run.dataset.name, record, self._public_url)))
        names = {each["name"] for each in record.detail["kept"]}
        stored_deltas = [entry.path for entry in self._store.list(layout.export_deltas)]
        self._store.delete([path for path in stored_deltas if path.rsplit("/", 1)[-1] not in names])

    # The index

    def _put_index(self, run: _Run) -> ExportRecord:
        """Write the index under the lock for changes of the configuration, because the index contains the
        configuration."""
        head = run.state.head
        self._leases.renew(run.lease)
        with self._database.write() as connection:
            registry.lock(connection, run.dataset)
            config, tag = registry.read(self._store, run.dataset)
            known = export_records.records_of(connection, run.dataset)
            text = catalog.index_of(config, known, self._public_url)
            name, detail = ExportKind.INDEX.form.name, export_records.index_detail(known, tag)
            export_record = ExportRecord(
                ExportKind.INDEX, name, head.id, head.seq, head.content, run.resolved, now(), 0, "", run.version, detail
            ).of(text)
            replace_document(connection, self._store, run.dataset.layout.index, run.dataset.layout.versions, text)
            self._reached("index put")
            export_records.record(connection, run.dataset, export_record)
            export_records.record_event(connection, run.dataset, export_record)
        self._write_tag(run, ExportKind.INDEX)
        catalog.publish(self._database, self._store, self._public_url)
        return export_record

    # State, sweep, leases

    def _state(self, dataset: Dataset) -> ExportState:
        with self._database.read() as connection:
            return export_records.state(connection, dataset)

    def _delete_parts(self, run: _Run) -> None:
        self._store.delete([entry.path for entry in self._store.list(run.dataset.layout.export_parts)])

    @contextmanager
    def _hold_lease(self, dataset: Dataset) -> Iterator[Lease]:
        """Hold the lease on the dataset's exports; a thread renews it during the work."""
        try:
            lease = self._leases.take(dataset)
        except Locked:
            raise ResumeLater(now() + RETRY_DELAY) from None
        over = Event()

        def keep() -> None:
            while not over.wait(self._seconds / 3):
                try:
                    self._leases.renew(lease)
                except LockLost:
                    return
                except TarnError as error:
                    log.warning("a lease on exports could not be renewed", dataset=dataset.name, problem=error.slug)

        keeper = Thread(target=keep, name="keeps a lease on exports", daemon=True)
        keeper.start()
        try:
            yield lease
        finally:
            over.set()
            keeper.join()
            self._leases.release(lease)

    @contextmanager
    def _hold_snapshots(self, dataset: Dataset) -> Iterator[Callable[[int], None]]:
        """Keep vacuum from deleting what is read: everything at first, then everything from the oldest snapshot that is
        passed to the yielded function."""
        hold = self._running.begin(dataset.id)

        def oldest(seq: int) -> None:
            hold.seq = seq

        try:
            yield oldest
        finally:
            self._running.end(hold)


class _JoinedParts:
    """Concatenates parts; computes size and SHA-1 of the result on the way."""

    def __init__(self, store: Store, parts: Sequence[str]) -> None:
        self._store = store
        self._parts = parts
        self._digest = hashlib.sha1(usedforsecurity=False)
        self.size = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in checked(chain.from_iterable(map(self._store.stream, self._parts))):
            self._digest.update(chunk)
            self.size += len(chunk)
            yield chunk

    @property
    def sha1(self) -> str:
        return self._digest.hexdigest()


def _skipped(record: ExportRecord, reason: str) -> SkippedExport:
    return SkippedExport(kind=record.kind, reason=reason, invalid=record.invalid)


def _most_invalid(files: Sequence[MadeExport | SkippedExport]) -> int | None:
    """Return the highest number of entities that one of these files leaves out; None if it is unknown for all files of
    entities."""
    of_entities = [file.invalid for file in files if file.kind.assembles]
    known = [count for count in of_entities if count is not None]
    return max(known, default=None if of_entities else 0)


def _reason(run: _Run, kind: ExportKind, force: bool) -> str | None:
    """Return why an export is to be made, or None if it is not."""
    moved = run.state.content_difference(kind, run.requested_format)
    if moved is not None:
        return moved
    if kind is ExportKind.INDEX:
        return "the request sets `force`" if force else run.state.index_stale_reason(run.requested_format)
    # An empty delta would replace the last one before all consumers have fetched it.
    return "the request sets `force`" if force and kind is not ExportKind.DELTA else None


def _omitted_edges(run: _Run, ranges: Sequence[ExportedRange]) -> OmittedEdges | None:
    """Return and log the relationships that are missing in the graph; None if it is complete."""
    omitted = OmittedEdges()
    for part in ranges:
        omitted.merge(part.omitted_edges)
    if not omitted.count:
        return None
    log.warning("a graph is not complete", dataset=run.dataset.name, **omitted.model_dump())
    return omitted


def _version(state: ExportState) -> str:
    """Return FtM's version of a run, later than every earlier one even if the clock went backwards."""
    version = Version.new()
    latest = max((record.version for record in state.records.values()), default="")
    if version.id > latest:
        return version.id
    return Version(Version.from_string(latest).dt + timedelta(seconds=1), version.tag).id


def _json(document: Mapping[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
