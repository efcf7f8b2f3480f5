"""Queue items: what one tenant asks the worker, or another tenant, to do with an entity or a file."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from tarn.errors import Fault, Problem, SchemaViolation
from tarn.model.file import Uri
from tarn.model.lock import Token
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, FileId, FilePath, Origin, TenantName
from tarn.model.statement import LONGEST_ID
from tarn.model.tenant import Label, Strict

LONGEST_LEASE = 24 * 3600


class QueueAction(StrEnum):
    UPSERT = "UPSERT"
    DELETE = "DELETE"


class QueueResource(StrEnum):
    ENTITY = "entity"
    FILE = "file"


class QueueItemState(StrEnum):
    """What became of an item."""

    PENDING = "pending"
    DONE = "done"
    DEAD = "dead"


class NewQueueItem(Strict):
    """What is to be done."""

    action: QueueAction
    resource: QueueResource
    payload: Annotated[
        Metadata,
        Field(
            description="For the worker: an entity; `{id}` of one to delete; `{uri, checksum?, path?, meta?, entity?}` "
            "of a file to fetch; `{checksum, id}` of one to delete. For a tenant: any object that it understands."
        ),
    ]
    origin: Annotated[
        Origin | None, Field(description="Which process says so; for an entity to delete, null is every one.")
    ] = None
    to: Annotated[
        TenantName | None, Field(description="The tenant that is to take it; without one, the worker does it.")
    ] = None
    shared: Annotated[bool, Field(description="Let all who may read the dataset read the item.")] = False


class QueueItem(BaseModel):
    """One item of a dataset's queue. Ids rise in the order in which items were accepted."""

    id: str
    tenant: str = Field(description="Who sent it.")
    to: str | None
    shared: bool
    action: QueueAction
    resource: QueueResource
    origin: str | None
    payload: dict[str, Any]
    state: QueueItemState
    attempts: int
    created: datetime
    finished: datetime | None
    not_before: datetime | None = Field(description="When it may be tried again, if not at once.")
    leased_until: datetime | None = Field(description="Until when it is whose took it last.")
    problem: Problem | None = Field(description="Why the last attempt failed.")


class PopOptions(Strict):
    """For how long an item is wanted."""

    lease: Annotated[
        float, Field(gt=0, le=LONGEST_LEASE, description="Seconds after which it is given to whoever asks next.")
    ] = 60


class TakenQueueItem(QueueItem):
    """An item as the tenant gets it that takes it."""

    token: str = Field(description="To be shown when it is done.")


class Acknowledgement(Strict):
    """What became of an item that was taken."""

    token: Token
    error: Annotated[
        Label | None, Field(description="Why it could not be done: it is tried again later, and in the end given up.")
    ] = None


class NamedEntity(Strict):
    """An entity to delete."""

    id: Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]


class SourceFile(Strict):
    """A file to fetch."""

    uri: Uri
    checksum: Checksum | None = None
    path: FilePath | None = None
    meta: Metadata | None = None
    entity: bool = False


class NamedFile(Strict):
    """A file to delete."""

    checksum: Checksum
    id: FileId


PAYLOADS: dict[tuple[QueueAction, QueueResource], type[Strict]] = {
    (QueueAction.DELETE, QueueResource.ENTITY): NamedEntity,
    (QueueAction.UPSERT, QueueResource.FILE): SourceFile,
    (QueueAction.DELETE, QueueResource.FILE): NamedFile,
}
"""What the worker is told, but for entities: those are FtM's to check."""


def checked_payload(new: NewQueueItem) -> None:
    """Raise SchemaViolation, by its place, for a payload that the worker cannot use."""
    kind = PAYLOADS.get((new.action, new.resource))
    if kind is None:
        return
    try:
        kind.model_validate(new.payload)
    except ValidationError as error:
        faults = [
            Fault(
                field=".".join(["payload", *map(str, fault["loc"])]), reason=fault["msg"].removeprefix("Value error, ")
            )
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise SchemaViolation(f"{faults[0].field}: {faults[0].reason}", errors=faults) from None
