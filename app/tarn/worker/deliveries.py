"""Webhook deliveries: send events to the tenants' own servers.

The events of a webhook are sent one after the other, each after the previous one was accepted; those of one dataset in
the order in which they happened. Several webhooks are served concurrently, each for a limited time slice. Receivers
that fail or are slow are served by a separate thread pool, so that they do not delay the others.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from enum import Enum, auto
from itertools import islice
from typing import Any

import structlog
from sqlalchemy import Row

from tarn.archive.fetching.addresses import Guard, resolve_by_system
from tarn.archive.fetching.dns import Lookups, Resolve
from tarn.archive.fetching.urls import Url
from tarn.archive.fetching.web import Web
from tarn.coordination import webhooks
from tarn.coordination.webhooks import StreamCursor
from tarn.db.engine import Database
from tarn.db.notifications import Waiter
from tarn.db.outbox import OutboxEvent
from tarn.errors import SchemaViolation, TarnError
from tarn.model.names import TenantName
from tarn.model.work.backoff import delays
from tarn.model.work.event import EventKind
from tarn.model.work.job import upper_half
from tarn.model.work.webhook import EVENT_HEADER, SIGNATURE_HEADER, TIME_HEADER, signature
from tarn.settings import Settings

log = structlog.get_logger(__name__)

THREADS = 4
"""Threads for receivers that respond normally, and as many for failing or slow ones."""

SLICE_EVENTS = 50
"""Events of one dataset that are sent before those of the next dataset."""

SLICE_SECONDS = 5.0
"""Seconds after which a time slice ends, once the current event is sent."""

SLOW = 1.0
"""Seconds for one event from which on a receiver counts as slow."""

MIN_INTERVAL = 0.02
"""Minimum seconds between two queries for due webhooks."""

RETRY_SECONDS = 0.5
"""Seconds after which a query that failed is repeated."""

BASE, CAP = 2.0, 1800.0
"""Seconds of back-off: the first and the last upper bound. The delay is drawn from the upper half of each bound."""


class DeliveryFailed(Exception):
    """The receiver did not accept an event."""


class Sent(Enum):
    """What was sent of a stream's events."""

    EVERYTHING = auto()
    MORE_TO_SEND = auto()
    FAILED = auto()
    """The receiver did not accept an event, or another worker has the webhook now."""


class Deliveries:
    """Webhook deliveries of one worker."""

    def __init__(
        self, settings: Settings, database: Database, worker: str, resolve: Resolve = resolve_by_system
    ) -> None:
        """Raise StartRefused if the setting of private hosts is invalid."""
        self._settings = settings
        self._database = database
        self._worker = worker
        guard = Guard.opened_for(settings.fetch_private_hosts, Lookups(resolve, settings.webhook_timeout))
        self._web = Web(guard, 0, settings.webhook_timeout, settings.webhook_timeout)
        self._lease = timedelta(seconds=2 * settings.webhook_timeout)
        self._slow: set[TenantName] = set()
        self._busy: dict[TenantName, Future[None]] = {}

    def run(self, stop: threading.Event, waiter: Waiter) -> None:
        """Serve every webhook that has events to send until `stop` is set. New events and `stop` wake the waiter."""
        with ExitStack() as stack:
            pools = [stack.enter_context(ThreadPoolExecutor(THREADS, name)) for name in ("webhooks", "slow webhooks")]
            while not stop.is_set():
                self._busy = {tenant: delivery for tenant, delivery in self._busy.items() if not delivery.done()}
                for tenant, failing in self._due():
                    if tenant not in self._busy:
                        pool = pools[failing or tenant in self._slow]
                        self._busy[tenant] = pool.submit(self._guarded, tenant, stop, waiter)
                # Every event wakes this loop: many in a short time are one reason to look for due webhooks.
                stop.wait(MIN_INTERVAL)
                waiter.wait(self._seconds_until_due())
            for pool in pools:
                pool.shutdown(cancel_futures=True)

    def step(self) -> None:
        """Serve every webhook that has events to send once."""
        for tenant, _ in self._due():
            self.serve(tenant, threading.Event())

    def _due(self) -> list[tuple[TenantName, bool]]:
        try:
            with self._database.read() as connection:
                return webhooks.due(connection)
        except TarnError as error:
            log.warning("cannot query due webhook deliveries", problem=error.slug)
            return []

    def _seconds_until_due(self) -> float:
        """Return for how long to wait without a notification: until a failed delivery is tried again."""
        try:
            with self._database.read() as connection:
                return min(self._settings.worker_poll, webhooks.seconds_until_due(connection))
        except Exception as error:  # noqa: BLE001 - if this thread ended, nothing would be delivered
            log.warning("cannot query when a webhook delivery is due", error=f"{type(error).__name__}: {error}"[:300])
            return min(self._settings.worker_poll, RETRY_SECONDS)

    def _guarded(self, tenant: TenantName, stop: threading.Event, waiter: Waiter) -> None:
        try:
            if self.serve(tenant, stop):
                waiter.wake()
        except TarnError as error:
            log.warning("webhook deliveries are delayed", tenant=tenant, problem=error.slug)
        except Exception:  # the lease expires, and the next time slice continues at the same event
            log.exception("a webhook delivery failed unexpectedly", tenant=tenant)

    def serve(self, tenant: TenantName, stop: threading.Event) -> bool:
        """Serve one webhook for one time slice. Returns whether it may have more events to send now.

        Raises Unavailable while the database does not answer.
        """
        with self._database.write() as connection:
            hook = webhooks.take(connection, tenant, self._worker, self._lease)
        if hook is None:
            return False
        with self._database.read() as connection:
            streams = webhooks.behind(connection, tenant)
        end = time.monotonic() + SLICE_SECONDS
        has_more = False
        for at in streams:
            sent = self._send_all(hook, at, lambda: stop.is_set() or time.monotonic() >= end)
            has_more |= sent is Sent.MORE_TO_SEND
            if sent is Sent.FAILED or stop.is_set() or time.monotonic() >= end:
                break
        with self._database.write() as connection:
            webhooks.release(connection, hook, self._worker)
        return has_more

    def _send_all(self, hook: Row[Any], at: StreamCursor, is_over: Callable[[], bool]) -> Sent:
        """Send some events of a stream, at least one."""
        for _ in range(SLICE_EVENTS):
            with self._database.read() as connection:
                event, through = webhooks.next_of(connection, hook, at)
            if through == at.number:
                return Sent.EVERYTHING
            if event is None:
                with self._database.write() as connection:
                    if not webhooks.passed(connection, hook, self._worker, at.stream, through, self._lease):
                        return Sent.FAILED
            elif not self._deliver(hook, event):
                return Sent.FAILED
            at = StreamCursor(at.stream, through)
            if is_over():
                break
        return Sent.MORE_TO_SEND

    def _deliver(self, hook: Row[Any], event: OutboxEvent) -> bool:
        """Send one event and record the outcome. Returns False if it failed, or another worker took the webhook."""
        start = time.monotonic()
        try:
            self._post(hook, event)
        except DeliveryFailed as failure:
            problem = str(failure)
            with self._database.write() as connection:
                next_try = webhooks.failed(connection, hook, self._worker, problem, self._delay)
            log.warning(
                "webhook delivery failed",
                tenant=hook.tenant,
                event_id=event_id(event),
                retry_at=next_try,
                reason=problem,
            )
            return False
        finally:
            slow = time.monotonic() - start > SLOW
            (self._slow.add if slow else self._slow.discard)(hook.tenant)
        with self._database.write() as connection:
            return webhooks.delivered(connection, hook, self._worker, event, self._lease)

    def _post(self, hook: Row[Any], event: OutboxEvent) -> None:
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            EVENT_HEADER: event_id(event),
            TIME_HEADER: timestamp,
            SIGNATURE_HEADER: signature(hook.secret, timestamp, event.body),
        }
        try:
            url = Url.parse(hook.url)
            status = self._web.post(url, event.body, headers)
        except SchemaViolation as error:
            raise DeliveryFailed(error.members["errors"][0].reason) from None
        except TarnError as error:
            raise DeliveryFailed(error.detail) from None
        if not 200 <= status < 300:
            raise DeliveryFailed(f"{url.origin} responded with status {status}")

    def _delay(self, attempts: int) -> timedelta | None:
        """Return how long to wait before an event is tried again, or None after the last attempt."""
        if attempts >= self._settings.webhook_attempts:
            return None
        seconds = delays(BASE, CAP, draw=upper_half)
        return timedelta(seconds=next(islice(seconds, attempts - 1, None)))


def event_id(event: OutboxEvent) -> str:
    """Return the id of a delivery, which is the same for every retry."""
    name = f"{event.stream}.{event.number}"
    return f"{name}.missed" if event.kind is EventKind.MISSED else name
