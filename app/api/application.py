"""The HTTP application, put together."""

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi

from app.api import admin, datasets, entities, jobs, problems, stages, statements, system
from app.api.access import check_complete
from app.api.bodies import Bodies
from app.api.requests import HEADER, RequestScope
from app.api.services import Services

ROUTERS = (
    system.routes,
    datasets.catalog_routes,
    datasets.routes,
    entities.routes,
    statements.routes,
    stages.routes,
    jobs.routes,
    admin.routes,
)


def create_app(services: Services) -> FastAPI:
    """The application for these services. Raises StartRefused if a route and the access table disagree."""
    app = FastAPI(
        title="Tarn",
        version="1",
        description="A lakehouse for FollowTheMoney data.",
        redoc_url=None,
    )
    app.state.services = services
    for router in ROUTERS:
        app.include_router(router)
    check_complete({route.name for router in ROUTERS for route in router.routes if hasattr(route, "name")})
    problems.install(app)
    # The last one added is the outermost.
    app.add_middleware(Bodies, limit=services.settings.max_document_bytes)
    app.add_middleware(RequestScope, metrics=services.metrics)
    if services.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, "ETag", "Location", "Retry-After", "Tarn-Snapshot"],
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with problems under their own media type and the ways to authenticate."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
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
        app.openapi_schema = document
    return app.openapi_schema
