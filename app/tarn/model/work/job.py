"""Jobs: operations, options, states, results and retries of work that a worker runs."""

import random
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from tarn.errors import FieldError, Problem
from tarn.model.datasets.export import INVALID_DESCRIPTION, AnyKind, ExportKind, OmittedEdges
from tarn.model.datasets.finding import Finding
from tarn.model.datasets.ref import StateName
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.encodings import known_encoding
from tarn.model.file import Uri
from tarn.model.ftm.omissions import Omissions
from tarn.model.names import Checksum, DatasetName, FilePath, Origin
from tarn.model.tenant import Level, Strict
from tarn.model.work.backoff import delays

MOST_ATTEMPTS = 20
"""Attempts after which a job is not retried any more: it cannot be done, or it crashes every worker that runs it."""

RETRY_BASE, RETRY_CAP = 5.0, 300.0
"""Seconds of back-off between attempts: the first bound and the maximum. The wait is at least half the bound."""

LONG_WAIT = timedelta(hours=1)
"""Wait between further attempts of a job that must succeed eventually, after its regular attempts."""


def upper_half(_: float, bound: float) -> float:
    """Return a random wait between half the bound and the bound."""
    return random.uniform(bound / 2, bound)  # noqa: S311 - spreads load, not security relevant


def retry_time(attempts: int, moment: datetime) -> datetime | None:
    """Return when to retry after this many attempts, the last of which failed at `moment`; None: no attempts left."""
    if attempts >= MOST_ATTEMPTS:
        return None
    waits = delays(RETRY_BASE, RETRY_CAP, draw=upper_half)
    return moment + timedelta(seconds=next(islice(waits, attempts - 1, None)))


class ResumeLater(Exception):
    """A job cannot continue now, and is to be resumed at a later time."""

    def __init__(self, until: datetime) -> None:
        super().__init__(f"to be resumed at {until}")
        self.until = until


class JobStopped(Exception):
    """The worker must stop running the job: it was cancelled, another worker owns it, or it is resumed elsewhere."""


class Operation(StrEnum):
    """The operation of a job."""

    FLUSH = "flush"
    DELETE = "delete"
    COMPACT = "compact"
    OPTIMIZE = "optimize"
    VACUUM = "vacuum"
    VERIFY = "verify"
    REVERT = "revert"
    PURGE = "purge"
    EXPORT = "export"
    MAKE = "make"
    CRAWL = "crawl"
    MAPPING = "mapping"

    @property
    def level(self) -> Level:
        """Return the level that its caller needs on the dataset."""
        if self is Operation.MAPPING:
            return Level.WRITE
        return Level.ADMIN if self in (Operation.DELETE, Operation.PURGE) else Level.MAINTAIN

    @property
    def never_given_up(self) -> bool:
        """Return whether it is retried until it succeeds: a half-deleted dataset is hidden and blocks its name, and a
        purge must not stop halfway."""
        return self in (Operation.DELETE, Operation.PURGE)

    def next_try(self, attempts: int, retryable: bool, moment: datetime) -> datetime | None:
        """Return when to retry after this many attempts, the last of which failed at `moment`; None: never."""
        again = retry_time(attempts, moment) if retryable else None
        return moment + LONG_WAIT if again is None and self.never_given_up else again


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class Progress(BaseModel):
    """Progress of a job; `total` is absent while it is unknown."""

    done: int
    total: int | None = None
    unit: str


Report = Callable[[Progress | None], None]
"""Progress callback, called between the steps of a job. Raises if the caller does not own the job any more."""


class FlushOptions(Strict):
    """Options of a flush: none yet."""


class CompactOptions(Strict):
    """Options of a compaction."""

    force: bool = Field(False, description="Rewrite everything, not only the files where it pays off.")


class OptimizeOptions(Strict):
    """Options of merging small files: none yet."""


FLOOR_HOURS = 24
"""Minimum age of snapshots that expire and of unreferenced files that are deleted, unless `override_floor` is set."""


class VacuumOptions(Strict):
    """Options of a vacuum."""

    retention_hours: Annotated[float, Field(ge=0, le=24 * 366 * 100)] | None = Field(
        None, description="Keep snapshots younger than this, instead of those that the dataset's policy keeps."
    )
    dry_run: bool = Field(False, description="Delete nothing, and report what would be deleted.")
    override_floor: bool = Field(
        False, description="Allow less than 24 hours, also for files that no snapshot references."
    )

    @model_validator(mode="after")
    def is_above_floor(self) -> Self:
        if self.retention_hours is not None and self.retention_hours < FLOOR_HOURS and not self.override_floor:
            raise ValueError(f"`retention_hours` below {FLOOR_HOURS} needs `override_floor`")
        return self


class VerifyOptions(Strict):
    """Options of a verification."""

    repair: bool = Field(False, description="Repair what can be rebuilt from other data.")


class RevertOptions(Strict):
    """Options of a revert: go back to the state of a snapshot, or undo the changes of one snapshot."""

    to: StateName | None = Field(
        None, description="The snapshot whose state to restore: its id or number, a ref, or a time."
    )
    undo: StateName | None = Field(
        None,
        description="The snapshot whose changes to undo, except where later snapshots changed the same statements.",
    )
    message: Annotated[str, Field(max_length=10_000)] | None = None

    @model_validator(mode="after")
    def names_one_snapshot(self) -> Self:
        if (self.to is None) == (self.undo is None):
            raise ValueError("set either `to` or `undo`, not both")
        return self


class PurgeOptions(Strict):
    """Options of a purge: the entities to erase permanently, including their history."""

    entity_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=1, max_length=10_000)
    ]
    confirm: Literal[True] = Field(
        description="Confirms that every older snapshot expires, and that nothing can be restored."
    )


class ExportOptions(Strict):
    """Options of an export."""

    kinds: Annotated[list[AnyKind], Field(min_length=1, max_length=100)] = Field(
        description="Which exports to make, if they are not fresh: kinds, or file names."
    )
    force: bool = Field(False, description="Make exports even if they are fresh.")


class MakeOptions(Strict):
    """Options of a make, which exports everything that is not fresh."""

    force: bool = Field(False, description="Make exports even if they are fresh.")


class Existing(StrEnum):
    """What a crawl does with files that the archive already has."""

    SKIP_PATH = "skip_path"
    SKIP_CHECKSUM = "skip_checksum"
    OVERWRITE = "overwrite"


Pattern = Annotated[str, Field(min_length=1, max_length=1024)]


class CrawlOptions(Strict):
    """Options of a crawl: where to find files, and which to add to the archive."""

    uri: Uri
    prefix: Annotated[str, Field(max_length=FilePath.longest)] = Field(
        "", description="Prefix of the paths, relative to the URI."
    )
    glob: Annotated[list[Pattern], Field(max_length=100)] = Field(
        default=[],
        description="Only paths that match one of these patterns; `*` matches any characters, including slashes.",
    )
    exclude: Annotated[list[Pattern], Field(max_length=100)] = Field(
        default=[], description="No paths that match one of these patterns."
    )
    existing: Existing = Field(
        Existing.SKIP_PATH,
        description="Skip a file whose path the archive has, without reading it; or skip one whose content it has, at "
        "any path; or add every file. A path whose content has changed gets a second file, as with an upload.",
    )
    origin: Origin = Field(Origin("crawl"), description="Origin of the files and of their statements.")


class ProcessOptions(Strict):
    """Options of processing a mapping: how to read the source file, and whether to process it without a change."""

    force: bool = Field(
        False, description="Process it even if neither the mapping nor these options changed since the last run."
    )
    encoding: Annotated[str, Field(max_length=64), AfterValidator(known_encoding)] | None = Field(
        None,
        description="Character encoding of the file; by default UTF-8, or the encoding of the file's byte order mark.",
    )
    delimiter: Annotated[str, Field(pattern=r'^[^\r\n" ]$')] | None = Field(
        None, description="Field separator; by default detected from the header: comma, semicolon, tab or vertical bar."
    )
    sheet: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        None, description="Sheet of a spreadsheet (XLSX) to read; by default the first."
    )


class MappingOptions(ProcessOptions):
    """Options of a mapping job."""

    content_hash: Checksum


class MadeSnapshot(BaseModel):
    """A snapshot that a job published."""

    dataset: DatasetName
    seq: int
    id: str

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        return cls(dataset=snapshot.dataset, seq=snapshot.seq, id=snapshot.id)


class FlushResult(BaseModel):
    """Result of a flush."""

    operation: Literal["flush"]
    statements: int = Field(description="Number of new statements; statements that existed already are not counted.")
    snapshots: list[MadeSnapshot]

    @classmethod
    def of(cls, snapshots: Sequence[Snapshot]) -> Self:
        return cls(
            operation="flush",
            statements=sum(snapshot.rows.added for snapshot in snapshots),
            snapshots=[MadeSnapshot.of(snapshot) for snapshot in snapshots],
        )


class DeleteResult(BaseModel):
    """Result of a delete."""

    operation: Literal["delete"]
    files: int = Field(description="Files deleted by the last attempt.")


class Rewritten(BaseModel):
    """Files that were rewritten. Without a snapshot, nothing needed rewriting."""

    snapshot: MadeSnapshot | None
    removed: int = Field(description="Files that the new snapshot does not contain any more.")
    added: int = Field(description="Files that replace them.")
    rows: int = Field(description="Rows written.")


class CompactResult(Rewritten):
    """Result of a compaction."""

    operation: Literal["compact"]


class OptimizeResult(Rewritten):
    """Result of merging small files."""

    operation: Literal["optimize"]


class DeletedFile(BaseModel):
    """A file that is no longer needed."""

    path: str
    size: int


class VacuumResult(BaseModel):
    """Result of a vacuum; for a dry run, what it would have done."""

    operation: Literal["vacuum"]
    dry_run: bool
    snapshot: MadeSnapshot | None
    retained_from: int = Field(description="The number of the oldest snapshot that is kept.")
    expired: int = Field(description="Snapshots that expired.")
    files: int = Field(description="Files that were deleted.")
    size: int = Field(description="Their bytes.")
    left: int = Field(description="Files not deleted yet because a running read needs them.")
    first_files: list[DeletedFile] = Field(description="The first thousand files.")


class VerifyResult(BaseModel):
    """Result of a verification: how much was checked, and the findings."""

    operation: Literal["verify"]
    snapshots: int
    files: int
    size: int
    findings: list[Finding] = Field(description="The first thousand findings.")
    found: int = Field(description="Total number of findings; 0: everything is consistent.")
    harmless: int = Field(description="How many findings are harmless.")
    repaired: int = Field(description="How many findings were repaired.")


class RevertResult(BaseModel):
    """Result of a revert. Without a snapshot, there was nothing to revert."""

    operation: Literal["revert"]
    snapshot: MadeSnapshot | None
    added: int = Field(description="Statements that are live again.")
    ended: int = Field(description="Statements that are no longer live.")


class PurgeResult(BaseModel):
    """Result of a purge."""

    operation: Literal["purge"]
    snapshot: MadeSnapshot | None
    statements: int
    expired: int = Field(description="Snapshots that expired.")
    refs: list[str] = Field(description="Refs to one of them, which were deleted too.")
    files: int = Field(description="Files that were deleted.")


class MadeExport(BaseModel):
    """An export that a job wrote."""

    kind: ExportKind
    name: str
    size: int
    reason: str = Field(description="Why it was made.")
    invalid: int | None = Field(None, description=INVALID_DESCRIPTION)
    omitted_edges: OmittedEdges | None = Field(
        None,
        description="Relationships omitted from the graph, because one entity becomes at most 10 000; null: none.",
    )


class SkippedExport(BaseModel):
    """An export that a job skipped."""

    kind: ExportKind
    reason: str
    invalid: int | None = Field(None, description=INVALID_DESCRIPTION)


class Exported(BaseModel):
    """Common fields of the results of exports."""

    snapshot: str | None = Field(description="The snapshot that was exported; null: the dataset has none yet.")
    version: str | None = Field(description="FtM version of the exports that were made; null: none was made.")
    made: list[MadeExport]
    skipped: list[SkippedExport]
    invalid: int | None = Field(
        None,
        description="The largest `invalid` of these files, made or skipped: 0 if none of them omits an entity, null if "
        "that is unknown.",
    )


class ExportResult(Exported):
    """Result of an export."""

    operation: Literal["export"]


class MakeResult(Exported):
    """Result of a make."""

    operation: Literal["make"]


class UncrawledFile(BaseModel):
    """A file that could not be added, or a folder that could not be listed."""

    path: str
    reason: str


class CrawlResult(BaseModel):
    """Result of the last attempt of a crawl."""

    operation: Literal["crawl"]
    files: int = Field(description="Files that were added.")
    size: int = Field(description="Their bytes.")
    skipped: int = Field(description="Files skipped because the archive has them already.")
    failed: int = Field(description="Files that could not be added.")
    first_failures: list[UncrawledFile] = Field(description="The first hundred failures.")
    omitted: Omissions = Field(
        default_factory=Omissions,
        description="Values omitted from the Documents and Folders of added files; the reason names the file.",
    )


class MappingResult(BaseModel):
    """Result of processing a mapping."""

    operation: Literal["mapping"]
    content_hash: Checksum
    skipped: str | None = Field(description="Why the mapping was not processed; null: it was processed.")
    rows: int = Field(description="Rows of the file, without its header and blank lines.")
    entities: int
    statements: int = Field(description="Statements written; duplicates within a row are counted once.")
    commit: int | None = Field(
        description="The commit that made them visible and ended the statements of the last run."
    )
    rejected: int = Field(description="Rows that were rejected.")
    errors: list[FieldError] = Field(
        description="The first hundred errors; `line` is the number of the row, where the header is 1."
    )
    missing: list[str] = Field(description="Columns of the mapping that the file does not have.")
    omitted: Omissions = Field(
        default_factory=Omissions,
        description="Values that were omitted from rows that were used; `line` is the row, as in `errors`.",
    )


JobResult = Annotated[
    FlushResult
    | DeleteResult
    | CompactResult
    | OptimizeResult
    | VacuumResult
    | VerifyResult
    | RevertResult
    | PurgeResult
    | ExportResult
    | MakeResult
    | CrawlResult
    | MappingResult,
    Field(discriminator="operation"),
]


class Job(BaseModel):
    """A job."""

    id: str
    operation: Operation
    dataset: DatasetName | None = Field(description="Null: the job concerns several datasets.")
    dataset_id: str | None
    arguments: dict[str, Any]
    tenant: str
    state: JobState
    attempts: int
    created: datetime
    started: datetime | None
    finished: datetime | None
    cancelled: datetime | None = Field(description="When its cancellation was requested.")
    progress: Progress | None
    result: JobResult | None
    problem: Problem | None = Field(
        description="Why it failed; for a job that will be retried, why its last attempt failed."
    )
    not_before: datetime | None = Field(description="Earliest time of the next attempt.")
    disturbed: SkipJsonSchema[datetime | None] = Field(exclude=True)
    """When an attempt last ended without its worker ending it: that worker's last request may still be in progress."""

    @property
    def dataset_ids(self) -> list[str]:
        """Return the ids of all datasets that it concerns."""
        return list(self.arguments.get("dataset_ids", ())) if self.dataset_id is None else [self.dataset_id]

    @property
    def event_stream(self) -> str:
        """Return the stream of its events: that of its dataset, or its own if it concerns several datasets."""
        return self.dataset_id or self.id


class Maintainer(Protocol):
    """Runs maintenance jobs."""

    @property
    def operations(self) -> Collection[Operation]:
        """Return the operations that it supports."""

    def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Run a job and return its result. Idempotent: a rerun does the remaining work. Raises what `report` raises."""
