"""The audit log: every write in the transaction that makes it, every denial at once, and both for as long as is set."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, Row, Select, bindparam, delete, insert, or_, select, update

from tarn.db.engine import Database
from tarn.db.tables import audit
from tarn.errors import TarnError, Unauthenticated
from tarn.model.ids import first_id, new_id, now
from tarn.model.names import DatasetName, TenantName
from tarn.model.tenant import AuditEntry, Identity, Outcome

log = structlog.get_logger(__name__)

RECORD_SECONDS = 60.0
"""Seconds for which denials of one kind are one record."""

WRITE_DELAY = 5.0
"""Seconds after which a record says how many denials it stands for by then."""

TRIM_ROWS = 5000
"""Records deleted in one transaction: one large DELETE would stall every writer of SQLite."""


@dataclass(frozen=True, slots=True)
class AuditedAction:
    """What a request is about to do, and who does it: all that the log needs besides the outcome."""

    identity: Identity | None
    action: str
    target: str
    request: str

    @classmethod
    def of_job(cls, tenant: TenantName, action: str, job: str) -> "AuditedAction":
        """What a job does, in the name of the tenant that asked for it."""
        return cls.of_tenant(tenant, action, f"/v1/jobs/{job}", job)

    @classmethod
    def of_tenant(cls, tenant: TenantName, action: str, target: str, request: str) -> "AuditedAction":
        """What the worker does, in the name of a tenant."""
        return cls(Identity(tenant, "", (), 0, 0), action, target, request)

    def done(self, connection: Connection, target: str | None = None, **detail: Any) -> None:
        """Record a write in the transaction that makes it: what changes in SQL and this record commit together.

        A document in the lake is put before: a crash between put and commit leaves it without a record.
        """
        _record(connection, self, Outcome.DONE, target or self.target, detail)


def done_all(connection: Connection, acts: list[tuple[AuditedAction, dict[str, Any]]]) -> None:
    """Record many writes at once, in the transaction that makes them."""
    if acts:
        connection.execute(insert(audit), [_values(act, Outcome.DONE, act.target, detail) for act, detail in acts])


@dataclass(slots=True)
class _DenialCount:
    """Denials that one record stands for."""

    record: str
    detail: dict[str, Any]
    until: float
    count: int = 1


class Denials:
    """Records refused requests: the first of a kind at once, and with it how many more there were within a minute.

    One kind is what one key was refused for on one route. So there are no more records than keys and routes, however
    many requests are sent: a flood of them becomes no flood of writes, and does not fill the disk.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str | None, ...], _DenialCount] = {}
        self._untold: dict[str, _DenialCount] = {}
        """By record: those that stand for more than they say."""
        self._telling: threading.Timer | None = None

    def record(self, act: AuditedAction, error: TarnError) -> None:
        tenant = act.identity.tenant if act.identity else None
        refused = error.key if isinstance(error, Unauthenticated) else None
        key = refused or (act.identity.key if act.identity else None) or None
        log.warning("denied", action=act.action, target=act.target, tenant=tenant, key=key, problem=error.slug)
        kind = tenant, key, act.action, error.slug
        detail = {"problem": error.slug, "detail": error.detail}
        with self._lock:
            if self._counted(kind):
                return
            self._kinds = {one: known for one, known in self._kinds.items() if self._is_open(known)}
            self._kinds[kind] = first = _DenialCount(new_id(), detail, self._clock() + RECORD_SECONDS)
        values = _values(act, Outcome.DENIED, act.target, detail | {"count": 1})
        try:
            with self._database.write() as connection:
                connection.execute(insert(audit).values(**values | {"id": first.record, "key": key}))
        except TarnError as failure:  # the refusal stands, whether or not it can be written down
            log.exception("denial not recorded", problem=failure.slug)
            with self._lock:
                self._kinds.pop(kind, None)

    def tell(self) -> None:
        """Write down how many denials each record stands for by now."""
        with self._lock:
            untold, self._untold, self._telling = self._untold, {}, None
            news = [{"record": one.record, "told": one.detail | {"count": one.count}} for one in untold.values()]
        if not news:
            return
        one = update(audit).where(audit.c.id == bindparam("record")).values(detail=bindparam("told"))
        try:
            with self._database.write() as connection:
                connection.execute(one, news)
        except TarnError as failure:
            log.warning("denials are counted later", problem=failure.slug)
            with self._lock:
                self._untold = untold | self._untold

    def close(self) -> None:
        """Tell what is not told yet."""
        with self._lock:
            if self._telling is not None:
                self._telling.cancel()
        self.tell()

    def _counted(self, kind: tuple[str | None, ...]) -> bool:
        """Whether there is a record of this kind, which counts one more then."""
        known = self._kinds.get(kind)
        if known is None or not self._is_open(known):
            return False
        known.count += 1
        self._untold[known.record] = known
        if self._telling is None:
            self._telling = threading.Timer(WRITE_DELAY, self.tell)
            self._telling.daemon = True
            self._telling.start()
        return True

    def _is_open(self, known: _DenialCount) -> bool:
        return known.until > self._clock()


class AuditFilter(BaseModel):
    """Which entries of the log are asked for: those to which all that is said here applies."""

    model_config = ConfigDict(frozen=True)

    tenant: TenantName | None = None
    key: str | None = None
    action: str | None = None
    outcome: Outcome | None = None
    dataset: DatasetName | None = None
    request: str | None = None
    since: datetime | None = None
    until: datetime | None = None


ANY = AuditFilter()


def page(connection: Connection, wanted: AuditFilter, before: str | None, limit: int) -> list[AuditEntry]:
    """Entries newest first."""
    query = _matching(wanted).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(audit.c.id < before)
    return [_entry(row) for row in connection.execute(query)]


def trim(database: Database, before: datetime) -> int:
    """Delete what was recorded before a moment, in short transactions. Returns how many records went."""
    gone, end = 0, first_id(before)
    while True:
        with database.write() as connection:
            oldest = select(audit.c.id).where(audit.c.id < end).order_by(audit.c.id).limit(TRIM_ROWS)
            found = connection.execute(oldest).scalars().all()
            if found:
                connection.execute(delete(audit).where(audit.c.id <= found[-1]))
        gone += len(found)
        if len(found) < TRIM_ROWS:
            return gone


def _matching(wanted: AuditFilter) -> Select[Any]:
    query = select(audit)
    for name in ("tenant", "key", "action", "outcome", "request"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(audit.c[name] == value)
    if wanted.dataset is not None:
        path = f"/v1/datasets/{wanted.dataset}"
        below = audit.c.target.startswith(f"{path}/", autoescape=True)
        query = query.where(or_(audit.c.target.in_((path, wanted.dataset)), below))
    # An id begins with the moment at which it was made, and is in the index.
    if wanted.since is not None:
        query = query.where(audit.c.id >= first_id(wanted.since))
    if wanted.until is not None:
        query = query.where(audit.c.id < first_id(wanted.until))
    return query


def _record(connection: Connection, act: AuditedAction, outcome: Outcome, target: str, detail: dict[str, Any]) -> None:
    connection.execute(insert(audit).values(**_values(act, outcome, target, detail)))


def _values(act: AuditedAction, outcome: Outcome, target: str, detail: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": new_id(),
        "at": now(),
        "tenant": act.identity.tenant if act.identity else None,
        "key": (act.identity.key or None) if act.identity else None,
        "action": act.action,
        "target": target,
        "outcome": outcome,
        "request": act.request,
        "detail": detail,
    }


def _entry(row: Row[Any]) -> AuditEntry:
    return AuditEntry.model_validate(row._mapping, from_attributes=True)
