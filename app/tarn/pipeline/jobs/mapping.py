"""Mapping job: map every row of a source file to entities, which become visible all at once.

Why this happens exactly once:
- A run writes into a stage, whose first part ends all earlier statements of the origin. Nothing of the stage is visible
  until it commits, and then all of it is.
- The run is recorded under the job's id in the transaction that commits the stage. A worker that takes over the job
  finds the record and is done, or aborts the open stage: then the previous worker cannot commit it any more.
- Two jobs on the same mapping have the same outcome as one after the other, because each ends the statements of the
  other.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from threading import Event, Thread
from typing import Any, NamedTuple

import structlog
from sqlalchemy import select

from tarn.access import limits
from tarn.access.audit import AuditedAction
from tarn.archive import mappings
from tarn.archive.mappings import Run, StoredMapping
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.format_versions import JOURNAL_PACKS, may_write
from tarn.db.tables import journal_batches
from tarn.errors import FieldError, FileNotFound, SchemaViolation, StageClosed, TarnError, Unavailable
from tarn.journal import batches, stages
from tarn.journal.batches import OPEN, STAGED, Batch, BatchWithEvents
from tarn.journal.parsing.event_buffer import Events
from tarn.journal.parsing.event_chunks import MOST_FAULTS
from tarn.lake.commit import StepCallback
from tarn.model.datasets.stage import NewStage
from tarn.model.ftm.mapping import origin_of, tag_of
from tarn.model.ftm.omissions import Omissions
from tarn.model.ftm.statement import microseconds
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, TagKey, TenantName
from tarn.model.tenant import Identity
from tarn.model.work.cancellation import checked
from tarn.model.work.job import Job, MappingOptions, MappingResult, Progress, Report
from tarn.pipeline.jobs import spreadsheet
from tarn.pipeline.jobs.flush import TaskRunner
from tarn.pipeline.jobs.flush_plan import pack_into_partitions
from tarn.pipeline.tasks import delimited
from tarn.pipeline.tasks.delimited import Dialect, FilePiece
from tarn.pipeline.tasks.mapping_tasks import MappedRows, MapRows
from tarn.settings import Settings
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

TASK_BYTES = 4 << 20
"""Bytes of a file per task at most; approximate, as files are divided between records."""

WORTH_A_TASK = 256 << 10
"""Bytes below which a file is not divided among more tasks."""

TASKS_PER_CORE_OF_FILE = 8
"""Tasks per core for a file that is not large, so that all cores finish at about the same time."""

TASKS_PER_CORE = 16
"""Tasks per core between two checks whether the job was cancelled."""

BETWEEN_REPORTS = 1.0
"""Seconds between two checks whether the job was cancelled, while a file is decompressed."""

HEAD = 1 << 20
"""Bytes at the beginning of a file from which its encoding and delimiter are detected."""

UNCHANGED = "neither the mapping nor how to read the file has changed since the last run"


class _Run(NamedTuple):
    """One run: its job, mapping, and the stage that it writes."""

    job: Job
    dataset: Dataset
    options: MappingOptions
    stored_mapping: StoredMapping
    act: AuditedAction
    stage: str
    stage_id: int
    moment: int
    in_packs: bool


class _Source(NamedTuple):
    """A readable source file: its header, and pieces of complete records after it."""

    header: tuple[str, ...]
    missing: list[str]
    dialect: Dialect
    pieces: Iterator[FilePiece]
    path: str | None
    """The stored file that the pieces are ranges of; None if the text is converted and no stored file contains it."""
    size: int


class Mappings:
    """The mapping job."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        task_runner: Callable[[], TaskRunner],
        reached: StepCallback = lambda _: None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._store = store
        self._task_runner = task_runner
        self._reached = reached

    def run(self, job: Job, dataset: Dataset, options: MappingOptions, report: Report) -> MappingResult:
        """Process a mapping, unless nothing changed since the last run. Run again after a crash, it starts from the
        beginning.

        Raises MappingNotFound, FileNotFound, SchemaViolation for a file that has none of the columns, InvalidFormat and
        BodyTooLarge for one that cannot be read, QuotaExceeded, Backpressure.
        """
        self._abort_former_stage(job, dataset)
        stored_mapping = mappings.read(self._store, dataset, options.content_hash)
        with self._database.read() as connection:
            last = mappings.last_run(connection, dataset, options.content_hash)
        if last is not None and last.job == job.id:
            return MappingResult.model_validate(last.result)
        if last is not None and not options.force and (last.mapping, last.form) == (stored_mapping.tag, _form(options)):
            return _result(options, skipped=UNCHANGED)
        source = self._source(dataset, options, stored_mapping, report)
        try:
            with self._open_stage(job, dataset, options, stored_mapping) as run:
                return self._map(run, source, report)
        except StageClosed as error:
            raise Unavailable(
                "the stage of the run was closed meanwhile; the run is restarted", retry_after=1
            ) from error

    def _map(self, run: _Run, source: _Source, report: Report) -> MappingResult:
        task_runner = self._task_runner()
        order: list[int | None] = []
        """One entry for each piece, in their order: the number of its task, or None for a skipped line."""
        outputs: dict[int, MappedRows] = {}
        done = 0
        tasks = self._tasks(run, source, order)
        while batch := list(islice(tasks, task_runner.cores * TASKS_PER_CORE)):
            report(Progress(done=min(done, source.size), total=source.size, unit="bytes"))
            sized = [(task, task.end - task.start) for task in batch]
            for number, mapped in task_runner.run(pack_into_partitions(sized, task_runner.cores)):
                if isinstance(mapped, TarnError):
                    raise mapped
                outputs[number] = mapped
            done += sum(size for _, size in sized)
        self._reached("mapped")
        report(Progress(done=source.size, total=source.size, unit="bytes"))
        return self._commit(run, source, [None if number is None else outputs[number] for number in order])

    def _tasks(self, run: _Run, source: _Source, order: list[int | None]) -> Iterator[MapRows]:
        """Yield one task for each piece, in their order. A piece of converted text is first stored as a temporary
        file."""
        number = 0
        for piece in checked(source.pieces):
            if piece.is_skipped:
                order.append(None)
                continue
            path, start = source.path, piece.start
            if path is None:
                path, start = run.dataset.layout.upload_part(run.stage, f"{number:06d}"), 0
                self._store.put(path, piece.data)
            order.append(number)
            yield MapRows(
                number=number,
                dataset=run.dataset.name,
                path=path,
                start=start,
                end=start + len(piece.data),
                encoding=source.dialect.encoding,
                delimiter=source.dialect.delimiter,
                header=source.header,
                mapping=run.stored_mapping.text,
                origin=origin_of(run.options.content_hash),
                moment=run.moment,
                stage=run.stage_id,
                tenant=run.job.tenant,
                expiry=self._settings.batch_expiry,
                in_packs=run.in_packs,
            )
            number += 1

    # The file

    def _source(self, dataset: Dataset, options: MappingOptions, mapping: StoredMapping, report: Report) -> _Source:
        path = dataset.layout.blob_data(options.content_hash)
        entry = self._store.head(path)
        if entry is None:
            raise FileNotFound(f"there is no file {options.content_hash} in the archive of {dataset.name!r}")
        begin = self._store.get_range(path, 0, HEAD)
        target = min(TASK_BYTES, max(WORTH_A_TASK, entry.size // (self._task_runner().cores * TASKS_PER_CORE_OF_FILE)))
        # A piece ends where a block ends: larger blocks would leave cores without a task.
        blocks: Iterable[bytes] = checked(self._store.stream(path, chunk_size=target))
        is_workbook = begin.startswith(spreadsheet.ZIP)
        is_compressed = is_workbook or begin.startswith(delimited.GZIP)
        if is_workbook:
            blocks = spreadsheet.as_text(blocks, options.sheet, self._settings.max_body_bytes)
            options = options.model_copy(update={"encoding": "utf-8", "delimiter": ","})
        elif is_compressed:
            blocks = delimited.decompress(blocks, self._settings.max_body_bytes)
        if is_compressed:
            blocks = _with_reports(blocks, report, entry.size)
            begin, blocks = _peek(blocks)
        encoding = options.encoding or delimited.detect_encoding(begin)
        is_direct = delimited.is_transparent(encoding) and (b"\n" in begin or b"\r" not in begin)
        if not is_direct:
            blocks, encoding = delimited.as_utf8(blocks, encoding), "utf-8"
            begin, blocks = _peek(blocks)
        marked = len(delimited.MARK) if encoding == "utf-8" and begin.startswith(delimited.MARK) else 0
        columns = sorted({name for query in mapping.document.ftm(dataset.name) for name in _columns(query)})
        delimiter = options.delimiter or delimited.detect_delimiter(begin[marked:], encoding, columns)
        dialect = Dialect(encoding, delimiter)
        pieces = delimited.pieces(
            _skip_bytes(blocks, marked), dialect, target, self._settings.max_record_bytes, start=marked
        )
        first = next(pieces, FilePiece(0, b""))
        if first.is_skipped:
            most = self._settings.max_record_bytes
            reason = f"the first row, which is to name the columns, has no end within {most} bytes"
            raise SchemaViolation(f"nothing was changed: {reason}", errors=[FieldError(line=1, reason=reason)])
        header, length = dialect.first(first.data)
        if len(header) > delimited.MOST_COLUMNS:
            reason = f"the first row names {len(header)} columns, at most {delimited.MOST_COLUMNS} are read"
            raise SchemaViolation(f"nothing was changed: {reason}", errors=[FieldError(line=1, reason=reason)])
        missing = [name for name in columns if name not in header]
        if len(missing) == len(columns):
            reason = f"the file has none of the columns {', '.join(missing[:10])}; it begins with {header[:10]}"
            raise SchemaViolation(
                f"nothing was changed: {reason}"[:2000], errors=[FieldError(line=1, reason=reason[:2000])]
            )
        remainder = first._replace(start=first.start + length, data=first.data[length:])
        return _Source(
            header=tuple(header),
            missing=missing,
            dialect=dialect,
            pieces=chain([remainder] if remainder.data else [], pieces),
            path=None if is_compressed or not is_direct else path,
            size=entry.size,
        )

    def _delete_pieces(self, run: _Run) -> None:
        try:
            self._store.delete([entry.path for entry in self._store.list(run.dataset.layout.upload(run.stage))])
        except TarnError as error:  # vacuum deletes them later
            log.warning(
                "temporary pieces of a file could not be deleted",
                dataset=run.dataset.name,
                job=run.job.id,
                problem=error.slug,
            )

    # The stage

    def _abort_former_stage(self, job: Job, dataset: Dataset) -> None:
        """Abort the open stage of an earlier attempt at this job, so that it cannot commit any more."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(journal_batches.c.id, journal_batches.c.metadata).where(
                    journal_batches.c.dataset_id == dataset.id,
                    journal_batches.c.tenant == LAKEHOUSE,
                    journal_batches.c.is_stage,
                    journal_batches.c.state == OPEN,
                )
            ).all()
        for row in rows:
            if row.metadata.get("job") == job.id:
                self._abort(row.id)

    def _abort(self, stage_id: int) -> None:
        """Abort a stage and its parts; their rows are deleted in short transactions."""
        with self._database.write() as connection:
            ended = stages.mark_aborted(connection, stage_id)
        for batch in ended:
            if batch != stage_id:
                batches.purge(self._database, batch)

    @contextmanager
    def _open_stage(
        self, job: Job, dataset: Dataset, options: MappingOptions, stored_mapping: StoredMapping
    ) -> Iterator[_Run]:
        """Create an internal stage, invisible to tenants, with a first part that ends the origin's earlier
        statements."""
        origin = origin_of(options.content_hash)
        tenant = TenantName(job.tenant)
        target = f"/v1/datasets/{dataset.name}/mappings/{options.content_hash}"
        act = AuditedAction(Identity(tenant, "worker", (), 0, 1), "process_mapping", target, job.id)
        new = NewStage(origin=origin, message=f"mapping {options.content_hash}", metadata={"job": job.id})
        ending = Events()
        ending.erase(None, origin)
        with self._database.write() as connection:
            uid = stages.create(connection, self._settings, dataset, LAKEHOUSE, new).id
            stage_id = stages.find(connection, dataset, LAKEHOUSE, uid).id
            part = Batch(dataset, tenant, act, origin, stage_id)
            batches.write_small(connection, self._settings, [BatchWithEvents(part, ending)])
            in_packs = may_write(connection, JOURNAL_PACKS)
        run = _Run(job, dataset, options, stored_mapping, act, uid, stage_id, microseconds(now(), "now"), in_packs)
        with self._keep_stage_open(stage_id):
            try:
                self._reached("staged")
                yield run
            except BaseException:
                self._abort_if_possible(run)
                raise
            finally:
                self._delete_pieces(run)

    @contextmanager
    def _keep_stage_open(self, stage_id: int) -> Iterator[None]:
        """Renew the stage so that it does not expire while its tasks run."""
        over = Event()

        def keep() -> None:
            while not over.wait(self._settings.stage_expiry / 3):
                try:
                    with self._database.write() as connection:
                        batches.hold_stage(connection, self._settings, stage_id)
                except StageClosed:
                    return
                except TarnError as error:
                    log.warning("a stage could not be renewed", stage=stage_id, problem=error.slug)

        keeper = Thread(target=keep, name="keeps a stage open", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    def _abort_if_possible(self, run: _Run) -> None:
        try:
            self._abort(run.stage_id)
        except TarnError as error:  # the stage was never visible; it expires, and the sweep deletes it
            log.warning(
                "a stage could not be aborted and is left to expire",
                dataset=run.dataset.name,
                job=run.job.id,
                problem=error.slug,
            )

    def _commit(self, run: _Run, source: _Source, mapped: Sequence[MappedRows | None]) -> MappingResult:
        """Commit the stage and record the run, in one transaction."""
        parts = [part for part in mapped if part is not None]
        rejected, errors = _bad_rows(mapped, self._settings.max_record_bytes)
        statements = sum(part.statements for part in parts)
        result = _result(
            run.options,
            rows=sum(part.rows for part in parts) + sum(part is None for part in mapped),
            entities=sum(part.entities for part in parts),
            statements=statements,
            rejected=rejected,
            errors=errors,
            missing=source.missing,
            omitted=_omitted_values(mapped),
        )
        expected = {part.batch for part in parts}
        with self._database.write() as connection:
            batches.hold_stage(connection, self._settings, run.stage_id)
            of_stage = journal_batches.c.stage == run.stage_id
            rows = connection.execute(select(journal_batches.c.id, journal_batches.c.state).where(of_stage)).all()
            erase = min(row.id for row in rows)
            # Batches of task attempts that Spark repeated are duplicates: abort them.
            for row in rows:
                if row.id not in expected and row.id != erase:
                    batches.mark_aborted(connection, journal_batches.c.id == row.id)
            if not expected <= {row.id for row in rows if row.state == STAGED}:
                raise StageClosed("a part of the run is gone: it expired, or was aborted")
            limits.reserve(connection, TenantName(run.job.tenant), self._settings, statements=statements)
            commit, _, _ = stages.commit(connection, run.dataset, LAKEHOUSE, [run.stage], run.act)
            result = result.model_copy(update={"commit": commit})
            moment = now()
            done = Run(run.job.id, run.stored_mapping.tag, _form(run.options), moment, result.model_dump(mode="json"))
            mappings.record(connection, run.dataset, run.options.content_hash, done)
        self._reached("committed")
        log.info(
            "mapping run committed",
            dataset=run.dataset.name,
            mapping=run.options.content_hash,
            rows=result.rows,
            commit=commit,
        )
        self._write_tag(run, moment.isoformat())
        return result

    def _write_tag(self, run: _Run, moment: str) -> None:
        """Write the tag into the layout; the record in SQL is authoritative."""
        try:
            path = run.dataset.layout.tag(LAKEHOUSE, TagKey(tag_of(run.options.content_hash)))
            self._store.put_hint(path, moment.encode())
        except TarnError as error:
            log.warning("a tag could not be written to the layout", dataset=run.dataset.name, problem=error.slug)


def _form(options: MappingOptions) -> dict[str, Any]:
    """Return the caller's options for reading the file."""
    form = {"encoding": options.encoding, "delimiter": options.delimiter}
    return form if options.sheet is None else form | {"sheet": options.sheet}


def _result(options: MappingOptions, **counts: Any) -> MappingResult:
    defaults: dict[str, Any] = {"rows": 0, "entities": 0, "statements": 0, "rejected": 0, "errors": [], "missing": []}
    values = {"skipped": None, "commit": None} | defaults | counts
    return MappingResult(operation="mapping", content_hash=options.content_hash, **values)


def _columns(query: Any) -> set[str]:
    """Return every column that a query names."""
    return {*query.refs, *(name for name, _ in (*query.source.filters_set, *query.source.filters_not_set))}


def _bad_rows(mapped: Sequence[MappedRows | None], longest: int) -> tuple[int, list[FieldError]]:
    """Return the number of bad rows, and the first of them by their line in the file; the header is line 1."""
    count, errors, before = 0, [], 1
    for part in mapped:
        if part is None:
            count += 1
            before += 1
            errors.append(FieldError(line=before, reason=f"the record does not end within {longest} bytes"))
            continue
        count += part.bad
        errors += [fault.model_copy(update={"line": before + (fault.line or 0)}) for fault in part.faults]
        before += part.records
    return count, errors[:MOST_FAULTS]


def _omitted_values(mapped: Sequence[MappedRows | None]) -> Omissions:
    """Return the omitted values, by the line of their row in the file; the header is line 1."""
    omitted, before = Omissions(), 1
    for part in mapped:
        if part is not None:
            omitted.merge(part.omitted, before)
        before += 1 if part is None else part.records
    return omitted


def _peek(blocks: Iterable[bytes]) -> tuple[bytes, Iterable[bytes]]:
    """Return the beginning, and an iterator over everything including it."""
    remaining = iter(blocks)
    begin = b""
    while len(begin) < HEAD and (block := next(remaining, None)) is not None:
        begin += block
    return begin, chain([begin], remaining)


def _with_reports(blocks: Iterable[bytes], report: Report, size: int) -> Iterator[bytes]:
    """Yield the blocks; call `report`, which raises when the job is cancelled, about once a second."""
    called = time.monotonic()
    for block in blocks:
        if time.monotonic() - called >= BETWEEN_REPORTS:
            report(Progress(done=0, total=size, unit="bytes"))
            called = time.monotonic()
        if block:
            yield block


def _skip_bytes(blocks: Iterable[bytes], count: int) -> Iterator[bytes]:
    """Yield all but the first `count` bytes, which are in the first block."""
    remaining = iter(blocks)
    yield next(remaining, b"")[count:]
    yield from remaining
