"""Catalog and dataset routes: configuration, deletion and document versions."""

from typing import Annotated

from fastapi import Header, Path, Query, Request, Response

from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep, public_url
from tarn.api.http.streaming.file_responses import SENT, file_response
from tarn.api.routes.jobs import WaitParam, job_response
from tarn.datasets import registry
from tarn.errors import (
    AlreadyExists,
    DocumentInvalid,
    FieldError,
    Forbidden,
    PreconditionFailed,
    RangeNotSatisfiable,
    SchemaViolation,
    VersionNotFound,
)
from tarn.lake import catalog
from tarn.model.datasets.dataset import Catalog, CatalogMetadata, DatasetChange, DatasetConfig, NewDataset, Version
from tarn.model.entity_tags import matches_none_match
from tarn.model.names import FileName
from tarn.model.tenant import Level
from tarn.model.work.job import Job
from tarn.storage import versions
from tarn.storage.store import ObjectMissing

catalog_routes = router("/v1/catalog", "catalog")
routes = router("/v1/datasets", "datasets")

IfMatch = Annotated[
    str | None, Header(max_length=1000, description="The entity tag that the document must have; else 412.")
]
IfNoneMatch = Annotated[
    str | None,
    Header(max_length=1000, description="Entity tags of the versions that the caller has; if one is current, 304."),
]


class DatasetPage(Page[DatasetConfig]):
    """Datasets that the caller may read, sorted by name."""


class VersionPage(Page[Version]):
    """Previous versions of documents, newest first."""


@catalog_routes.get("", response_model_exclude_none=True, responses=raises(DocumentInvalid))
def get_catalog(services: ServicesDep, caller: CallerDep, request: Request) -> Catalog:
    """Get the FtM catalog of the datasets that the caller may read."""
    return _catalog(services, caller, request)


@catalog_routes.get(".json", response_model_exclude_none=True, responses=raises(DocumentInvalid))
def get_catalog_json(services: ServicesDep, caller: CallerDep, request: Request) -> Catalog:
    """Get the same catalog. yente parses a URL that ends in `.json` as JSON, and any other as YAML."""
    return _catalog(services, caller, request)


@catalog_routes.patch("", responses=raises(DocumentInvalid))
def update_catalog(services: ServicesDep, caller: CallerDep, change: CatalogMetadata) -> CatalogMetadata:
    """Update the catalog metadata of the lake; omitted fields are unchanged."""
    return catalog.change(services.database, services.store, change, caller.act)


@routes.get("")
def list_datasets(services: ServicesDep, caller: CallerDep, paging: PagingDep) -> DatasetPage:
    """List the datasets that the caller may read."""
    datasets = registry.readable_page(services.database, _readable(caller), paging.after, paging.fetch)
    results, cursor = paging.cut(datasets, lambda dataset: dataset.name)
    return DatasetPage(results=list(registry.read_all(services.store, results)), next=cursor)


@routes.post("", status_code=201, responses=raises(AlreadyExists, Forbidden))
def create_dataset(services: ServicesDep, caller: CallerDep, new: NewDataset, response: Response) -> DatasetConfig:
    """Create a dataset; requires `admin` on a pattern that its name matches."""
    caller.require(new.name, Level.ADMIN)
    config, tag = registry.create(services.database, services.store, new, caller.act)
    response.headers["ETag"] = tag
    response.headers["Location"] = f"/v1/datasets/{config.name}"
    return config


@routes.get(
    "/{dataset}",
    responses={304: {"description": "Not modified: the caller has this version."}, **raises(DocumentInvalid)},
)
def get_dataset(
    services: ServicesDep, dataset: DatasetDep, response: Response, if_none_match: IfNoneMatch = None
) -> DatasetConfig:
    """Get a dataset's configuration."""
    config, tag = registry.read(services.store, dataset)
    response.headers["ETag"] = tag
    if if_none_match is not None and matches_none_match(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})  # type: ignore[return-value]  # FastAPI passes it on
    return config


@routes.patch("/{dataset}", responses=raises(PreconditionFailed, DocumentInvalid))
def update_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    change: DatasetChange,
    response: Response,
    if_match: IfMatch = None,
) -> DatasetConfig:
    """Update a dataset's configuration; omitted fields are unchanged, the previous version is archived."""
    indexed = catalog.indexing(dataset, services.settings.public_url)
    config, tag = registry.change(services.database, services.store, dataset, change, if_match, caller.act, indexed)
    response.headers["ETag"] = tag
    return config


@routes.delete(
    "/{dataset}",
    status_code=202,
    responses={200: {"model": Job, "description": "Deleted"}, **raises(PreconditionFailed, DocumentInvalid)},
)
async def delete_dataset(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    confirm: Annotated[str, Query(description="The dataset's name again, as confirmation.")],
    wait: WaitParam = 0,
    if_match: IfMatch = None,
) -> Job:
    """Delete a dataset and everything in it: hidden immediately, removed by a job."""
    if confirm != dataset.name:
        reason = f"must be {dataset.name!r}: deleting cannot be undone"
        raise SchemaViolation(f"confirm {reason}", errors=[FieldError(field="query.confirm", reason=reason)])
    job = await run_in_threadpool(
        registry.begin_delete, services.database, services.store, dataset, if_match, caller.act
    )
    return await job_response(services, job, wait, response)


@routes.get("/{dataset}/versions")
def list_versions(services: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> VersionPage:
    """List previous versions of a dataset's documents."""
    versions_found = versions.list_versions(services.store, dataset.layout.versions)
    later = [version for version in versions_found if paging.after is None or _place(version) < paging.after]
    results, cursor = paging.cut(later[: paging.fetch], _place)
    return VersionPage(results=results, next=cursor)


@routes.get(
    "/{dataset}/versions/{timestamp}/{name}",
    response_class=Response,
    responses={**SENT, **raises(VersionNotFound, RangeNotSatisfiable)},
)
async def get_version(
    services: ServicesDep,
    dataset: DatasetDep,
    timestamp: Annotated[str, Path(max_length=32)],
    name: FileName,
    request: Request,
) -> Response:
    """Download a previous version of a document or an export."""
    path = versions.version_path(dataset.layout.versions, timestamp, name)
    try:
        return await file_response(services.store, request, path, "application/octet-stream", name)
    except ObjectMissing:
        raise VersionNotFound(f"there is no version {timestamp} of {name}") from None


def _catalog(services: Services, caller: Caller, request: Request) -> Catalog:
    return catalog.compile_catalog(services.database, services.store, _readable(caller), public_url(services, request))


def _readable(caller: Caller) -> "registry.Readable":
    return lambda name: caller.identity.level_on(name) is not None


def _place(version: Version) -> str:
    """Return the sort key of a version: unique, and in the order of the list."""
    return f"{version.timestamp}/{version.name}"
