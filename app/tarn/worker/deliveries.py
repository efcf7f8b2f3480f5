"""Webhooks: events on their way to tenants' own servers.

A webhook's events are sent one after the other, each once the one before it has arrived; those of one dataset in the
order in which they happened. Several webhooks are served beside each other, in turns. A receiver that fails or is slow
is served by threads of its own kind, so that those who answer do not wait for it.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import structlog
from sqlalchemy import Row

from tarn.archive.addresses import Guard, resolve_by_system
from tarn.archive.dns import Lookups, Resolve
from tarn.archive.urls import Url
from tarn.archive.web import Web
from tarn.coordination import webhooks
from tarn.coordination.webhooks import Behind
from tarn.db.engine import Database
from tarn.db.outbox import OutboxEvent
from tarn.errors import SchemaViolation, TarnError
from tarn.model.backoff import delays
from tarn.model.event import EventKind
from tarn.model.ids import now
from tarn.model.job import upper_half
from tarn.model.names import TenantName
from tarn.model.webhook import EVENT_HEADER, SIGNATURE_HEADER, TIME_HEADER, signature
from tarn.settings import Settings

log = structlog.get_logger(__name__)

THREADS = 4
"""For those who answer, and as many for those who do not."""

SLICE_EVENTS = 50
"""Events of one dataset that are sent before those of the next one."""

SLICE_SECONDS = 5.0
"""Seconds after which a turn ends with the event that is being sent."""

SLOW = 1.0
"""Seconds for one event from which on a receiver counts as slow."""

BASE, CAP = 2.0, 1800.0
"""Seconds of back-off: the first bound, and the last. Half of each is waited at least."""


class DeliveryFailed(Exception):
    """The receiver did not take an event."""


class Deliveries:
    """One worker's deliveries."""

    def __init__(
        self, settings: Settings, database: Database, worker: str, resolve: Resolve = resolve_by_system
    ) -> None:
        """Raises StartRefused for hosts that cannot be opened."""
        self._settings = settings
        self._database = database
        self._worker = worker
        guard = Guard.opened_for(settings.fetch_private_hosts, Lookups(resolve, settings.webhook_patience))
        self._web = Web(guard, 0, settings.webhook_patience, settings.webhook_patience)
        self._lease = timedelta(seconds=2 * settings.webhook_patience)
        self._slow: set[TenantName] = set()
        self._busy: dict[TenantName, Future[None]] = {}

    def run(self, stop: threading.Event) -> None:
        """Serve every webhook that has something to be sent, again and again until told to stop."""
        with ExitStack() as stack:
            pools = [stack.enter_context(ThreadPoolExecutor(THREADS, name)) for name in ("webhooks", "slow webhooks")]
            while not stop.wait(self._settings.worker_poll):
                self._busy = {tenant: turn for tenant, turn in self._busy.items() if not turn.done()}
                for tenant, failing in self._due():
                    if tenant not in self._busy:
                        pool = pools[failing or tenant in self._slow]
                        self._busy[tenant] = pool.submit(self._guarded, tenant, stop)
            for pool in pools:
                pool.shutdown(cancel_futures=True)

    def step(self) -> None:
        """Give every webhook that has something to be sent one turn."""
        for tenant, _ in self._due():
            self.serve(tenant, threading.Event())

    def _due(self) -> list[tuple[TenantName, bool]]:
        try:
            with self._database.read() as connection:
                return webhooks.due(connection)
        except TarnError as error:
            log.warning("cannot look for deliveries", problem=error.slug)
            return []

    def _guarded(self, tenant: TenantName, stop: threading.Event) -> None:
        try:
            self.serve(tenant, stop)
        except TarnError as error:
            log.warning("deliveries wait", tenant=tenant, problem=error.slug)
        except Exception:  # the lease ends by itself, and the next turn begins where this one was
            log.exception("a delivery ended in a way that it should not", tenant=tenant)

    def serve(self, tenant: TenantName, stop: threading.Event) -> None:
        """One turn of one webhook. Raises Unavailable while the database is away."""
        with self._database.write() as connection:
            hook = webhooks.take(connection, tenant, self._worker, self._lease)
        if hook is None:
            return
        with self._database.read() as connection:
            streams = webhooks.behind(connection, tenant)
        end = time.monotonic() + SLICE_SECONDS
        for at in streams:
            if stop.is_set() or not self._send_all(hook, at, lambda: stop.is_set() or time.monotonic() >= end):
                break
        with self._database.write() as connection:
            webhooks.release(connection, hook, self._worker)

    def _send_all(self, hook: Row[Any], at: Behind, enough: Callable[[], bool]) -> bool:
        """Send some of a stream's events. False if the turn is over."""
        for _ in range(SLICE_EVENTS):
            with self._database.read() as connection:
                told, through = webhooks.next_of(connection, hook, at)
            if through == at.number:
                return True
            if told is None:
                with self._database.write() as connection:
                    if not webhooks.passed(connection, hook, self._worker, at.stream, through):
                        return False
            elif not self._deliver(hook, told):
                return False
            at = Behind(at.stream, through)
            if enough():
                return False
        return True

    def _deliver(self, hook: Row[Any], told: OutboxEvent) -> bool:
        """Send one event and write down what came of it. False if it failed, or the webhook is another worker's."""
        begun = time.monotonic()
        try:
            self._post(hook, told)
        except DeliveryFailed as failure:
            problem = str(failure)
            with self._database.write() as connection:
                again = webhooks.failed(connection, hook, self._worker, problem, self._next_try)
            log.warning("event not delivered", tenant=hook.tenant, id=event_id(told), again=again, why=problem)
            return False
        finally:
            slow = time.monotonic() - begun > SLOW
            (self._slow.add if slow else self._slow.discard)(hook.tenant)
        with self._database.write() as connection:
            return webhooks.delivered(connection, hook, self._worker, told, self._lease)

    def _post(self, hook: Row[Any], told: OutboxEvent) -> None:
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            EVENT_HEADER: event_id(told),
            TIME_HEADER: timestamp,
            SIGNATURE_HEADER: signature(hook.secret, timestamp, told.body),
        }
        try:
            url = Url.parse(hook.url)
            status = self._web.post(url, told.body, headers)
        except SchemaViolation as error:
            raise DeliveryFailed(error.members["errors"][0].reason) from None
        except TarnError as error:
            raise DeliveryFailed(error.detail) from None
        if not 200 <= status < 300:
            raise DeliveryFailed(f"{url.origin} answers {status}")

    def _next_try(self, attempts: int) -> datetime | None:
        """When to try again after so many attempts at one event; None: not at all."""
        if attempts >= self._settings.webhook_attempts:
            return None
        waits = delays(BASE, CAP, draw=upper_half)
        return now() + timedelta(seconds=next(islice(waits, attempts - 1, None)))


def event_id(told: OutboxEvent) -> str:
    """What a delivery is known by, however often it is sent."""
    name = f"{told.stream}.{told.number}"
    return f"{name}.missed" if told.kind is EventKind.MISSED else name
