"""A job: long work that the API hands to a worker."""

import random
from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from tarn.errors import Fault, Problem
from tarn.model.backoff import delays
from tarn.model.encodings import known_encoding
from tarn.model.export import LEFT_OUT, AnyKind, Kind, OmittedEdges
from tarn.model.file import Uri
from tarn.model.finding import Finding
from tarn.model.names import Checksum, DatasetName, FilePath, Origin
from tarn.model.omissions import Omissions
from tarn.model.ref import StateName
from tarn.model.tenant import Level, Strict

MOST_ATTEMPTS = 20
"""How often a job is begun before it counts as one that cannot be done, or that ends every worker it meets."""

RETRY_BASE, RETRY_CAP = 5.0, 300.0
"""Seconds of back-off between attempts: the first bound, and the last. Half of each is waited at least."""

LONG_WAIT = timedelta(hours=1)
"""Between two tries of what must be done some time, and cannot be done soon."""


def upper_half(_: float, bound: float) -> float:
    """A wait that is drawn, and long enough to be worth it."""
    return random.uniform(bound / 2, bound)  # noqa: S311 - it spreads load, it guards nothing


def retry_time(attempts: int, moment: datetime) -> datetime | None:
    """When to try again after this many attempts, the last of which failed at `moment`; None: they are used up."""
    if attempts >= MOST_ATTEMPTS:
        return None
    waits = delays(RETRY_BASE, RETRY_CAP, draw=upper_half)
    return moment + timedelta(seconds=next(islice(waits, attempts - 1, None)))


class ResumeLater(Exception):
    """A job has done what it could, and is to go on at a later moment."""

    def __init__(self, until: datetime) -> None:
        super().__init__(f"goes on at {until}")
        self.until = until


class Stopped(Exception):
    """Whoever works on a job must stop: it is cancelled, or another worker's by now, or goes on elsewhere."""


class Operation(StrEnum):
    """What a job does."""

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
        """What its caller needs on the dataset."""
        if self is Operation.MAPPING:
            return Level.WRITE
        return Level.ADMIN if self in (Operation.DELETE, Operation.PURGE) else Level.MAINTAIN

    @property
    def never_given_up(self) -> bool:
        """Whether it must end well some time: a dataset half deleted is hidden, and keeps its name from everybody; what
        is to be erased is not half erased."""
        return self in (Operation.DELETE, Operation.PURGE)

    def next_try(self, attempts: int, retryable: bool, moment: datetime) -> datetime | None:
        """When to try again after this many attempts, the last of which failed at `moment`; None: not at all."""
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
    """How far a job is; `total` is absent while it is not known."""

    done: int
    total: int | None = None
    unit: str


Report = Callable[[Progress | None], None]
"""Told how far a job is, between its steps. Raises if the job is no longer the caller's to go on with."""


class FlushOptions(Strict):
    """A flush has no options yet."""


class CompactOptions(Strict):
    """How much is compacted."""

    force: bool = Field(False, description="Everything, and not only where it is worth the rewriting.")


class OptimizeOptions(Strict):
    """Packing small files has no options yet."""


FLOOR_HOURS = 24
"""What is younger is not given up, and a file that no snapshot names is not deleted, unless somebody insists."""


class VacuumOptions(Strict):
    """What is given up."""

    retention_hours: Annotated[float, Field(ge=0, le=24 * 366 * 100)] | None = Field(
        None, description="Keep what is younger than this, instead of what the dataset's policy keeps."
    )
    dry_run: bool = Field(False, description="Delete nothing, and tell what would be deleted.")
    override_floor: bool = Field(
        False, description="Allow less than 24 hours, also for files that no snapshot has named yet."
    )

    @model_validator(mode="after")
    def above_the_floor(self) -> Self:
        if self.retention_hours is not None and self.retention_hours < FLOOR_HOURS and not self.override_floor:
            raise ValueError(f"`retention_hours` below {FLOOR_HOURS} needs `override_floor`")
        return self


class VerifyOptions(Strict):
    """What is done about what is found."""

    repair: bool = Field(False, description="Make whole again what can be made whole from the rest.")


class RevertOptions(Strict):
    """Back to a snapshot's state, or without what one snapshot did: one of the two."""

    to: StateName | None = Field(
        None, description="The snapshot whose state is to be the present one: its id or number, a ref, or a moment."
    )
    undo: StateName | None = Field(
        None, description="The snapshot whose own changes are to be taken back, as far as nothing changed them since."
    )
    message: Annotated[str, Field(max_length=10_000)] | None = None

    @model_validator(mode="after")
    def one_of_two(self) -> Self:
        if (self.to is None) == (self.undo is None):
            raise ValueError("say either `to` or `undo`")
        return self


class PurgeOptions(Strict):
    """What is to be erased for good, with all that was known of it before."""

    entity_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(min_length=1, max_length=10_000)
    ]
    confirm: Literal[True] = Field(
        description="That every older snapshot is given up, and nothing can be brought back."
    )


class ExportOptions(Strict):
    """What is exported."""

    kinds: Annotated[list[AnyKind], Field(min_length=1, max_length=100)] = Field(
        description="What to make, where it is not fresh: kinds, or names of files."
    )
    force: bool = Field(False, description="Make it though it is fresh.")


class MakeOptions(Strict):
    """Everything is exported that is not fresh."""

    force: bool = Field(False, description="What is fresh, too.")


class Existing(StrEnum):
    """What a crawl does with files that the archive has."""

    SKIP_PATH = "skip_path"
    SKIP_CHECKSUM = "skip_checksum"
    OVERWRITE = "overwrite"


Pattern = Annotated[str, Field(min_length=1, max_length=1024)]


class CrawlOptions(Strict):
    """Where files are looked for, which of them are taken, and as what."""

    uri: Uri
    prefix: Annotated[str, Field(max_length=FilePath.longest)] = Field(
        "", description="What paths begin with, below the URI."
    )
    glob: Annotated[list[Pattern], Field(max_length=100)] = Field(
        default=[], description="Only paths that one of these fits; `*` stands for any characters, slashes too."
    )
    exclude: Annotated[list[Pattern], Field(max_length=100)] = Field(
        default=[], description="No paths that one of these fits."
    )
    existing: Existing = Field(
        Existing.SKIP_PATH,
        description="Leave out a file whose path the archive has, unread; or one whose content it has, at any path; or "
        "take every file. A path that has another content by now gets a second file, as by an upload.",
    )
    origin: Origin = Field(Origin("crawl"), description="Of the files and of what is said of them.")


class ProcessOptions(Strict):
    """How a source file is read, and whether it is read though nothing changed."""

    force: bool = Field(False, description="Though neither the mapping nor these options changed since the last time.")
    encoding: Annotated[str, Field(max_length=64), AfterValidator(known_encoding)] | None = Field(
        None,
        description="How the file's text is written; UTF-8 unless the file begins with a mark that says otherwise.",
    )
    delimiter: Annotated[str, Field(pattern=r'^[^\r\n" ]$')] | None = Field(
        None, description="What stands between fields; found out by the header if it is a comma, semicolon, tab or bar."
    )
    sheet: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        None, description="Which sheet of a spreadsheet (XLSX) is read, if not the first."
    )


class MappingOptions(ProcessOptions):
    """Which mapping is processed."""

    content_hash: Checksum


class MadeSnapshot(BaseModel):
    """A snapshot that a job made."""

    dataset: DatasetName
    seq: int
    id: str


class FlushResult(BaseModel):
    """What a flush did."""

    operation: Literal["flush"]
    statements: int = Field(description="New statements only: what was known already is not counted.")
    snapshots: list[MadeSnapshot]


class DeleteResult(BaseModel):
    """What a delete did."""

    operation: Literal["delete"]
    files: int = Field(description="Files that its last attempt removed.")


class Rewritten(BaseModel):
    """Files that took the place of others. Without a snapshot there was nothing worth doing."""

    snapshot: MadeSnapshot | None
    removed: int = Field(description="Files that the new snapshot does not have any more.")
    added: int = Field(description="Files that took their place.")
    rows: int = Field(description="Rows that were written.")


class CompactResult(Rewritten):
    """What a compaction did."""

    operation: Literal["compact"]


class OptimizeResult(Rewritten):
    """What packing small files did."""

    operation: Literal["optimize"]


class Unneeded(BaseModel):
    """A file that nothing needs any more."""

    path: str
    size: int


class VacuumResult(BaseModel):
    """What a vacuum did; of a dry run, what it would have done."""

    operation: Literal["vacuum"]
    dry_run: bool
    snapshot: MadeSnapshot | None
    retained_from: int = Field(description="The number of the oldest snapshot that is kept.")
    expired: int = Field(description="Snapshots that were given up.")
    files: int = Field(description="Files that were deleted.")
    size: int = Field(description="Their bytes.")
    left: int = Field(description="Files that wait for a read that still needs them.")
    first_files: list[Unneeded] = Field(description="The first thousand of the files.")


class VerifyResult(BaseModel):
    """What was looked at, and what was found."""

    operation: Literal["verify"]
    snapshots: int
    files: int
    size: int
    findings: list[Finding] = Field(description="The first thousand.")
    found: int = Field(description="How many there are in all; 0: everything is as it should be.")
    harmless: int = Field(description="How many of them are harmless.")
    repaired: int = Field(description="How many of them are repaired.")


class RevertResult(BaseModel):
    """What a revert did. Without a snapshot there was nothing to take back."""

    operation: Literal["revert"]
    snapshot: MadeSnapshot | None
    added: int = Field(description="Statements that are live again.")
    ended: int = Field(description="Statements that are not live any more.")


class PurgeResult(BaseModel):
    """What was erased."""

    operation: Literal["purge"]
    snapshot: MadeSnapshot | None
    statements: int
    expired: int = Field(description="Snapshots that were given up.")
    refs: list[str] = Field(description="Refs that pointed to one of them, and are gone too.")
    files: int = Field(description="Files that were deleted.")


class MadeExport(BaseModel):
    """An export that a job made."""

    kind: Kind
    name: str
    size: int
    reason: str = Field(description="Why it was made.")
    invalid: int | None = Field(None, description=LEFT_OUT)
    omitted_edges: OmittedEdges | None = Field(
        None,
        description="Relationships that the graph does not have, as one entity becomes 10 000 at most; null: none.",
    )


class SkippedExport(BaseModel):
    """An export that a job left as it was."""

    kind: Kind
    reason: str
    invalid: int | None = Field(None, description=LEFT_OUT)


class Exported(BaseModel):
    """What was exported."""

    snapshot: str | None = Field(description="Of which snapshot; null: the dataset has none yet.")
    version: str | None = Field(description="FtM's version of what was made; null: nothing was.")
    made: list[MadeExport]
    skipped: list[SkippedExport]
    invalid: int | None = Field(
        None,
        description="The largest `invalid` of these files, made or skipped: 0 if none of them leaves an entity out, "
        "null if that is not known.",
    )


class ExportResult(Exported):
    """What an export did."""

    operation: Literal["export"]


class MakeResult(Exported):
    """What a make did."""

    operation: Literal["make"]


class UncrawledFile(BaseModel):
    """A file that could not be taken, or a folder that could not be looked into."""

    path: str
    reason: str


class CrawlResult(BaseModel):
    """What a crawl did, in its last attempt."""

    operation: Literal["crawl"]
    files: int = Field(description="Files that were taken.")
    size: int = Field(description="Their bytes.")
    skipped: int = Field(description="Files that the archive has already.")
    failed: int = Field(description="Files that could not be taken; the others were.")
    first_failures: list[UncrawledFile] = Field(description="The first hundred of them.")
    omitted: Omissions = Field(
        default_factory=Omissions,
        description="Values that were left out of the Documents and Folders of files that were taken; the reason names "
        "the file.",
    )


class MappingResult(BaseModel):
    """What processing a mapping did."""

    operation: Literal["mapping"]
    content_hash: Checksum
    skipped: str | None = Field(description="Why nothing was done; null: it was.")
    rows: int = Field(description="Rows of the file, without its header and blank lines.")
    entities: int
    statements: int = Field(description="Statements that were written; what a row says twice is counted once.")
    commit: int | None = Field(description="The commit that made them visible, and ended what the last run said.")
    rejected: int = Field(description="Rows that could not be used.")
    errors: list[Fault] = Field(description="The first hundred of them; `line` is the row, the header being the first.")
    missing: list[str] = Field(description="Columns that the mapping names and the file does not have.")
    omitted: Omissions = Field(
        default_factory=Omissions,
        description="Values that were left out of rows that were used; `line` is the row, as in `errors`.",
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
    """One job, as its row has it."""

    id: str
    operation: Operation
    dataset: DatasetName | None = Field(description="Null: it concerns several.")
    dataset_id: str | None
    arguments: dict[str, Any]
    tenant: str
    state: JobState
    attempts: int
    created: datetime
    started: datetime | None
    finished: datetime | None
    cancelled: datetime | None = Field(description="When somebody asked for it to be given up.")
    progress: Progress | None
    result: JobResult | None
    problem: Problem | None = Field(description="Why it failed; of a job that is to be tried again, the last time.")
    not_before: datetime | None = Field(description="When it is to be tried again.")
    disturbed: SkipJsonSchema[datetime | None] = Field(exclude=True)
    """When an attempt last ended otherwise than by its worker's own will: its last request may still be under way."""

    @property
    def dataset_ids(self) -> list[str]:
        """Every dataset that it concerns."""
        return list(self.arguments.get("dataset_ids", ())) if self.dataset_id is None else [self.dataset_id]


class Maintainer(Protocol):
    """Does the jobs that keep datasets in shape."""

    @property
    def operations(self) -> Collection[Operation]:
        """What it can do."""

    def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Do a job; what is told of it. Run again it does what is left to do. Raises what `report` raises."""
