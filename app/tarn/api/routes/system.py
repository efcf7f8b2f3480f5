"""System routes: health, readiness, metrics, problem types, and the caller's identity."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from fastapi import Path, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from tarn.api.http.limits.threads import METRICS
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.services.metrics import CONTENT_TYPE
from tarn.errors import ProblemNotFound, RouteNotFound, TarnError, problem_types
from tarn.model.ids import now
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import Level, Limits
from tarn.storage.layout import Layout

routes = router("", "system")

ProblemSlug = StrEnum("ProblemSlug", {slug.replace("-", "_").upper(): slug for slug in problem_types()})  # type: ignore[misc]  # the one closed list, made from the classes


READY_SECONDS = 1.0
"""Seconds for which a readiness result is cached: the route is open to everyone, and each check queries the database
and the store."""


class Health(BaseModel):
    """The process is running."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Readiness of the process. `degraded`: requests are served, but no worker has sent a heartbeat recently."""

    status: Literal["ready", "degraded", "unavailable"]
    database: Literal["ok", "down"]
    storage: Literal["ok", "down"]
    worker: Literal["ok", "silent", "unknown"]


class GrantHeld(BaseModel):
    """A grant of the caller: a level on the datasets that a pattern matches."""

    dataset: DatasetPattern
    level: Level


class WhoAmI(BaseModel):
    """The caller: its tenant, the key it used, its grants and its limits."""

    tenant: TenantName
    key: str
    grants: list[GrantHeld]
    limits: Limits


class ProblemType(BaseModel):
    """The description of a problem type."""

    type: str
    slug: ProblemSlug
    title: str
    status: int
    retryable: bool
    description: str


@routes.get("/healthz")
async def health() -> Health:
    """Check that the process is running."""
    return Health(status="ok")


@routes.get(
    "/readyz", responses={503: {"model": Readiness, "description": "The database or the store is unavailable."}}
)
async def ready(services: ServicesDep, response: Response) -> Readiness:
    """Check that the database and the store are available; a missing worker is reported, with status 200."""
    readiness: Readiness = await services.readiness.get(READY_SECONDS, lambda: _readiness(services))
    response.status_code = 503 if readiness.status == "unavailable" else 200
    return readiness


def _readiness(services: Services) -> Readiness:
    storage: Literal["ok", "down"] = "ok" if _is_storage_up(services) else "down"
    worker = _worker(services)
    database: Literal["ok", "down"] = "down" if worker == "unknown" else "ok"
    if "down" in (database, storage):
        return Readiness(status="unavailable", database=database, storage=storage, worker=worker)
    return Readiness(
        status="ready" if worker == "ok" else "degraded", database=database, storage=storage, worker=worker
    )


@routes.get("/metrics", response_class=PlainTextResponse, responses=raises(RouteNotFound))
async def metrics(services: ServicesDep) -> PlainTextResponse:
    """Get Prometheus metrics, unless TARN_METRICS_PORT is set."""
    if services.settings.metrics_port is not None:
        raise RouteNotFound("metrics are served on a separate port (TARN_METRICS_PORT)")
    return PlainTextResponse(await METRICS.run(services.metrics.exposition), media_type=CONTENT_TYPE)


@routes.get("/problems/{slug}", responses=raises(ProblemNotFound))
async def get_problem(slug: Annotated[str, Path(max_length=64)]) -> ProblemType:
    """Describe a problem type; a problem's `type` is the URL of this route."""
    kind = problem_types().get(slug)
    if kind is None:
        raise ProblemNotFound(f"there is no problem type {slug!r}")
    return ProblemType(
        type=kind.type_uri(),
        slug=ProblemSlug(slug),
        title=kind.title(),
        status=kind.status,
        retryable=kind.retryable,
        description=kind.__doc__ or "",
    )


@routes.get("/v1/whoami")
def whoami(services: ServicesDep, caller: CallerDep) -> WhoAmI:
    """Get the caller's tenant, key, grants and limits."""
    identity = caller.identity
    grants = [GrantHeld(dataset=dataset, level=level) for dataset, level in identity.grants]
    limits = services.limits.get(identity.tenant)
    return WhoAmI(tenant=identity.tenant, key=identity.key, grants=grants, limits=limits)


def _is_storage_up(services: Services) -> bool:
    try:
        return services.store.head(Layout.lake) is not None
    except TarnError:
        return False


def _worker(services: Services) -> Literal["ok", "silent", "unknown"]:
    try:
        heartbeat = services.workload.last_heartbeat()
    except TarnError:
        return "unknown"
    oldest = now() - timedelta(seconds=services.settings.worker_silent_after)
    return "ok" if heartbeat is not None and heartbeat > oldest else "silent"
