"""Events: what happened to a dataset or a job, as streams and webhooks tell it."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from tarn.errors import Problem
from tarn.model.export import Kind
from tarn.model.job import Operation, Progress
from tarn.model.names import Checksum, DatasetName, FileId, FilePath
from tarn.model.snapshot import Change

MOST_FILES = 20
"""Files that an event names; how many there were, it counts."""


class EventKind(StrEnum):
    """What an event tells."""

    DATASET_CREATED = "dataset.created"
    DATASET_DELETED = "dataset.deleted"
    SNAPSHOT_PUBLISHED = "snapshot.published"
    EXPORT_MADE = "export.made"
    FILES_PUT = "files.put"
    FILE_DELETED = "file.deleted"
    QUEUE_ITEM = "queue.item"
    JOB_QUEUED = "job.queued"
    JOB_STARTED = "job.started"
    JOB_PROGRESS = "job.progress"
    JOB_DONE = "job.done"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    MISSED = "missed"

    @property
    def ends_job(self) -> bool:
        return self in (EventKind.JOB_DONE, EventKind.JOB_FAILED, EventKind.JOB_CANCELLED)


class Told(BaseModel):
    """What every event has."""

    id: int = Field(
        description="Rises within a stream, in the order in which things happened; numbers may be left out."
    )
    stream: str = Field(
        description="A dataset's id, or of a job on several datasets its own; with `id` it names the event for good."
    )
    dataset: DatasetName | None = Field(description="Null: it concerns several.")
    at: datetime


class DatasetCreated(Told):
    """There is a new dataset."""

    kind: Literal["dataset.created"]


class DatasetDeleted(Told):
    """The dataset is there for nobody any more; its files are being removed."""

    kind: Literal["dataset.deleted"]


class SnapshotPublished(Told):
    """The dataset has a new head."""

    kind: Literal["snapshot.published"]
    snapshot: str
    seq: int
    content: int = Field(description="The `seq` of the last snapshot that changed what is visible; its own, if it did.")
    operation: Change


class ExportMade(Told):
    """An export was made."""

    kind: Literal["export.made"]
    export: Kind
    name: str
    snapshot: str | None = Field(description="Of which snapshot; null: the dataset has none yet.")
    size: int


class FileNamed(BaseModel):
    """A file of the archive."""

    id: FileId
    checksum: Checksum
    path: FilePath


class FilesPut(Told):
    """Files were put into the archive, or their records changed, at once."""

    kind: Literal["files.put"]
    count: int
    files: list[FileNamed] = Field(description="The first twenty of them.")


class FileDeleted(Told):
    """A file was taken out of the archive."""

    kind: Literal["file.deleted"]
    file: FileNamed


class QueueItemTold(Told):
    """An item of a queue is there, or has come to something; the item itself says to what."""

    kind: Literal["queue.item"]
    item: str
    state: str
    action: str
    resource: str
    tenant: str = Field(description="Who sent it.")
    to: str | None = Field(description="For whom it is; null: the worker.")


class JobTold(Told):
    """A job has moved on."""

    job: str
    operation: Operation
    tenant: str
    attempts: int


class JobQueued(JobTold):
    """A job waits: it is new, or is to be tried again."""

    kind: Literal["job.queued"]
    not_before: datetime | None = Field(description="When it is to be tried, if not at once.")
    problem: Problem | None = Field(description="Why it was not done the last time.")


class JobStarted(JobTold):
    """A worker has begun with a job."""

    kind: Literal["job.started"]


class JobProgress(JobTold):
    """How far a job is, told once in a while."""

    kind: Literal["job.progress"]
    progress: Progress


class JobDone(JobTold):
    """A job is done; its result is the job's."""

    kind: Literal["job.done"]


class JobFailed(JobTold):
    """A job has failed, and is not tried again by itself."""

    kind: Literal["job.failed"]
    problem: Problem | None


class JobCancelled(JobTold):
    """A job was given up."""

    kind: Literal["job.cancelled"]


class Missed(Told):
    """Events after one that was heard are not kept any more: look at what there is, and go on from here."""

    kind: Literal["missed"]
    after: int = Field(description="The last event that was heard.")
    first: int = Field(description="The first number that can still be told.")


Event = Annotated[
    DatasetCreated
    | DatasetDeleted
    | SnapshotPublished
    | ExportMade
    | FilesPut
    | FileDeleted
    | QueueItemTold
    | JobQueued
    | JobStarted
    | JobProgress
    | JobDone
    | JobFailed
    | JobCancelled
    | Missed,
    Field(discriminator="kind"),
]

_ANY: TypeAdapter[Event] = TypeAdapter(Event)


def checked(kind: EventKind, data: dict[str, Any]) -> dict[str, Any]:
    """What an event of a kind says, as plain JSON. Raises ValidationError for what is no such event."""
    told = _ANY.validate_python({"id": 0, "stream": "", "dataset": None, "at": 0, "kind": kind, **data})
    return told.model_dump(mode="json", exclude={*Told.model_fields, "kind"})
