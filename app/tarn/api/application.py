"""FastAPI application: routers, middleware and the OpenAPI document."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tarn.api.http import api_docs, problems
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
from tarn.query.engine.active_reads import ActiveReadReporter

TITLE, VERSION, ABOUT = "Tarn", "1", "A lakehouse for FollowTheMoney data."

ROUTERS = (
    system.routes,
    api_docs.routes,
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
    """Build the application for these services. Raises StartRefused if the routes and the access table disagree."""

    @asynccontextmanager
    async def reporting(_: FastAPI) -> AsyncIterator[None]:
        reporter = ActiveReadReporter(
            services.database, services.reader.active_reads, services.settings.reader_heartbeat
        )
        with reporter, PeriodicTrim():
            yield

    app = FastAPI(
        title=TITLE,
        version=VERSION,
        description=ABOUT,
        # `api_docs` serves the OpenAPI document and the documentation page.
        openapi_url=None,
        # A redirect would be built from the Host header, which the client controls.
        redirect_slashes=False,
        lifespan=reporting,
    )
    app.state.services = services
    routes = [route for router in ROUTERS for route in router.routes]
    # Not `include_router`: it matches every request against each router first, and then against the router's routes.
    app.router.routes.extend(routes)
    check_complete({route.name for route in routes if hasattr(route, "name")})
    problems.install(app, routes)
    # The middleware that is added last is the outermost.
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
    if services.telemetry.tracer is not None:
        # Import OpenTelemetry only if traces are sent.
        from tarn.api.http.middleware.tracing import TraceMiddleware

        app.add_middleware(TraceMiddleware, tracer=services.telemetry.tracer)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    return app


def openapi_document() -> dict[str, Any]:
    """Return FastAPI's document with the problem media type, the security scheme and the links added.

    It does not depend on the settings.
    """
    document = get_openapi(
        title=TITLE,
        version=VERSION,
        description=ABOUT,
        routes=[route for router in ROUTERS for route in router.routes],
        separate_input_output_schemas=False,
    )
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "An API key, or a JWT of the configured issuer."}
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
