"""Webhooks in SQL: what tenants want to be sent, how far they were, and which worker sends it.

Of each webhook and stream a cursor says what was delivered last. It is moved after the receiver has answered: a worker
that dies in between leaves the event to be sent once more, under the same id. One worker at a time has a webhook, by a
lease; one that lost it moves nothing any more.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, and_, delete, func, insert, literal, or_, select, update

from tarn.access.grants import held_by
from tarn.db import outbox as events
from tarn.db.outbox import OutboxEvent
from tarn.db.tables import event_heads, tenants, webhook_cursors, webhooks
from tarn.db.upsert import upsert
from tarn.errors import Fault, SchemaViolation, WebhookNotFound
from tarn.model.event import EventKind
from tarn.model.ids import new_id, now
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import Identity
from tarn.model.webhook import NewWebhook, Webhook, WebhookState

PAGE_EVENTS = 200
"""Events that are read at once."""


class WebhookTotals(NamedTuple):
    """All webhooks together."""

    states: dict[str, int]
    delivered: int
    failed: int


class Behind(NamedTuple):
    """A stream of which a webhook has not had everything."""

    stream: str
    number: int
    """The last that it had."""


class Next(NamedTuple):
    """What is next on a stream: an event, or how far there is none of interest."""

    told: OutboxEvent | None
    through: int


def _get(connection: Connection, tenant: TenantName) -> Webhook:
    """Raises WebhookNotFound."""
    row = _row(connection, tenant)
    if row is None:
        raise WebhookNotFound(f"{tenant!r} has no webhook")
    return Webhook.model_validate(row._mapping, from_attributes=True)


def _put(connection: Connection, tenant: TenantName, new: NewWebhook) -> Webhook:
    """Set a tenant's webhook: what happens from now on is sent, or from where an earlier one was.

    One that was given up is tried again. Raises SchemaViolation for a first one without a secret.
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
            reason = "a webhook needs a secret when it is made"
            raise SchemaViolation(reason, errors=[Fault(field="secret", reason=reason)])
        own = {"tenant": tenant, "id": new_id(), "created": moment, "delivered": 0, "failed": 0}
        connection.execute(insert(webhooks).values(**values, **own))
        here = select(literal(tenant), event_heads.c.stream, event_heads.c.last)
        connection.execute(insert(webhook_cursors).from_select(["tenant", "stream", "number"], here))
    return _get(connection, tenant)


def remove(connection: Connection, tenant: TenantName) -> bool:
    """False if there was none."""
    connection.execute(delete(webhook_cursors).where(webhook_cursors.c.tenant == tenant))
    return connection.execute(delete(webhooks).where(webhooks.c.tenant == tenant)).rowcount == 1


def totals(connection: Connection) -> WebhookTotals:
    counted = select(
        webhooks.c.state, func.count(), func.sum(webhooks.c.delivered), func.sum(webhooks.c.failed)
    ).group_by(webhooks.c.state)
    rows = connection.execute(counted).all()
    return WebhookTotals(
        {row[0]: row[1] for row in rows}, sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)
    )


# What a worker does with them


def due(connection: Connection) -> list[tuple[TenantName, bool]]:
    """Tenants whose webhooks have something to be sent and nobody who sends it, and whether each failed the last time;
    those that did not come first."""
    moment = now()
    waiting = (
        select(webhooks.c.tenant, webhooks.c.attempts)
        .join(tenants, tenants.c.name == webhooks.c.tenant)
        .where(
            tenants.c.disabled.is_(False),
            webhooks.c.state != WebhookState.GIVEN_UP,
            or_(webhooks.c.next_try.is_(None), webhooks.c.next_try <= moment),
            _is_free(moment),
            _behind(webhooks.c.tenant).exists(),
        )
        .order_by(webhooks.c.attempts, webhooks.c.last_delivered.asc().nulls_first())
    )
    return [(TenantName(row.tenant), row.attempts > 0) for row in connection.execute(waiting)]


def take(connection: Connection, tenant: TenantName, worker: str, lease: timedelta) -> Row[Any] | None:
    """The webhook, for this worker alone until the lease is over; None: another one has it, or it is gone."""
    moment = now()
    taken = (
        update(webhooks)
        .where(webhooks.c.tenant == tenant, webhooks.c.state != WebhookState.GIVEN_UP, _is_free(moment))
        .values(worker=worker, leased_until=moment + lease)
    )
    return _row(connection, tenant) if connection.execute(taken).rowcount == 1 else None


def behind(connection: Connection, tenant: TenantName) -> list[Behind]:
    """Every stream of which the webhook has not had everything."""
    rows = connection.execute(_behind(tenant))
    return [Behind(stream, number) for stream, number in rows]


def next_of(connection: Connection, hook: Row[Any], at: Behind) -> Next:
    """What is to be sent next of a stream: what the tenant wants to hear, and may."""
    page = events.after(connection, at.stream, at.number, PAGE_EVENTS)
    wants = _Subscription(hook, Identity(hook.tenant, "", held_by(connection, hook.tenant), 0, 0))
    lost: Iterator[OutboxEvent] = iter(())
    if page.tail > at.number and page.told:
        # Only one that hears of this dataset at all is told that something of it is gone.
        lost = iter([events.missed(page, at.stream, page.told[0].dataset, at.number)])
    found = next((told for told in (*lost, *page.told) if wants(told)), None)
    return Next(found, page.through if found is None else found.number)


def delivered(connection: Connection, hook: Row[Any], worker: str, told: OutboxEvent, lease: timedelta) -> bool:
    """Say that an event has arrived. False if the webhook is not this worker's any more."""
    moment = now()
    arrived = {
        "state": WebhookState.ACTIVE,
        "attempts": 0,
        "problem": None,
        "next_try": None,
        "delivered": webhooks.c.delivered + 1,
        "last_delivered": moment,
        "leased_until": moment + lease,
    }
    if not _held(connection, hook, worker, arrived):
        return False
    _move(connection, hook.tenant, told.stream, told.number)
    return True


def passed(connection: Connection, hook: Row[Any], worker: str, stream: str, through: int) -> bool:
    """Say that there is nothing of interest up to a number. False if the webhook is not this worker's any more."""
    if not _held(connection, hook, worker, {"worker": worker}):
        return False
    _move(connection, hook.tenant, stream, through)
    return True


def failed(
    connection: Connection, hook: Row[Any], worker: str, problem: str, next_try: Callable[[int], datetime | None]
) -> datetime | None:
    """Say why an event did not arrive, and give the webhook back. Returns when to try again after so many attempts;
    None: it is given up."""
    tried = select(webhooks.c.attempts).where(webhooks.c.tenant == hook.tenant)
    attempts = 1 + (connection.execute(tried).scalar() or 0)
    again = next_try(attempts)
    values = {
        "state": WebhookState.GIVEN_UP if again is None else WebhookState.FAILING,
        "attempts": attempts,
        "failed": webhooks.c.failed + 1,
        "problem": problem,
        "next_try": again,
    }
    _held(connection, hook, worker, values | FREE)
    return again


def release(connection: Connection, hook: Row[Any], worker: str) -> None:
    _held(connection, hook, worker, FREE)


FREE: dict[str, Any] = {"worker": None, "leased_until": None}


class _Subscription:
    """Whether a webhook is sent an event."""

    def __init__(self, hook: Row[Any], identity: Identity) -> None:
        self._kinds = {*hook.kinds, EventKind.MISSED} if hook.kinds else {*EventKind}
        self._patterns = [DatasetPattern(pattern) for pattern in hook.datasets]
        self._identity = identity

    def __call__(self, told: OutboxEvent) -> bool:
        if told.kind not in self._kinds:
            return False
        tenant = self._identity.tenant
        if told.audience is not None and tenant not in told.audience and not self._identity.administers_lake:
            return False
        if told.dataset is None:
            return True
        chosen = any(pattern.matches(told.dataset) for pattern in self._patterns)
        return chosen and self._identity.level_on(told.dataset) is not None


def _row(connection: Connection, tenant: str) -> Row[Any] | None:
    row: Row[Any] | None = connection.execute(select(webhooks).where(webhooks.c.tenant == tenant)).first()
    return row


def _behind(tenant: Any) -> Any:
    """Streams, and the last number of each that a tenant's webhook had: of one that it never met, all that is kept."""
    same = and_(webhook_cursors.c.stream == event_heads.c.stream, webhook_cursors.c.tenant == tenant)
    had = func.coalesce(webhook_cursors.c.number, event_heads.c.tail)
    return (
        select(event_heads.c.stream, had)
        .select_from(event_heads.outerjoin(webhook_cursors, same))
        .where(event_heads.c.last > had)
        .order_by(event_heads.c.stream)
    )


def _is_free(moment: datetime) -> Any:
    return or_(webhooks.c.leased_until.is_(None), webhooks.c.leased_until < moment)


def _held(connection: Connection, hook: Row[Any], worker: str, values: dict[str, Any]) -> bool:
    """Change a webhook if it is this worker's still, and the one that it took: it may have been made anew since."""
    own = webhooks.c.tenant == hook.tenant, webhooks.c.id == hook.id, webhooks.c.worker == worker
    return connection.execute(update(webhooks).where(*own).values(**values)).rowcount == 1


def _move(connection: Connection, tenant: str, stream: str, number: int) -> None:
    row = upsert(connection, webhook_cursors).values(tenant=tenant, stream=stream, number=number)
    connection.execute(row.on_conflict_do_update(index_elements=["tenant", "stream"], set_={"number": number}))
