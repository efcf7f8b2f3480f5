"""The catalog and its datasets."""

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
from tarn.datasets import registry as datasets
from tarn.errors import (
    AlreadyExists,
    DocumentInvalid,
    Fault,
    Forbidden,
    PreconditionFailed,
    RangeNotSatisfiable,
    SchemaViolation,
    VersionNotFound,
)
from tarn.lake import catalog
from tarn.model.dataset import (
    Catalog,
    CatalogMetadata,
    DatasetChange,
    DatasetConfig,
    NewDataset,
    Version,
    matches_none_match,
)
from tarn.model.job import Job
from tarn.model.names import FileName
from tarn.model.tenant import Level
from tarn.storage import versions
from tarn.storage.store import Missing

catalog_routes = router("/v1/catalog", "catalog")
routes = router("/v1/datasets", "datasets")

IfMatch = Annotated[str | None, Header(max_length=1000, description="The entity tag the document must have.")]
IfNoneMatch = Annotated[str | None, Header(max_length=1000, description="Entity tags the caller has already.")]


class DatasetPage(Page[DatasetConfig]):
    """Datasets the caller may read, by name."""


class VersionPage(Page[Version]):
    """Former versions of a dataset's documents, newest first."""


@catalog_routes.get("", response_model_exclude_none=True, responses=raises(DocumentInvalid))
def get_catalog(house: ServicesDep, caller: CallerDep, request: Request) -> Catalog:
    """Show the FtM catalog of the datasets the caller may read."""
    return _catalog(house, caller, request)


@catalog_routes.get(".json", response_model_exclude_none=True, responses=raises(DocumentInvalid))
def get_catalog_json(house: ServicesDep, caller: CallerDep, request: Request) -> Catalog:
    """Show the same catalog. yente reads an address that ends in `.json` as JSON, and any other as YAML."""
    return _catalog(house, caller, request)


@catalog_routes.patch("", responses=raises(DocumentInvalid))
def update_catalog(house: ServicesDep, caller: CallerDep, change: CatalogMetadata) -> CatalogMetadata:
    """Change what the lake says of itself; fields left out stay as they are."""
    return catalog.change(house.database, house.store, change, caller.act)


@routes.get("")
def list_datasets(house: ServicesDep, caller: CallerDep, paging: PagingDep) -> DatasetPage:
    """List datasets the caller may read."""
    with house.database.read() as connection:
        found = datasets.page(connection, _readable(caller), paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda dataset: dataset.name)
    return DatasetPage(results=list(datasets.read_all(house.store, results)), next=cursor)


@routes.post("", status_code=201, responses=raises(AlreadyExists, Forbidden))
def create_dataset(house: ServicesDep, caller: CallerDep, new: NewDataset, response: Response) -> DatasetConfig:
    """Make a dataset; `admin` is needed on a pattern that its name matches."""
    caller.require(new.name, Level.ADMIN)
    config, tag = datasets.create(house.database, house.store, new, caller.act)
    response.headers["ETag"] = tag
    response.headers["Location"] = f"/v1/datasets/{config.name}"
    return config


@routes.get("/{dataset}", responses={304: {"description": "The caller has it already."}, **raises(DocumentInvalid)})
def get_dataset(
    house: ServicesDep, dataset: DatasetDep, response: Response, if_none_match: IfNoneMatch = None
) -> DatasetConfig:
    """Show a dataset's configuration."""
    config, tag = datasets.read(house.store, dataset)
    response.headers["ETag"] = tag
    if if_none_match is not None and matches_none_match(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})  # type: ignore[return-value]  # FastAPI passes it on
    return config


@routes.patch("/{dataset}", responses=raises(PreconditionFailed, DocumentInvalid))
def update_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    change: DatasetChange,
    response: Response,
    if_match: IfMatch = None,
) -> DatasetConfig:
    """Change a dataset's configuration; fields left out stay as they are, the former version is kept."""
    indexed = catalog.indexing(dataset, house.settings.public_url)
    config, tag = datasets.change(house.database, house.store, dataset, change, if_match, caller.act, indexed)
    response.headers["ETag"] = tag
    return config


@routes.delete(
    "/{dataset}",
    status_code=202,
    responses={200: {"model": Job, "description": "Deleted"}, **raises(PreconditionFailed, DocumentInvalid)},
)
async def delete_dataset(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    response: Response,
    confirm: Annotated[str, Query(description="The dataset's name, once more.")],
    wait: WaitParam = 0,
    if_match: IfMatch = None,
) -> Job:
    """Delete a dataset and everything in it: hidden at once, removed by a job."""
    if confirm != dataset.name:
        reason = f"must be {dataset.name!r}: deleting cannot be undone"
        raise SchemaViolation(f"confirm {reason}", errors=[Fault(field="query.confirm", reason=reason)])
    job = await run_in_threadpool(datasets.begin_delete, house.database, house.store, dataset, if_match, caller.act)
    return await job_response(house, job, wait, response)


@routes.get("/{dataset}/versions")
def list_versions(house: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> VersionPage:
    """List former versions of the dataset's documents."""
    found = versions.list_versions(house.store, dataset.layout.versions)
    later = [version for version in found if paging.after is None or _place(version) < paging.after]
    results, cursor = paging.cut(later[: paging.fetch], _place)
    return VersionPage(results=results, next=cursor)


@routes.get(
    "/{dataset}/versions/{timestamp}/{name}",
    response_class=Response,
    responses={**SENT, **raises(VersionNotFound, RangeNotSatisfiable)},
)
async def get_version(
    house: ServicesDep,
    dataset: DatasetDep,
    timestamp: Annotated[str, Path(max_length=32)],
    name: FileName,
    request: Request,
) -> Response:
    """Get a former version of a document or an export, as it was."""
    path = versions.version_path(dataset.layout.versions, timestamp, name)
    try:
        return await file_response(house.store, request, path, "application/octet-stream", name)
    except Missing:
        raise VersionNotFound(f"there is no version {timestamp} of {name}") from None


def _catalog(house: Services, caller: Caller, request: Request) -> Catalog:
    with house.database.read() as connection:
        readable = datasets.page(connection, _readable(caller), None, None)
    return catalog.compile_catalog(house.database, house.store, readable, public_url(house, request))


def _readable(caller: Caller) -> "datasets.Readable":
    return lambda name: caller.identity.level_on(name) is not None


def _place(version: Version) -> str:
    """Where a version stands in the list: unique, and sorting as the list does."""
    return f"{version.timestamp}/{version.name}"
