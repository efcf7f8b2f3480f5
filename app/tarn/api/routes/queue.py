"""The queue: what the worker, or another tenant, is asked to do."""

import hashlib
from typing import Annotated

from fastapi import Query, Request, Response

from tarn.api.http.idempotency import fingerprint
from tarn.api.http.ingest import KeyHeader
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.coordination import queue
from tarn.datasets.registry import Dataset
from tarn.db import idempotency as answers
from tarn.db.idempotency import IdempotencyKey
from tarn.errors import Backpressure, Fault, Forbidden, LockLost, QueueItemConflict, QueueItemNotFound, SchemaViolation
from tarn.model.entity import Exploded, Exploder, truncated
from tarn.model.names import TenantName
from tarn.model.queue import (
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
from tarn.model.statement import InvalidRecord, validate_id
from tarn.model.tenant import Level

routes = router("/v1/datasets/{dataset}/queue", "queue")

SenderParam = Annotated[
    TenantName | None,
    Query(alias="from", description="Who sent it; of another tenant's items, those that the caller may read."),
]
AfterParam = Annotated[
    str | None,
    Query(max_length=36, pattern=r"^[A-Za-z0-9-]+$", description="An id: those that were accepted after it."),
]


class QueuePage(Page[QueueItem]):
    """Queue items, oldest first."""


@routes.post("", status_code=201, responses=raises(Backpressure, Forbidden))
async def add_queue_item(
    request: Request,
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    new: NewQueueItem,
    response: Response,
    key: KeyHeader = None,
) -> QueueItem:
    """Ask for something to be done: by the worker, in the order in which it was asked, or by another tenant."""
    if new.to is None:
        caller.require(dataset.name, Level.WRITE)
        await run_in_threadpool(_check, house, dataset, new)
    once = None if key is None else IdempotencyKey(key, fingerprint(request, hashlib.sha256(await request.body())))
    item = await run_in_threadpool(_added, house, caller, dataset, new, once)
    response.headers["Location"] = f"/v1/datasets/{dataset.name}/queue/{item.id}"
    return item


@routes.get("")
def list_queue(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    paging: PagingDep,
    sender: SenderParam = None,
    state: Annotated[QueueItemState | None, Query(description="What became of them.")] = None,
    after: AfterParam = None,
) -> QueuePage:
    """List items that the caller sent or is to take; or, of one sender, all that it may read."""
    begin = max(filter(None, (after, paging.after)), default=None)
    tenant = caller.identity.tenant
    with house.database.read() as connection:
        found = queue.page(connection, dataset, tenant, sender, state, begin, paging.fetch)
    results, cursor = paging.cut(found, lambda item: item.id)
    return QueuePage(results=results, next=cursor)


@routes.post("/pop", responses={204: {"description": "There is nothing to be taken."}})
def pop_queue_item(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    wanted: PopOptions = PopOptions(),  # noqa: B008 - the same for all
) -> TakenQueueItem:
    """Take the oldest item that is addressed to the caller: it is the caller's until the lease is over."""
    with house.database.write() as connection:
        taken = queue.pop(connection, dataset, caller.identity.tenant, wanted.lease)
        if taken is not None:
            caller.act.done(connection, item=taken.id, attempt=taken.attempts)
    if taken is None:
        return Response(status_code=204)  # type: ignore[return-value]  # FastAPI passes it on
    queue.write_mirror(house.store, dataset, QueueItem(**taken.model_dump(exclude={"token"})))
    return taken


@routes.get("/{item}", responses=raises(QueueItemNotFound))
def get_queue_item(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam) -> QueueItem:
    """Show an item, and what became of it."""
    with house.database.read() as connection:
        return queue.get(connection, dataset, caller.identity.tenant, item)


@routes.post("/{item}/ack", responses=raises(QueueItemNotFound, LockLost))
def ack_queue_item(
    house: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam, said: Acknowledgement
) -> QueueItem:
    """Say that an item that was taken is done, or why it is not."""
    with house.database.write() as connection:
        settled = queue.acknowledge(connection, dataset, caller.identity.tenant, item, said.token, said.error)
        caller.act.done(connection, state=settled.state)
    queue.write_mirror(house.store, dataset, settled)
    return settled


@routes.post("/{item}/retry", responses=raises(QueueItemNotFound, QueueItemConflict, Forbidden))
def retry_queue_item(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam) -> QueueItem:
    """Let an item be tried again that is dead; what it does must still be allowed."""
    with house.database.write() as connection:
        again = queue.retry(connection, dataset, caller.identity.tenant, item)
        if again.to is None:
            caller.require(dataset.name, Level.WRITE)
        caller.act.done(connection)
    queue.write_mirror(house.store, dataset, again)
    return again


@routes.delete("/{item}", status_code=204, responses=raises(QueueItemNotFound, Forbidden))
def delete_queue_item(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, item: IdParam) -> None:
    """Take an item out of the queue, whatever its state; what it has done stays."""
    with house.database.write() as connection:
        removed = queue.remove(connection, dataset, caller.identity.tenant, item)
        caller.act.done(connection, state=removed.state)
    queue.delete_mirror(house.store, dataset, removed)


def _check(house: Services, dataset: Dataset, new: NewQueueItem) -> None:
    """Raise SchemaViolation for what the worker could not do, whatever there is when it comes to it."""
    checked_payload(new)
    try:
        if (new.action, new.resource) == (QueueAction.UPSERT, QueueResource.ENTITY):
            _require_all_values(Exploder().explode(dataset.name, new.payload))
        elif new.resource is QueueResource.ENTITY:
            validate_id(new.payload["id"], "id")
    except InvalidRecord as error:
        field = f"payload.{error.field}" if error.field else "payload"
        raise SchemaViolation(f"{field}: {error.reason}", errors=[Fault(field=field, reason=error.reason)]) from None
    if (new.action, new.resource) == (QueueAction.UPSERT, QueueResource.FILE):
        house.fetcher.check(new.payload["uri"])


def _require_all_values(entity: Exploded) -> None:
    """Raise Invalid for a value that would be left out: the worker has nobody to report it to."""
    for one in entity.omitted:
        raise InvalidRecord(f"properties.{one.prop}", f"{truncated(one.value)!r} is {one.reason}")


def _added(
    house: Services, caller: Caller, dataset: Dataset, new: NewQueueItem, once: IdempotencyKey | None
) -> QueueItem:
    """The item, added now or when the same request came first. Raises IdempotencyMismatch."""
    tenant = caller.identity.tenant
    with house.database.write() as connection:
        if once is not None:
            # Whoever has the key waits here for the one that had it first.
            house.database.serialize(connection, f"answer:{tenant}:{once.key}")
            if (kept := answers.find(connection, tenant, once)) is not None:
                return QueueItem.model_validate(kept.answer)
        item = queue.add(connection, house.settings, dataset, tenant, new, caller.act.request)
        if once is not None:
            answers._insert(connection, tenant, once, 201, item.model_dump(mode="json"))
        caller.act.done(connection, target=f"{caller.act.target}/{item.id}", to=new.to)
    queue.write_mirror(house.store, dataset, item)
    return item
