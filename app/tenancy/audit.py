"""The audit log: every write in the transaction that makes it, every denial at once."""

from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import Connection, Row, insert, select

from app.db.engine import Database
from app.db.tables import audit
from app.errors import TarnError
from app.model.ids import new_id, now
from app.model.names import TenantName
from app.model.tenant import AuditEntry, Identity, Outcome
from app.tenancy.limits import Rate

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Act:
    """What a request is about to do, and who does it: all that the log needs besides the outcome."""

    identity: Identity | None
    action: str
    target: str
    request: str

    @classmethod
    def of_job(cls, tenant: TenantName, action: str, job: str) -> "Act":
        """What a job does, in the name of the tenant that asked for it."""
        return cls.of_tenant(tenant, action, f"/v1/jobs/{job}", job)

    @classmethod
    def of_tenant(cls, tenant: TenantName, action: str, target: str, request: str) -> "Act":
        """What the worker does, in the name of a tenant."""
        return cls(Identity(tenant, "", (), 0, 0), action, target, request)

    def done(self, connection: Connection, target: str | None = None, **detail: Any) -> None:
        """Record a write in the transaction that makes it: what changes in SQL and this record commit together.

        A document in the lake is put before: a crash between put and commit leaves it without a record.
        """
        _record(connection, self, Outcome.DONE, target or self.target, detail)


def done_all(connection: Connection, acts: list[tuple[Act, dict[str, Any]]]) -> None:
    """Record many writes at once, in the transaction that makes them."""
    if acts:
        connection.execute(insert(audit), [_values(act, Outcome.DONE, act.target, detail) for act, detail in acts])


class Denials:
    """Records refused requests, up to a rate: a flood of them must not become a flood of database writes."""

    def __init__(self, database: Database, per_second: float) -> None:
        self._database = database
        self._per_second = per_second
        self._rate = Rate()

    def record(self, act: Act, error: TarnError) -> None:
        tenant = act.identity.tenant if act.identity else None
        log.warning("denied", action=act.action, target=act.target, tenant=tenant, problem=error.slug)
        if self._rate.wait(tenant or "", self._per_second, max(1, int(self._per_second))):
            return
        try:
            with self._database.write() as connection:
                _record(connection, act, Outcome.DENIED, act.target, {"problem": error.slug, "detail": error.detail})
        except TarnError as failure:  # the refusal stands, whether or not it can be written down
            log.exception("denial not recorded", problem=failure.slug)


def page(connection: Connection, tenant: str | None, before: str | None, limit: int) -> list[AuditEntry]:
    """Entries newest first, of one tenant or of all."""
    query = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if tenant is not None:
        query = query.where(audit.c.tenant == tenant)
    if before is not None:
        query = query.where(audit.c.id < before)
    return [_entry(row) for row in connection.execute(query)]


def _record(connection: Connection, act: Act, outcome: Outcome, target: str, detail: dict[str, Any]) -> None:
    connection.execute(insert(audit).values(**_values(act, outcome, target, detail)))


def _values(act: Act, outcome: Outcome, target: str, detail: dict[str, Any]) -> dict[str, Any]:
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
