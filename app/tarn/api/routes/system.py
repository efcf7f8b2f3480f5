"""Is it alive, is it ready, who am I, and what does a problem mean."""

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from fastapi import Path, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from tarn.access import limits
from tarn.api.http.limits.threads import METRICS
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.services.metrics import CONTENT_TYPE
from tarn.db import worker_heartbeats as workers
from tarn.errors import ProblemNotFound, RouteNotFound, TarnError, problem_types
from tarn.model.ids import now
from tarn.model.names import DatasetPattern, TenantName
from tarn.model.tenant import Level, Limits
from tarn.storage.layout import Layout

routes = router("", "system")

ProblemSlug = StrEnum("ProblemSlug", {slug.replace("-", "_").upper(): slug for slug in problem_types()})  # type: ignore[misc]  # the one closed list, made from the classes


READY_SECONDS = 1.0
"""How long an answer about readiness holds: anybody may ask, and each look goes to the database and the store."""


class Health(BaseModel):
    status: Literal["ok"]


class Readiness(BaseModel):
    """`degraded`: requests are served, but no worker moves what they write."""

    status: Literal["ready", "degraded", "unavailable"]
    database: Literal["ok", "down"]
    storage: Literal["ok", "down"]
    worker: Literal["ok", "silent", "unknown"]


class GrantHeld(BaseModel):
    dataset: DatasetPattern
    level: Level


class WhoAmI(BaseModel):
    """The caller: its tenant, the key it used, what it may do and how much."""

    tenant: TenantName
    key: str
    grants: list[GrantHeld]
    limits: Limits


class ProblemType(BaseModel):
    """What a problem's `type` stands for."""

    type: str
    slug: ProblemSlug
    title: str
    status: int
    retryable: bool
    description: str


@routes.get("/healthz")
async def health() -> Health:
    """The process answers."""
    return Health(status="ok")


@routes.get("/readyz", responses={503: {"model": Readiness, "description": "The database or the store is down."}})
async def ready(house: ServicesDep, response: Response) -> Readiness:
    """The database and the store answer; a silent worker is told, and takes nothing out of service."""
    readiness: Readiness = await house.readiness.get(READY_SECONDS, lambda: _readiness(house))
    response.status_code = 503 if readiness.status == "unavailable" else 200
    return readiness


def _readiness(house: Services) -> Readiness:
    storage: Literal["ok", "down"] = "ok" if _is_storage_up(house) else "down"
    worker = _worker(house)
    database: Literal["ok", "down"] = "down" if worker == "unknown" else "ok"
    if "down" in (database, storage):
        return Readiness(status="unavailable", database=database, storage=storage, worker=worker)
    return Readiness(
        status="ready" if worker == "ok" else "degraded", database=database, storage=storage, worker=worker
    )


@routes.get("/metrics", response_class=PlainTextResponse, responses=raises(RouteNotFound))
async def metrics(house: ServicesDep) -> PlainTextResponse:
    """Prometheus metrics, unless they have a port of their own."""
    if house.settings.metrics_port is not None:
        raise RouteNotFound("metrics are served on a port of their own")
    return PlainTextResponse(await METRICS.run(house.metrics.exposition), media_type=CONTENT_TYPE)


@routes.get("/problems/{slug}", responses=raises(ProblemNotFound))
async def get_problem(slug: Annotated[str, Path(max_length=64)]) -> ProblemType:
    """Explain a type of problem: this is where a problem's `type` points."""
    kind = problem_types().get(slug)
    if kind is None:
        raise ProblemNotFound(f"there is no problem {slug!r}")
    return ProblemType(
        type=kind.type_uri(),
        slug=ProblemSlug(slug),
        title=kind.title(),
        status=kind.status,
        retryable=kind.retryable,
        description=kind.__doc__ or "",
    )


@routes.get("/v1/whoami")
def whoami(house: ServicesDep, caller: CallerDep) -> WhoAmI:
    """Show the caller's tenant, key, grants and limits."""
    identity = caller.identity
    with house.database.read() as connection:
        allowed = limits.of(connection, identity.tenant, house.settings)
    held = [GrantHeld(dataset=dataset, level=level) for dataset, level in identity.grants]
    return WhoAmI(tenant=identity.tenant, key=identity.key, grants=held, limits=allowed)


def _is_storage_up(house: Services) -> bool:
    try:
        return house.store.head(Layout.lake) is not None
    except TarnError:
        return False


def _worker(house: Services) -> Literal["ok", "silent", "unknown"]:
    try:
        with house.database.read() as connection:
            seen = workers.last_seen(connection)
    except TarnError:
        return "unknown"
    oldest = now() - timedelta(seconds=house.settings.worker_silent_after)
    return "ok" if seen is not None and seen > oldest else "silent"
