"""Audit log: records every write in its own transaction and every denied request, and deletes expired records."""

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
"""Seconds for which denials of one kind are counted in the same record."""

WRITE_DELAY = 5.0
"""Seconds after which the count of a record is updated in SQL."""

TRIM_ROWS = 5000
"""Records deleted in one transaction: one large DELETE would stall every writer of SQLite."""


@dataclass(frozen=True, slots=True)
class AuditedAction:
    """An action to be audited: its caller, name, target and request id. Its outcome is not known yet."""

    identity: Identity | None
    action: str
    target: str
    request: str

    @classmethod
    def of_job(cls, tenant: TenantName, action: str, job: str) -> "AuditedAction":
        """Return an action of a job, on behalf of the tenant that requested it."""
        return cls.of_tenant(tenant, action, f"/v1/jobs/{job}", job)

    @classmethod
    def of_tenant(cls, tenant: TenantName, action: str, target: str, request: str) -> "AuditedAction":
        """Return an action of the worker, on behalf of a tenant."""
        return cls(Identity(tenant, "", (), 0, 0), action, target, request)

    @property
    def tenant(self) -> TenantName:
        """The tenant that acts, which must be known."""
        assert self.identity is not None
        return self.identity.tenant

    def done(self, connection: Connection, target: str | None = None, **detail: Any) -> None:
        """Record a write in the transaction that makes it, so that the change in SQL and its record commit together.

        A document in the lake is written before the commit: a crash in between leaves it without a record.
        """
        _record(connection, self, Outcome.DONE, target or self.target, detail)


def done_all(connection: Connection, acts: list[tuple[AuditedAction, dict[str, Any]]]) -> None:
    """Record several writes with one statement, in the transaction that makes them."""
    if acts:
        connection.execute(insert(audit), [_values(act, Outcome.DONE, act.target, detail) for act, detail in acts])


@dataclass(slots=True)
class _DenialCount:
    """Denials counted in one record."""

    record: str
    detail: dict[str, Any]
    until: float
    count: int = 1


class Denials:
    """Recorder of denied requests: writes the first of a kind immediately, and counts further ones within a minute.

    A kind is tenant, key, action and problem. So the number of records is bounded by keys and routes: a flood of
    requests causes no flood of writes, and does not fill the disk.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[tuple[str | None, ...], _DenialCount] = {}
        self._outdated: dict[str, _DenialCount] = {}
        """Kinds by record id whose count in SQL is outdated."""
        self._timer: threading.Timer | None = None

    def record(self, act: AuditedAction, error: TarnError) -> None:
        tenant = act.identity.tenant if act.identity else None
        refused = error.key if isinstance(error, Unauthenticated) else None
        key = refused or (act.identity.key if act.identity else None) or None
        log.warning("request denied", action=act.action, target=act.target, tenant=tenant, key=key, problem=error.slug)
        kind = tenant, key, act.action, error.slug
        detail = {"problem": error.slug, "detail": error.detail}
        with self._lock:
            if self._counted(kind):
                return
            self._open = {other: count for other, count in self._open.items() if self._is_current(count)}
            self._open[kind] = first = _DenialCount(new_id(), detail, self._clock() + RECORD_SECONDS)
        values = _values(act, Outcome.DENIED, act.target, detail | {"count": 1})
        try:
            with self._database.write() as connection:
                connection.execute(insert(audit).values(**values | {"id": first.record, "key": key}))
        except TarnError as failure:  # the request is denied whether or not it can be recorded
            log.exception("denial not recorded", problem=failure.slug)
            with self._lock:
                self._open.pop(kind, None)

    def write_counts(self) -> None:
        """Write the current counts of denials to SQL."""
        with self._lock:
            outdated, self._outdated, self._timer = self._outdated, {}, None
            changes = [
                {"record": kind.record, "detail_with_count": kind.detail | {"count": kind.count}}
                for kind in outdated.values()
            ]
        if not changes:
            return
        change = update(audit).where(audit.c.id == bindparam("record")).values(detail=bindparam("detail_with_count"))
        try:
            with self._database.write() as connection:
                connection.execute(change, changes)
        except TarnError as failure:
            log.warning("denial counts not written, will be retried", problem=failure.slug)
            with self._lock:
                self._outdated = outdated | self._outdated

    def close(self) -> None:
        """Write outstanding counts."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
        self.write_counts()

    def _counted(self, kind: tuple[str | None, ...]) -> bool:
        """Count the denial in an open record of its kind; return False if there is none."""
        known = self._open.get(kind)
        if known is None or not self._is_current(known):
            return False
        known.count += 1
        self._outdated[known.record] = known
        if self._timer is None:
            self._timer = threading.Timer(WRITE_DELAY, self.write_counts)
            self._timer.daemon = True
            self._timer.start()
        return True

    def _is_current(self, known: _DenialCount) -> bool:
        return known.until > self._clock()


class AuditFilter(BaseModel):
    """Filter of audit log entries; all given conditions must match."""

    model_config = ConfigDict(frozen=True)

    tenant: TenantName | None = None
    key: str | None = None
    action: str | None = None
    outcome: Outcome | None = None
    dataset: DatasetName | None = None
    request: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class AuditLog:
    """Reads the audit log."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, criteria: AuditFilter, before: str | None, limit: int) -> list[AuditEntry]:
        """Return matching entries, newest first."""
        query = _matching(criteria).order_by(audit.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(audit.c.id < before)
        with self._database.read() as connection:
            return [_entry(row) for row in connection.execute(query)]


def trim(database: Database, before: datetime) -> int:
    """Delete records older than a time, in short transactions. Return the number of deleted records."""
    deleted, end = 0, first_id(before)
    while True:
        with database.write() as connection:
            oldest = select(audit.c.id).where(audit.c.id < end).order_by(audit.c.id).limit(TRIM_ROWS)
            ids = connection.execute(oldest).scalars().all()
            if ids:
                connection.execute(delete(audit).where(audit.c.id <= ids[-1]))
        deleted += len(ids)
        if len(ids) < TRIM_ROWS:
            return deleted


def _matching(criteria: AuditFilter) -> Select[Any]:
    query = select(audit)
    for name in ("tenant", "key", "action", "outcome", "request"):
        value = getattr(criteria, name)
        if value is not None:
            query = query.where(audit.c[name] == value)
    if criteria.dataset is not None:
        path = f"/v1/datasets/{criteria.dataset}"
        below = audit.c.target.startswith(f"{path}/", autoescape=True)
        query = query.where(or_(audit.c.target.in_((path, criteria.dataset)), below))
    # An id begins with its creation time, and is indexed.
    if criteria.since is not None:
        query = query.where(audit.c.id >= first_id(criteria.since))
    if criteria.until is not None:
        query = query.where(audit.c.id < first_id(criteria.until))
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
