"""Queue items: requests of a tenant to the worker, or to another tenant, to process an entity or a file."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from tarn.errors import FieldError, Problem, SchemaViolation
from tarn.model.file import Uri
from tarn.model.ftm.statement import LONGEST_ID
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, FileId, FilePath, Origin, TenantName
from tarn.model.tenant import Label, Strict
from tarn.model.work.lock import Token

LONGEST_LEASE = 24 * 3600


class QueueAction(StrEnum):
    UPSERT = "UPSERT"
    DELETE = "DELETE"


class QueueResource(StrEnum):
    ENTITY = "entity"
    FILE = "file"


class QueueItemState(StrEnum):
    """The state of an item."""

    PENDING = "pending"
    DONE = "done"
    DEAD = "dead"


class NewQueueItem(Strict):
    """An item to add to the queue."""

    action: QueueAction
    resource: QueueResource
    payload: Annotated[
        Metadata,
        Field(
            description="For the worker: an entity; `{id}` of an entity to delete; `{uri, checksum?, path?, meta?, "
            "entity?}` of a file to fetch; `{checksum, id}` of a file to delete. For a tenant: any object."
        ),
    ]
    origin: Annotated[
        Origin | None, Field(description="Origin of the statements; when deleting an entity, null means all origins.")
    ] = None
    to: Annotated[
        TenantName | None, Field(description="The tenant that is to process it; without one, the worker does.")
    ] = None
    shared: Annotated[bool, Field(description="Let every tenant that may read the dataset read the item.")] = False


class QueueItem(BaseModel):
    """One item of a dataset's queue. Ids increase in the order in which items were accepted."""

    id: str
    tenant: str = Field(description="The tenant that added it.")
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
    not_before: datetime | None = Field(description="Earliest time of the next attempt; null: at once.")
    leased_until: datetime | None = Field(description="When the lease of its current consumer expires.")
    problem: Problem | None = Field(description="Why the last attempt failed.")


class PopOptions(Strict):
    """Options of taking an item."""

    lease: Annotated[
        float,
        Field(
            gt=0, le=LONGEST_LEASE, description="Seconds after which the item may be taken again by another consumer."
        ),
    ] = 60


class TakenQueueItem(QueueItem):
    """An item as returned to the tenant that takes it."""

    token: str = Field(description="Required to acknowledge the item.")


class Acknowledgement(Strict):
    """The outcome of an item that was taken."""

    token: Token
    error: Annotated[
        Label | None, Field(description="Why it failed: it is retried later, and after the last attempt marked `dead`.")
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
"""Payload models of the worker; entities are not listed, because FtM validates them."""


def checked_payload(new: NewQueueItem) -> None:
    """Raise SchemaViolation, with the fields, for a payload that the worker cannot process."""
    kind = PAYLOADS.get((new.action, new.resource))
    if kind is None:
        return
    try:
        kind.model_validate(new.payload)
    except ValidationError as error:
        faults = [
            FieldError(
                field=".".join(["payload", *map(str, fault["loc"])]), reason=fault["msg"].removeprefix("Value error, ")
            )
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise SchemaViolation(f"{faults[0].field}: {faults[0].reason}", errors=faults) from None
