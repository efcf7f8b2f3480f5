"""Exports: files that others take from a dataset, made of one snapshot, and only where they are not fresh.

Why none ever looks fresher than it is:
- Its record, and its tag, carry the moment before its snapshot was resolved. Whatever is acknowledged later is later
  than that moment, or waits in the journal, or moves the head's content: each of them makes it stale.
- The record is written after the file is in its place. A crash between the two leaves a file that is newer than its
  record says.
- Who makes exports of a dataset holds a lease on them, and renews it before each file is put in its place.
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

from tarn.datasets import registry as datasets
from tarn.datasets.documents import replace_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import export_leases
from tarn.errors import Locked, LockLost, SnapshotGone, SnapshotNotFound, TarnError
from tarn.lake import catalog, snapshots
from tarn.lake import export_deltas as deltas
from tarn.lake import export_records as exports
from tarn.lake.commit import Reached
from tarn.lake.export_records import ExportState, RequestedFormat
from tarn.lake.leases import Lease, Leases
from tarn.model.cancellation import checked
from tarn.model.dataset import DatasetConfig
from tarn.model.export import ExportRecord, Kind, OmittedEdges
from tarn.model.ids import new_id, now
from tarn.model.job import (
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
from tarn.model.names import LAKEHOUSE
from tarn.model.ranges import EVERYTHING
from tarn.model.ranges import Range as KeyRange
from tarn.model.snapshot import Snapshot
from tarn.model.statistics import Statistics
from tarn.pipeline.jobs.flush import Flush, Kernels
from tarn.pipeline.jobs.rewrite import run_tasks
from tarn.pipeline.jobs.split_ranges import split_range
from tarn.pipeline.tasks.export_tasks import ExportedRange as Range
from tarn.pipeline.tasks.export_tasks import ExportRange, Recount
from tarn.pipeline.tasks.kernel import AnyTask
from tarn.query.active_reads import ActiveReads
from tarn.query.diff import files_of_one
from tarn.settings import Settings
from tarn.storage import versions
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)

RETRY_DELAY = timedelta(seconds=2)
"""Until a dataset's exports are looked at again that somebody else is making."""

GOES_ON = (Kind.STATISTICS, Kind.DELTA)
"""What is made of the last one and of what changed since, where that can be told."""

MOST_RECOUNTED = 20_000
"""Rows of files that only one of two snapshots has, up to which it is looked what changed between them."""

MOST_COUNTED_HERE = 1_000_000
"""Rows that are counted by the worker itself."""

KEPT_DELTAS = 100
"""Deltas that are kept."""

FRESH = "it is fresh"


class _Run(NamedTuple):
    """One run: of what, for whom, and under which version."""

    dataset: Dataset
    config: DatasetConfig
    asked: RequestedFormat
    state: ExportState
    snapshot: Snapshot | None
    resolved: datetime
    lease: Lease
    version: str
    base: int | None = None
    """The snapshot that the last delta ends at; None: there is none, or it is given up, and all begins anew."""


class Exports:
    """Makes exports."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        flush: Flush,
        kernels: Callable[[], Kernels],
        running: ActiveReads,
        reached: Reached = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._flush = flush
        self._kernels = kernels
        self._running = running
        self._reached = reached
        self._seconds = settings.lease_seconds
        self._public_url = settings.public_url
        self._leases = Leases(database, store, new_id(), settings.lease_seconds, export_leases, shown=False)

    def export(self, dataset: Dataset, options: ExportOptions, report: Report) -> ExportResult:
        """Make some exports, where they are not fresh or it is insisted on."""
        done = self._run(dataset, [kind for kind in Kind if kind in options.kinds], options.force, report)
        return ExportResult(operation="export", **done.model_dump())

    def make(self, dataset: Dataset, options: MakeOptions, report: Report) -> MakeResult:
        """Make every export that is not fresh."""
        return MakeResult(operation="make", **self._run(dataset, list(Kind), options.force, report).model_dump())

    def _run(self, dataset: Dataset, kinds: Sequence[Kind], force: bool, report: Report) -> Exported:
        """Flush, resolve the head, and make of it what is stale. Run again after a crash it does the rest.

        Raises NotYet while another worker makes exports of the dataset, LockLost, and whatever keeps it from it.
        """
        config, tag = datasets.read(self._store, dataset)
        asked = RequestedFormat(config.compression, tag)
        if not force:
            state = self._state(dataset)
            if all(state.stale(kind, asked) is None for kind in kinds):
                skipped = [_skipped(state.made[kind], FRESH) for kind in kinds]
                return Exported(
                    snapshot=state.head.id, version=None, made=[], skipped=skipped, invalid=_most_invalid(skipped)
                )
        flushed = self._flush.run([dataset], lambda: report(None))[dataset.id]
        if flushed.error is not None:
            raise flushed.error
        with self._held(dataset) as lease, self._reading(dataset) as hold:
            resolved = now()
            state = self._state(dataset)
            hold(min([state.head.seq, *(made.seq for kind, made in state.made.items() if kind in GOES_ON)]))
            self._reached("resolved")
            snapshot = None if state.head.id is None else snapshots.read(self._store, dataset, state.head.seq)
            run = _Run(dataset, config, asked, state, snapshot, resolved, lease, _version(state))
            return self._made(run, kinds, force, report)

    def _made(self, run: _Run, kinds: Sequence[Kind], force: bool, report: Report) -> Exported:
        wanted = {kind: reason for kind in kinds if (reason := _reason(run, kind, force)) is not None}
        contents = [kind for kind in wanted if kind is not Kind.INDEX]
        if Kind.DELTA in contents and (last := self._last(run, Kind.DELTA)) is not None:
            run = run._replace(base=last.seq)
        counts = self._recounted(run) if Kind.STATISTICS in contents and not force else None
        scanned = [kind for kind in contents if kind is not Kind.STATISTICS or counts is None]
        if scanned == [Kind.STATISTICS] and (counts := self._counted(run)) is not None:
            scanned = []
        ranges = self._ranges(run, scanned, report) if scanned else []
        if counts is None:
            counts = sum((one.statistics for one in ranges if one.statistics is not None), Statistics())
        self._reached("built")
        made: list[MadeExport] = []
        for kind in contents:
            report(None)
            one = self._put_counts(run, counts) if kind is Kind.STATISTICS else self._put(run, kind, ranges)
            edges = _omitted_edges(run, ranges) if kind is Kind.GRAPH else None
            made.append(
                MadeExport(
                    kind=kind,
                    name=one.name,
                    size=one.size,
                    reason=wanted[kind],
                    invalid=one.invalid,
                    omitted_edges=edges,
                )
            )
        self._sweep(run)
        skipped = [self._left(run, kind, force) for kind in kinds if kind not in wanted and kind is not Kind.INDEX]
        if Kind.INDEX in kinds:
            state = self._state(run.dataset)
            after = run._replace(state=state)
            reason = wanted.get(Kind.INDEX) or state.behind(run.asked)
            if reason is None:
                skipped.append(self._left(after, Kind.INDEX, force))
            else:
                one = self._put_index(after)
                made.append(MadeExport(kind=Kind.INDEX, name=one.name, size=one.size, reason=reason))
        invalid = _most_invalid([*made, *skipped])
        kinds_made = [one.kind for one in made]
        log.info("exported", dataset=run.dataset.name, seq=run.state.head.seq, made=kinds_made, invalid=invalid)
        version = run.version if made else None
        return Exported(snapshot=run.state.head.id, version=version, made=made, skipped=skipped, invalid=invalid)

    # What is made of statements

    def _ranges(self, run: _Run, kinds: Sequence[Kind], report: Report) -> list[Range]:
        """A range after the other, each with a part of every file."""
        folder = run.dataset.layout.export_run(new_id())
        self._sweep(run)
        kernels = self._kernels()
        files = () if run.snapshot is None else run.snapshot.statements.files
        target = run.config.target_file_bytes
        parts = split_range(self._store, run.dataset, target, EVERYTHING, files, kernels.cores)
        tasks: list[tuple[AnyTask, int]] = [
            (self._task(run, number, keys, kinds, folder), rows) for number, (keys, rows) in enumerate(parts)
        ]
        return [output.exported for output in run_tasks(kernels, tasks, report) if output.exported is not None]

    def _counted(self, run: _Run) -> Statistics | None:
        """The statistics of a store that is counted sooner than Spark is asked to; None: let it do so."""
        files = () if run.snapshot is None else run.snapshot.statements.files
        if sum(file.rows for file in files) > MOST_COUNTED_HERE:
            return None
        output = self._kernels().run_here(self._task(run, 0, EVERYTHING, [Kind.STATISTICS], folder=""))
        if isinstance(output, TarnError) and output.retryable:
            raise output
        # What goes beyond the memory of one task is for several.
        return None if isinstance(output, TarnError) or output.exported is None else output.exported.statistics

    def _task(self, run: _Run, number: int, keys: KeyRange, kinds: Sequence[Kind], folder: str) -> ExportRange:
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

    def _last(self, run: _Run, kind: Kind) -> ExportRecord | None:
        """The last export of a kind, if its snapshot is still there to be compared with."""
        made = run.state.made.get(kind)
        if made is None or made.snapshot is None or run.snapshot is None:
            return None
        try:
            with self._database.read() as connection:
                snapshots.find(connection, run.dataset, made.snapshot)
        except (SnapshotGone, SnapshotNotFound):
            return None
        return made

    def _recounted(self, run: _Run) -> Statistics | None:
        """The last statistics with what changed since; None: count everything."""
        last = self._last(run, Kind.STATISTICS)
        if last is None or run.snapshot is None:
            return None
        former = snapshots.read(self._store, run.dataset, last.seq)
        rows = sum(file.rows for file in files_of_one(former.statements, run.snapshot.statements))
        if rows > MOST_RECOUNTED:
            return None
        try:
            text = self._store.get(run.dataset.layout.export(Kind.STATISTICS, last.name))
            known = Statistics.parsed(orjson.loads(text))
        except (Missing, ValueError):
            return None
        if hashlib.sha1(text, usedforsecurity=False).hexdigest() != last.sha1:
            return None
        task = Recount(0, run.dataset.name, run.dataset.id, last.seq, run.snapshot.seq)
        output = self._kernels().run_here(task)
        if isinstance(output, TarnError):
            raise output
        change = None if output.exported is None else output.exported.exchanged
        return None if change is None else known.replaced(change.former, change.present)

    def _put_counts(self, run: _Run, counts: Statistics) -> ExportRecord:
        document = {"dataset": run.dataset.name, "snapshot": run.state.head.id, "version": run.version}
        detail = {"entities": counts.entities, "things": counts.things, "invalid": counts.invalid}
        return self._put_document(run, Kind.STATISTICS, _json(document | counts.document()), detail)

    def _put(self, run: _Run, kind: Kind, ranges: Sequence[Range]) -> ExportRecord:
        name = kind.form.named(run.config.compression)
        joining = _JoinedParts(self._store, [one.parts[kind] for one in ranges])

        def joined() -> Iterator[bytes]:
            """What is to be in its place, if this is still whose place it is to fill when it is whole."""
            yield from joining
            self._reached(f"{kind} joined")
            self._leases.renew(run.lease)

        store, former, moment = self._store, run.dataset.layout.versions, run.resolved
        detail: dict[str, Any] = {}
        if kind.assembles:
            detail = {"invalid": sum(one.invalid.get(kind, 0) for one in ranges)}
        if kind is Kind.DELTA:
            detail |= self._keep_delta(run, joined(), joining)
            kept = run.dataset.layout.export_delta(detail["kept"][-1]["name"])
            self._replace(run, kind, name, lambda path: versions.replace_with(store, path, former, kept, moment))
        else:
            self._replace(run, kind, name, lambda path: versions.replace_stream(store, path, former, joined(), moment))
        made = self._record(run, kind, name, joining.size, joining.sha1, detail)
        if kind is Kind.DELTA:
            self._tell_deltas(run, made)
        return made

    def _put_document(self, run: _Run, kind: Kind, text: bytes, detail: dict[str, Any]) -> ExportRecord:
        name = kind.form.named(None)
        self._leases.renew(run.lease)
        former = run.dataset.layout.versions
        self._replace(run, kind, name, lambda path: versions.replace(self._store, path, former, text, run.resolved))
        sha1 = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        return self._record(run, kind, name, len(text), sha1, detail)

    def _replace(self, run: _Run, kind: Kind, name: str, put: Callable[[str], object]) -> None:
        """Put a file in its place; one that had another name goes to the former versions."""
        put(run.dataset.layout.export(kind, name))
        self._reached(f"{kind} put")
        former = run.state.made.get(kind)
        if former is not None and former.name != name:
            path = run.dataset.layout.export(kind, former.name)
            versions.retire(self._store, path, run.dataset.layout.versions, run.resolved)

    def _record(self, run: _Run, kind: Kind, name: str, size: int, sha1: str, detail: dict[str, Any]) -> ExportRecord:
        head = run.state.head
        made = ExportRecord(
            kind, name, head.id, head.seq, head.content, run.resolved, now(), size, sha1, run.version, detail
        )
        with self._database.write() as connection:
            exports.record(connection, run.dataset, made)
            exports.record_event(connection, run.dataset, made)
        self._reached(f"{kind} recorded")
        self._show(run, kind)
        return made

    def _left(self, run: _Run, kind: Kind, force: bool) -> SkippedExport:
        """An export that says what the head does already: then so it does at this moment."""
        made = run.state.made[kind]
        if run.state.stale(kind, run.asked) is None:
            return _skipped(made, FRESH)
        made = made._replace(resolved=run.resolved)
        with self._database.write() as connection:
            exports.record(connection, run.dataset, made)
        self._show(run, kind)
        if kind is Kind.DELTA:
            self._tell_deltas(run, made)
        how = "nothing changed since the last one" if force else "what is visible has not changed"
        return _skipped(made, how)

    def _show(self, run: _Run, kind: Kind) -> None:
        """The tag in the layout, after the fact."""
        try:
            path = run.dataset.layout.tag(LAKEHOUSE, kind.form.tag)
            self._store.put_hint(path, run.resolved.isoformat().encode())
        except TarnError as error:
            log.warning("a tag is not shown", dataset=run.dataset.name, problem=error.slug)

    # Deltas

    def _keep_delta(self, run: _Run, chunks: Iterator[bytes], joining: "_JoinedParts") -> dict[str, Any]:
        """Keep a delta under its version; which ones are kept then. What SQL does not know of is not among them:
        whoever died over it began at the same snapshot as this one."""
        layout = run.dataset.layout
        made = run.state.made.get(Kind.DELTA)
        name = run.version + Kind.DELTA.form.named(run.config.compression).removeprefix("entities.delta")
        self._store.put_stream(layout.export_delta(name), chunks)
        goes_on = made is not None and run.base is not None
        one = {
            "version": run.version,
            "name": name,
            "from": made.version if made is not None and goes_on else None,
            "snapshot": run.state.head.id,
            "content": run.state.head.content,
            "size": joining.size,
            "restart": not goes_on or deltas.needs_restart(run.state.made),
        }
        known = deltas.kept_deltas(run.state.made) if goes_on else []
        return {"kept": [*known, one][-KEPT_DELTAS:]}

    def _tell_deltas(self, run: _Run, made: ExportRecord) -> None:
        """Tell of the deltas that are kept, once SQL knows of them, and delete all others."""
        layout = run.dataset.layout
        self._leases.renew(run.lease)
        self._store.put(layout.delta_index, _json(deltas.index(run.dataset.name, made, self._public_url)))
        names = {each["name"] for each in made.detail["kept"]}
        gone = [entry.path for entry in self._store.list(layout.export_deltas)]
        self._store.delete([path for path in gone if path.rsplit("/", 1)[-1] not in names])

    # The index

    def _put_index(self, run: _Run) -> ExportRecord:
        """Under the lock of whoever changes the configuration, which the index repeats."""
        head = run.state.head
        self._leases.renew(run.lease)
        with self._database.write() as connection:
            datasets.lock(connection, run.dataset)
            config, tag = datasets.read(self._store, run.dataset)
            known = exports.records_of(connection, run.dataset)
            text = catalog.index_of(config, known, self._public_url)
            name, told = Kind.INDEX.form.name, exports.index_detail(known, tag)
            made = ExportRecord(
                Kind.INDEX, name, head.id, head.seq, head.content, run.resolved, now(), 0, "", run.version, told
            ).of(text)
            replace_document(connection, self._store, run.dataset.layout.index, run.dataset.layout.versions, text)
            self._reached("index put")
            exports.record(connection, run.dataset, made)
            exports.record_event(connection, run.dataset, made)
        self._show(run, Kind.INDEX)
        catalog.publish(self._database, self._store, self._public_url)
        return made

    # Around it

    def _state(self, dataset: Dataset) -> ExportState:
        with self._database.read() as connection:
            return exports.state(connection, dataset)

    def _sweep(self, run: _Run) -> None:
        self._store.delete([entry.path for entry in self._store.list(run.dataset.layout.export_parts)])

    @contextmanager
    def _held(self, dataset: Dataset) -> Iterator[Lease]:
        """Nobody else makes exports of the dataset meanwhile; the lease is kept alive beside the work."""
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
    def _reading(self, dataset: Dataset) -> Iterator[Callable[[int], None]]:
        """No vacuum takes what is read meanwhile: nothing at all, until the oldest snapshot that is read is told."""
        hold = self._running.begin(dataset.id)

        def oldest(seq: int) -> None:
            hold.seq = seq

        try:
            yield oldest
        finally:
            self._running.end(hold)


class _JoinedParts:
    """Parts one after the other, measured and hashed as they pass."""

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


def _skipped(made: ExportRecord, reason: str) -> SkippedExport:
    return SkippedExport(kind=made.kind, reason=reason, invalid=made.invalid)


def _most_invalid(files: Sequence[MadeExport | SkippedExport]) -> int | None:
    """The most entities that one of these files leaves out; None if it is known of none that may leave some out."""
    of_entities = [one.invalid for one in files if one.kind.assembles]
    known = [count for count in of_entities if count is not None]
    return max(known, default=None if of_entities else 0)


def _reason(run: _Run, kind: Kind, force: bool) -> str | None:
    """Why an export is to be made; None: it is not."""
    moved = run.state.has_moved(kind, run.asked)
    if moved is not None:
        return moved
    if kind is Kind.INDEX:
        return "it was asked for" if force else run.state.behind(run.asked)
    # A delta of nothing, in the place of the last one, would take that from whoever has not fetched it yet.
    return "it was asked for" if force and kind is not Kind.DELTA else None


def _omitted_edges(run: _Run, ranges: Sequence[Range]) -> OmittedEdges | None:
    """Relationships that are not in the graph; None: all are."""
    omitted = OmittedEdges()
    for one in ranges:
        if one.omitted_edges is not None:
            omitted.merge(one.omitted_edges)
    if not omitted.count:
        return None
    log.warning("a graph is not complete", dataset=run.dataset.name, **omitted.model_dump())
    return omitted


def _version(state: ExportState) -> str:
    """FtM's version of a run; after every earlier one, whatever clocks do."""
    version = Version.new()
    latest = max((made.version for made in state.made.values()), default="")
    if version.id > latest:
        return version.id
    return Version(Version.from_string(latest).dt + timedelta(seconds=1), version.tag).id


def _json(document: Mapping[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
