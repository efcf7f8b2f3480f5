"""Events of datasets and jobs, as event streams and webhooks deliver them."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from tarn.errors import Problem
from tarn.model.datasets.export import ExportKind
from tarn.model.datasets.snapshot import SnapshotOperation
from tarn.model.names import Checksum, DatasetName, FileId, FilePath
from tarn.model.work.job import Operation, Progress

MOST_FILES = 20
"""Maximum files listed in an event; `count` has the total."""


class EventKind(StrEnum):
    """The kind of an event."""

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


class EventBase(BaseModel):
    """The common fields of every event."""

    id: int = Field(
        description="Increases within a stream, in the order in which things happened; numbers may be skipped."
    )
    stream: str = Field(
        description="The id of the dataset, or of the job if it concerns several datasets; unique together with `id`."
    )
    dataset: DatasetName | None = Field(description="Null: the event concerns several datasets.")
    at: datetime


class DatasetCreated(EventBase):
    """A dataset was created."""

    kind: Literal["dataset.created"]


class DatasetDeleted(EventBase):
    """The dataset was deleted and is no longer accessible; its files are being removed."""

    kind: Literal["dataset.deleted"]


class SnapshotPublished(EventBase):
    """The dataset has a new head."""

    kind: Literal["snapshot.published"]
    snapshot: str
    seq: int
    content: int = Field(
        description="The `seq` of the last snapshot that changed visible content; its own `seq` if this one did."
    )
    operation: SnapshotOperation


class ExportMade(EventBase):
    """An export was written."""

    kind: Literal["export.made"]
    export: ExportKind
    name: str
    snapshot: str | None = Field(description="The snapshot it was made from; null: the dataset has none yet.")
    size: int


class FileReference(BaseModel):
    """A file of the archive."""

    id: FileId
    checksum: Checksum
    path: FilePath


class FilesPut(EventBase):
    """Files were put into the archive, or their records changed, in one operation."""

    kind: Literal["files.put"]
    count: int
    files: list[FileReference] = Field(description="The first twenty files.")


class FileDeleted(EventBase):
    """A file was deleted from the archive."""

    kind: Literal["file.deleted"]
    file: FileReference


class QueueItemEvent(EventBase):
    """A queue item was added, or its state changed."""

    kind: Literal["queue.item"]
    item: str
    state: str
    action: str
    resource: str
    tenant: str = Field(description="The tenant that added the item.")
    to: str | None = Field(description="The tenant that is to process it; null: the worker.")


class JobEvent(EventBase):
    """The common fields of job events."""

    job: str
    operation: Operation
    tenant: str
    attempts: int


class JobQueued(JobEvent):
    """A job was queued: it is new, or will be retried."""

    kind: Literal["job.queued"]
    not_before: datetime | None = Field(description="Earliest time of its next attempt; null: at once.")
    problem: Problem | None = Field(description="Why the last attempt failed.")


class JobStarted(JobEvent):
    """A worker started a job."""

    kind: Literal["job.started"]


class JobProgress(JobEvent):
    """Progress of a job, sent from time to time."""

    kind: Literal["job.progress"]
    progress: Progress


class JobDone(JobEvent):
    """A job completed; the job itself has the result."""

    kind: Literal["job.done"]


class JobFailed(JobEvent):
    """A job failed, and is not retried automatically."""

    kind: Literal["job.failed"]
    problem: Problem | None


class JobCancelled(JobEvent):
    """A job was cancelled."""

    kind: Literal["job.cancelled"]


class Missed(EventBase):
    """Events after the last one received are not kept any more: read the current state, and continue from here."""

    kind: Literal["missed"]
    after: int = Field(description="The last event that was received.")
    first: int = Field(description="The first event that is still available.")


Event = Annotated[
    DatasetCreated
    | DatasetDeleted
    | SnapshotPublished
    | ExportMade
    | FilesPut
    | FileDeleted
    | QueueItemEvent
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
    """Return the payload of an event as JSON values. Raises ValidationError if it is not valid for this kind."""
    event = _ANY.validate_python({"id": 0, "stream": "", "dataset": None, "at": 0, "kind": kind, **data})
    return event.model_dump(mode="json", exclude={*EventBase.model_fields, "kind"})
