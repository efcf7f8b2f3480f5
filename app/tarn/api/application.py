"""The HTTP application, put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tarn.api.http import api_docs as docs
from tarn.api.http import problems
from tarn.api.http.bodies.body_middleware import BodyMiddleware, Pace
from tarn.api.http.middleware.cors import Cors
from tarn.api.http.middleware.request_middleware import HEADER, ExceptionMiddleware, RequestMiddleware
from tarn.api.http.openapi_links import add_links
from tarn.api.http.route_access import check_complete
from tarn.api.http.services.container import Services
from tarn.api.routes import (
    admin,
    datasets,
    diffs,
    entities,
    entity_reads,
    events,
    exports,
    files,
    jobs,
    journal,
    locks,
    mappings,
    operations,
    queue,
    refs,
    snapshots,
    stages,
    statement_reads,
    statements,
    system,
    tags,
    uploads,
    webhooks,
)
from tarn.memory import PeriodicTrim
from tarn.query.active_reads import ActiveReadReporter

TITLE, VERSION, ABOUT = "Tarn", "1", "A lakehouse for FollowTheMoney data."

ROUTERS = (
    system.routes,
    docs.routes,
    datasets.catalog_routes,
    datasets.routes,
    entities.routes,
    entity_reads.routes,
    entity_reads.lake_routes,
    statements.routes,
    statement_reads.routes,
    stages.routes,
    snapshots.routes,
    diffs.routes,
    refs.routes,
    journal.routes,
    exports.routes,
    files.routes,
    uploads.routes,
    mappings.routes,
    tags.routes,
    queue.routes,
    locks.routes,
    operations.routes,
    operations.lake_routes,
    jobs.routes,
    events.routes,
    events.job_routes,
    admin.routes,
    locks.admin_routes,
    webhooks.routes,
)


def create_app(services: Services) -> FastAPI:
    """The application for these services. Raises StartRefused if a route and the access table disagree."""

    @asynccontextmanager
    async def reporting(_: FastAPI) -> AsyncIterator[None]:
        reporter = ActiveReadReporter(services.database, services.reader.running, services.settings.reader_heartbeat)
        with reporter, PeriodicTrim():
            yield

    app = FastAPI(
        title=TITLE,
        version=VERSION,
        description=ABOUT,
        # The document and the page are routes of ours: `docs`.
        openapi_url=None,
        # A redirect would be built from whatever the Host header says.
        redirect_slashes=False,
        lifespan=reporting,
    )
    app.state.services = services
    routes = [route for router in ROUTERS for route in router.routes]
    # Not by `include_router`, which asks every router first and every route of it then, for each request.
    app.router.routes.extend(routes)
    check_complete({route.name for route in routes if hasattr(route, "name")})
    problems.install(app, routes)
    # The last one added is the outermost.
    settings = services.settings
    pace = Pace(settings.body_idle_timeout, settings.body_min_rate, settings.body_rate_grace)
    app.add_middleware(BodyMiddleware, limit=settings.max_document_bytes, pace=pace)
    app.add_middleware(ExceptionMiddleware)
    if services.settings.cors_origins:
        app.add_middleware(
            Cors,
            allow_origins=services.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, "ETag", "Location", "Retry-After", "Tarn-Snapshot"],
        )
    app.add_middleware(RequestMiddleware, metrics=services.metrics)
    if services.watch.tracer is not None:
        # OpenTelemetry is of no use to whoever sends no traces.
        from tarn.api.http.middleware.tracing import TraceMiddleware

        app.add_middleware(TraceMiddleware, tracer=services.watch.tracer)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    return app


def openapi_document() -> dict[str, Any]:
    """FastAPI's document, with problems under their own media type, the ways to authenticate, and links.

    It is the same whatever the settings are.
    """
    document = get_openapi(
        title=TITLE,
        version=VERSION,
        description=ABOUT,
        routes=[route for router in ROUTERS for route in router.routes],
        separate_input_output_schemas=False,
    )
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "An API key, or a JWT of the issuer."}
    }
    for operation in (op for path in document["paths"].values() for op in path.values()):
        if "401" in operation["responses"]:
            operation["security"] = [{"key": []}]
        for status, response in operation["responses"].items():
            content = response.get("content", {})
            if status >= "400" and "Readiness" not in str(content):
                response["content"] = {problems.MEDIA_TYPE: next(iter(content.values()))}
    events.describe(document)
    add_links(document)
    return document


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = openapi_document()
    return app.openapi_schema
