"""Queue routes: items for the worker or for another tenant."""

import hashlib
from typing import Annotated

from fastapi import Query, Request, Response

from tarn.api.http.idempotency import idempotency_key
from tarn.api.http.ingest import KeyHeader
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.datasets.registry import Dataset
from tarn.errors import (
    Backpressure,
    FieldError,
    Forbidden,
    LockLost,
    QueueItemConflict,
    QueueItemNotFound,
    SchemaViolation,
)
from tarn.model.ftm.entity import Exploded, Exploder, truncated
from tarn.model.ftm.statement import InvalidRecord, validate_id
from tarn.model.names import TenantName
from tarn.model.tenant import Level
from tarn.model.work.queue import (
    Acknowledgement,
    NewQueueItem,
    PopOptions,
    QueueAction,
    QueueItem,
    QueueItemState,
    QueueResource,
    TakenQueueItem,
    checked_payload,
)

routes = router("/v1/datasets/{dataset}/queue", "queue")

SenderParam = Annotated[
    TenantName | None,
    Query(
        alias="from",
        description="The sender; of another tenant's items, only those that the caller may read are listed.",
    ),
]
AfterParam = Annotated[
    str | None,
    Query(
        max_length=36, pattern=r"^[A-Za-z0-9-]+$", description="An item id: list only items that were added after it."
    ),
]


class QueuePage(Page[QueueItem]):
    """Queue items, oldest first."""


@routes.post("", status_code=201, responses=raises(Backpressure, Forbidden))
async def add_queue_item(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    new: NewQueueItem,
    response: Response,
    key: KeyHeader = None,
) -> QueueItem:
    """Add an item to the queue: for the worker, which processes items in order, or for another tenant."""
    if new.to is None:
        caller.require(dataset.name, Level.WRITE)
        await run_in_threadpool(_check, services, dataset, new)
    once = idempotency_key(request, key, hashlib.sha256(await request.body()).hexdigest())
    item = await run_in_threadpool(services.queue.add, dataset, new, once, caller.act)
    response.headers["Location"] = f"/v1/datasets/{dataset.name}/queue/{item.id}"
    return item


@routes.get("")
def list_queue(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    paging: PagingDep,
    sender: SenderParam = None,
    state: Annotated[QueueItemState | None, Query(description="List only items in this state.")] = None,
    after: AfterParam = None,
) -> QueuePage:
    """List items that the caller sent or that are addressed to it; with `from`, all of that sender that it may read."""
    begin = max(filter(None, (after, paging.after)), default=None)
    tenant = caller.identity.tenant
    items = services.queue.page(dataset, tenant, sender, state, begin, paging.fetch)
    results, cursor = paging.cut(items, lambda item: item.id)
    return QueuePage(results=results, next=cursor)


@routes.post("/pop", responses={204: {"description": "The queue has no item for the caller."}})
def pop_queue_item(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    options: PopOptions = PopOptions(),  # noqa: B008 - the same for all
) -> TakenQueueItem:
    """Take the oldest item that is addressed to the caller, and hold it until the lease expires."""
    item = services.queue.take(dataset, options.lease, caller.act)
    if item is None:
        return Response(status_code=204)  # type: ignore[return-value]  # FastAPI passes it on
    return item


@routes.get("/{item}", responses=raises(QueueItemNotFound))
def get_queue_item(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam) -> QueueItem:
    """Get an item and its state."""
    return services.queue.get(dataset, caller.identity.tenant, item)


@routes.post("/{item}/ack", responses=raises(QueueItemNotFound, LockLost))
def ack_queue_item(
    services: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam, ack: Acknowledgement
) -> QueueItem:
    """Acknowledge a taken item as done, or as failed with an error."""
    return services.queue.acknowledge(dataset, item, ack.token, ack.error, caller.act)


@routes.post("/{item}/retry", responses=raises(QueueItemNotFound, QueueItemConflict, Forbidden))
def retry_queue_item(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam) -> QueueItem:
    """Retry a dead item; the caller must still have the level that it requires."""

    def require(retried: QueueItem) -> None:
        if retried.to is None:
            caller.require(dataset.name, Level.WRITE)

    return services.queue.retry(dataset, item, require, caller.act)


@routes.delete("/{item}", status_code=204, responses=raises(QueueItemNotFound, Forbidden))
def delete_queue_item(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam) -> None:
    """Delete an item in any state; its effects are kept."""
    services.queue.delete(dataset, item, caller.act)


def _check(services: Services, dataset: Dataset, new: NewQueueItem) -> None:
    """Raise SchemaViolation for an item that the worker could not process in any case."""
    checked_payload(new)
    try:
        if (new.action, new.resource) == (QueueAction.UPSERT, QueueResource.ENTITY):
            _require_all_values(Exploder().explode(dataset.name, new.payload))
        elif new.resource is QueueResource.ENTITY:
            validate_id(new.payload["id"], "id")
    except InvalidRecord as error:
        field = f"payload.{error.field}" if error.field else "payload"
        raise SchemaViolation(
            f"{field}: {error.reason}", errors=[FieldError(field=field, reason=error.reason)]
        ) from None
    if (new.action, new.resource) == (QueueAction.UPSERT, QueueResource.FILE):
        services.fetcher.check(new.payload["uri"])


def _require_all_values(entity: Exploded) -> None:
    """Raise InvalidRecord for a value that would be left out: the worker cannot report it to the sender."""
    for value in entity.omitted:
        raise InvalidRecord(f"properties.{value.prop}", f"{truncated(value.value)!r} is {value.reason}")
