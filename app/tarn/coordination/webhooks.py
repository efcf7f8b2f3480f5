"""Webhooks in SQL: subscriptions of tenants, delivery cursors per stream, and worker leases.

A cursor per webhook and stream holds the last delivered event. It is moved after the receiver has responded: if a
worker dies in between, the event is sent once more under the same id. One worker at a time holds a webhook's lease; a
worker that lost it moves no cursor.
"""

import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Update, and_, delete, func, insert, literal, or_, select, update

from tarn.access.audit import AuditedAction
from tarn.access.grants import held_by
from tarn.access.tenants import get as get_tenant
from tarn.db import outbox
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.lease import LeaseColumns
from tarn.db.notifications import EVENTS, publish
from tarn.db.outbox import OutboxEvent
from tarn.db.tables import event_heads, tenants, webhook_cursors, webhooks
from tarn.db.upsert import upsert
from tarn.errors import FieldError, SchemaViolation, WebhookNotFound
from tarn.model.ids import new_id, now
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import Identity
from tarn.model.work.event import EventKind
from tarn.model.work.webhook import NewWebhook, Webhook, WebhookState

LEASE = LeaseColumns(holder=webhooks.c.worker, expires=webhooks.c.leased_until)

PAGE_EVENTS = 200
"""Events of a stream that one query reads."""


class WebhookTotals(NamedTuple):
    """Number of webhooks by state, and the totals of their deliveries."""

    states: dict[str, int]
    delivered: int
    failed: int


class StreamCursor(NamedTuple):
    """A stream with events that a webhook has not received, and the number of the last one that it has."""

    stream: str
    number: int


class NextEvent(NamedTuple):
    """The next event of a stream to deliver, or None, and the number up to which there are no others."""

    event: OutboxEvent | None
    through: int


class WebhookService:
    """Reads and changes the webhooks of tenants. Each change and its audit record are one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, tenant: TenantName) -> Webhook:
        """Return a tenant's webhook and the state of its deliveries. Raises TenantNotFound, WebhookNotFound."""
        with self._database.read() as connection:
            get_tenant(connection, tenant)
            return _get(connection, tenant)

    def set(self, tenant: TenantName, new: NewWebhook, act: AuditedAction) -> Webhook:
        """Set a tenant's webhook. Raises TenantNotFound, and SchemaViolation for a first one without a secret."""
        with self._database.write() as connection:
            get_tenant(connection, tenant)
            webhook = _put(connection, tenant, new)
            act.done(connection, kinds=[*new.kinds], datasets=[*new.datasets], secret=new.secret is not None)
        return webhook

    def delete(self, tenant: TenantName, act: AuditedAction) -> None:
        """Delete a tenant's webhook. Raises TenantNotFound, WebhookNotFound."""
        with self._database.write() as connection:
            get_tenant(connection, tenant)
            connection.execute(delete(webhook_cursors).where(webhook_cursors.c.tenant == tenant))
            if connection.execute(delete(webhooks).where(webhooks.c.tenant == tenant)).rowcount != 1:
                raise _not_found(tenant)
            act.done(connection)


def _get(connection: Connection, tenant: TenantName) -> Webhook:
    """Return a tenant's webhook. Raises WebhookNotFound."""
    row = _row(connection, tenant)
    if row is None:
        raise _not_found(tenant)
    return Webhook.model_validate(row._mapping, from_attributes=True)


def _put(connection: Connection, tenant: TenantName, new: NewWebhook) -> Webhook:
    """Set a tenant's webhook: a new one gets events from now on, a changed one continues at its cursors.

    Deliveries that were stopped start again. Raises SchemaViolation for a first one without a secret.
    """
    moment = now()
    values: dict[str, Any] = {
        "url": new.url,
        "kinds": [*new.kinds],
        "datasets": [*new.datasets],
        "updated": moment,
        "state": WebhookState.ACTIVE,
        "attempts": 0,
        "problem": None,
        "next_try": None,
    }
    if new.secret is not None:
        values["secret"] = new.secret.get_secret_value()
    changed = connection.execute(update(webhooks).where(webhooks.c.tenant == tenant).values(**values))
    if changed.rowcount == 0:
        if new.secret is None:
            reason = "a new webhook needs a secret"
            raise SchemaViolation(reason, errors=[FieldError(field="secret", reason=reason)])
        own = {"tenant": tenant, "id": new_id(), "created": moment, "delivered": 0, "failed": 0}
        connection.execute(insert(webhooks).values(**values, **own))
        current_positions = select(literal(tenant), event_heads.c.stream, event_heads.c.last)
        connection.execute(insert(webhook_cursors).from_select(["tenant", "stream", "number"], current_positions))
    publish(connection, EVENTS)  # deliveries that were stopped start again
    return _get(connection, tenant)


def _not_found(tenant: TenantName) -> WebhookNotFound:
    return WebhookNotFound(f"{tenant!r} has no webhook")


def totals(connection: Connection) -> WebhookTotals:
    """Return the number of webhooks by state, and the totals of their deliveries."""
    counted = select(
        webhooks.c.state, func.count(), func.sum(webhooks.c.delivered), func.sum(webhooks.c.failed)
    ).group_by(webhooks.c.state)
    rows = connection.execute(counted).all()
    return WebhookTotals(
        {row[0]: row[1] for row in rows}, sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)
    )


# For workers


def due(connection: Connection) -> list[tuple[TenantName, bool]]:
    """Return the tenants whose webhooks have events to deliver and no lease, and whether the last attempt failed.

    Those without a failure come first, then the one that has waited longest.
    """
    moment = database_time(connection)
    due_webhooks = (
        select(webhooks.c.tenant, webhooks.c.attempts)
        .join(tenants, tenants.c.name == webhooks.c.tenant)
        .where(
            tenants.c.disabled.is_(False),
            webhooks.c.state != WebhookState.GIVEN_UP,
            or_(webhooks.c.next_try.is_(None), webhooks.c.next_try <= moment),
            LEASE.is_free(moment),
            _behind(webhooks.c.tenant).exists(),
        )
        .order_by(webhooks.c.attempts, webhooks.c.last_delivered.asc().nulls_first())
    )
    return [(TenantName(row.tenant), row.attempts > 0) for row in connection.execute(due_webhooks)]


def seconds_until_due(connection: Connection) -> float:
    """Return the seconds until a failed delivery is tried again or a worker's lease expires; infinite if there is
    neither."""
    moment = database_time(connection)
    active = webhooks.c.state != WebhookState.GIVEN_UP
    times = [
        connection.execute(select(func.min(column)).where(active, column > moment)).scalar()
        for column in (webhooks.c.next_try, webhooks.c.leased_until)
    ]
    return min(((at - moment).total_seconds() for at in times if at is not None), default=math.inf)


def take(connection: Connection, tenant: TenantName, worker: str, lease: timedelta) -> Row[Any] | None:
    """Acquire the lease of a webhook. Returns None if another worker has it, or the webhook is gone."""
    moment = database_time(connection)
    condition = webhooks.c.tenant == tenant, webhooks.c.state != WebhookState.GIVEN_UP
    acquired = LEASE.acquire(worker, moment, moment + lease).where(*condition)
    return connection.execute(acquired.returning(webhooks)).first()


def behind(connection: Connection, tenant: TenantName) -> list[StreamCursor]:
    """Return every stream with events that the webhook has not received."""
    rows = connection.execute(_behind(tenant))
    return [StreamCursor(stream, number) for stream, number in rows]


def next_of(connection: Connection, webhook: Row[Any], cursor: StreamCursor) -> NextEvent:
    """Return the next event of a stream that the tenant has subscribed to and may see."""
    page = outbox.after(connection, cursor.stream, cursor.number, PAGE_EVENTS)
    is_subscribed = _Subscription(webhook, Identity(webhook.tenant, "", held_by(connection, webhook.tenant), 0, 0))
    missed_event: Iterator[OutboxEvent] = iter(())
    if page.tail > cursor.number and page.events:
        # A webhook that is not subscribed to this dataset must not learn that events of it were deleted.
        missed_event = iter([outbox.missed(page, cursor.stream, page.events[0].dataset, cursor.number)])
    next_event = next((event for event in (*missed_event, *page.events) if is_subscribed(event)), None)
    return NextEvent(next_event, page.through if next_event is None else next_event.number)


def delivered(connection: Connection, webhook: Row[Any], worker: str, event: OutboxEvent, lease: timedelta) -> bool:
    """Record a delivery and renew the lease. Returns False if the worker no longer holds it."""
    moment = database_time(connection)
    values = {
        "state": WebhookState.ACTIVE,
        "attempts": 0,
        "problem": None,
        "next_try": None,
        "delivered": webhooks.c.delivered + 1,
        "last_delivered": moment,
    }
    if not _changed(connection, webhook, LEASE.renew(worker, moment + lease).values(values)):
        return False
    _move(connection, webhook.tenant, event.stream, event.number)
    return True


def passed(connection: Connection, webhook: Row[Any], worker: str, stream: str, through: int, lease: timedelta) -> bool:
    """Move the cursor past events that are not sent. Returns False if the worker no longer holds the lease."""
    if not _changed(connection, webhook, LEASE.renew(worker, database_time(connection) + lease)):
        return False
    _move(connection, webhook.tenant, stream, through)
    return True


def failed(
    connection: Connection, webhook: Row[Any], worker: str, problem: str, delay: Callable[[int], timedelta | None]
) -> datetime | None:
    """Record why an event was not delivered, and release the lease.

    Returns when to try again, after `delay` for this number of attempts; None if the event is not tried again.
    """
    previous = select(webhooks.c.attempts).where(webhooks.c.tenant == webhook.tenant)
    attempts = 1 + (connection.execute(previous).scalar() or 0)
    wait = delay(attempts)
    next_try = None if wait is None else database_time(connection) + wait
    values = {
        "state": WebhookState.GIVEN_UP if next_try is None else WebhookState.FAILING,
        "attempts": attempts,
        "failed": webhooks.c.failed + 1,
        "problem": problem,
        "next_try": next_try,
    }
    _changed(connection, webhook, LEASE.release(worker).values(values))
    return next_try


def release(connection: Connection, webhook: Row[Any], worker: str) -> None:
    """Release the lease of a webhook."""
    _changed(connection, webhook, LEASE.release(worker))


class _Subscription:
    """Decides which events a webhook receives."""

    def __init__(self, webhook: Row[Any], identity: Identity) -> None:
        self._kinds = {*webhook.kinds, EventKind.MISSED} if webhook.kinds else {*EventKind}
        self._patterns = [DatasetPattern(pattern) for pattern in webhook.datasets]
        self._identity = identity

    def __call__(self, event: OutboxEvent) -> bool:
        if event.kind not in self._kinds:
            return False
        tenant = self._identity.tenant
        if event.audience is not None and tenant not in event.audience and not self._identity.administers_lake:
            return False
        if event.dataset is None:
            return True
        is_selected = any(pattern.matches(event.dataset) for pattern in self._patterns)
        return is_selected and self._identity.level_on(event.dataset) is not None


def _row(connection: Connection, tenant: str) -> Row[Any] | None:
    row: Row[Any] | None = connection.execute(select(webhooks).where(webhooks.c.tenant == tenant)).first()
    return row


def _behind(tenant: Any) -> Any:
    """Select the streams with undelivered events, and the last number that the webhook received of each.

    Of a stream without a cursor, all events that are kept are undelivered.
    """
    is_cursor = and_(webhook_cursors.c.stream == event_heads.c.stream, webhook_cursors.c.tenant == tenant)
    last_received = func.coalesce(webhook_cursors.c.number, event_heads.c.tail)
    return (
        select(event_heads.c.stream, last_received)
        .select_from(event_heads.outerjoin(webhook_cursors, is_cursor))
        .where(event_heads.c.last > last_received)
        .order_by(event_heads.c.stream)
    )


def _changed(connection: Connection, webhook: Row[Any], statement: Update) -> bool:
    """Execute an update of a webhook, unless it was deleted and set again meanwhile. Returns whether it applied."""
    condition = webhooks.c.tenant == webhook.tenant, webhooks.c.id == webhook.id
    return connection.execute(statement.where(*condition)).rowcount == 1


def _move(connection: Connection, tenant: str, stream: str, number: int) -> None:
    row = upsert(connection, webhook_cursors).values(tenant=tenant, stream=stream, number=number)
    connection.execute(row.on_conflict_do_update(index_elements=["tenant", "stream"], set_={"number": number}))
