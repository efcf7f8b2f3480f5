"""Mapping routes: store FtM mappings of archived files, and run them."""

from typing import Annotated

from fastapi import Header, Path, Request, Response

from tarn.api.http.limits.threads import Threads
from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import media_type, records_body, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.streaming.file_responses import SENT, file_response
from tarn.api.routes.datasets import IfMatch, IfNoneMatch, VersionPage
from tarn.api.routes.jobs import WaitParam, job_response
from tarn.archive import mappings
from tarn.archive.mappings import StoredMapping
from tarn.datasets.registry import Dataset
from tarn.errors import (
    DocumentInvalid,
    EmptyBody,
    FileNotFound,
    MappingNotFound,
    PreconditionFailed,
    RangeNotSatisfiable,
    UnsupportedMediaType,
    VersionNotFound,
)
from tarn.model.entity_tags import matches_none_match
from tarn.model.ftm.mapping import TYPES, ListedMapping, Mapping, origin_of, parsed
from tarn.model.names import Checksum, FileName
from tarn.model.work.job import Job, MappingOptions, Operation, ProcessOptions
from tarn.storage import versions
from tarn.storage.store import ObjectMissing

routes = router("/v1/datasets/{dataset}/mappings", "mappings")

DOCUMENT = FileName("mapping.yml")
PARSED_AT_ONCE = 2
_THREADS = Threads("mapping threads", PARSED_AT_ONCE)
"""Threads that parse mappings. A large mapping takes a second or more: other requests must not wait for its thread."""


class MappingPage(Page[ListedMapping]):
    """Mappings, sorted by the content hash of their source file."""


@routes.get("")
def list_mappings(services: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> MappingPage:
    """List the mappings of a dataset."""
    content_hashes = mappings.hashes(services.store, dataset, paging.after, paging.fetch)
    runs = mappings.last_runs(services.database, dataset)
    results, cursor = paging.cut(content_hashes, str)
    listed = [
        ListedMapping(
            content_hash=each, origin=origin_of(each), processed=runs[each].processed if each in runs else None
        )
        for each in results
    ]
    return MappingPage(results=listed, next=cursor)


@routes.get(
    "/{content_hash}",
    responses={
        304: {"description": "Not modified: the caller has this version."},
        **raises(MappingNotFound, DocumentInvalid),
    },
)
async def get_mapping(
    services: ServicesDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> Mapping:
    """Get the mapping of a source file."""

    def get() -> Mapping:
        stored = mappings.read(services.store, dataset, content_hash)
        response.headers["ETag"] = stored.tag
        if if_none_match is not None and matches_none_match(if_none_match, stored.tag):
            return Response(status_code=304, headers={"ETag": stored.tag})  # type: ignore[return-value]  # FastAPI passes it on
        return _shown(services, dataset, content_hash, stored)

    return await _THREADS.run(get)


@routes.put(
    "/{content_hash}",
    responses={
        201: {"model": Mapping, "description": "Created: the file had no mapping before"},
        **raises(PreconditionFailed),
    },
    openapi_extra=records_body(TYPES),
)
async def put_mapping(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
    if_none_match: Annotated[
        str | None, Header(max_length=1000, description="`*`: store it only if the file has no mapping yet.")
    ] = None,
) -> Mapping:
    """Store the mapping of a source file: an FtM mapping as JSON or YAML. The previous version is archived."""
    kind, _ = media_type(request.headers.get("content-type", ""))
    if kind not in TYPES:
        raise UnsupportedMediaType(
            f"send a mapping as JSON or YAML, not {kind or 'a body without Content-Type'}", supported=[*TYPES]
        )
    body = await request.body()
    if not body.strip():
        raise EmptyBody("the body is empty; send a mapping")

    def put() -> tuple[Mapping, str, bool]:
        document = parsed(body, kind)
        stored, is_first = mappings.put(
            services.database, services.store, dataset, content_hash, document, if_match, if_none_match, caller.act
        )
        return _shown(services, dataset, content_hash, stored), stored.tag, is_first

    shown, tag, is_first = await _THREADS.run(put)
    response.status_code = 201 if is_first else 200
    response.headers["ETag"] = tag
    return shown


@routes.get("/{content_hash}/versions")
def list_mapping_versions(
    services: ServicesDep, dataset: DatasetDep, content_hash: Checksum, paging: PagingDep
) -> VersionPage:
    """List previous versions of a mapping, newest first."""
    stored_versions = versions.list_versions(services.store, dataset.layout.mapping_versions(content_hash))
    later = [version for version in stored_versions if paging.after is None or version.timestamp < paging.after]
    results, cursor = paging.cut(later[: paging.fetch], lambda version: version.timestamp)
    return VersionPage(results=results, next=cursor)


@routes.get(
    "/{content_hash}/versions/{timestamp}",
    response_class=Response,
    responses={**SENT, **raises(VersionNotFound, RangeNotSatisfiable)},
)
async def get_mapping_version(
    services: ServicesDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    timestamp: Annotated[str, Path(max_length=32)],
    request: Request,
) -> Response:
    """Download a previous version of a mapping."""
    path = versions.version_path(dataset.layout.mapping_versions(content_hash), timestamp, DOCUMENT)
    try:
        return await file_response(services.store, request, path, "application/yaml", DOCUMENT)
    except ObjectMissing:
        raise VersionNotFound(f"there is no version {timestamp} of the mapping") from None


@routes.post(
    "/{content_hash}/process",
    status_code=202,
    responses={
        200: {"model": Job, "description": "The job ended within the wait"},
        **raises(MappingNotFound, FileNotFound, DocumentInvalid),
    },
)
async def process_mapping(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    response: Response,
    options: ProcessOptions = ProcessOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Run a mapping: create entities from the rows of a source file, replacing those of the last run."""
    job = await _THREADS.run(lambda: _enqueue(services, caller, dataset, content_hash, options))
    return await job_response(services, job, wait, response)


def _enqueue(
    services: Services, caller: Caller, dataset: Dataset, content_hash: Checksum, options: ProcessOptions
) -> Job:
    mappings.read(services.store, dataset, content_hash)
    if services.store.head(dataset.layout.blob_data(content_hash)) is None:
        raise FileNotFound(f"there is no file {content_hash} in the archive of {dataset.name!r}")
    job_options = MappingOptions(content_hash=content_hash, **options.model_dump(exclude_unset=True))
    arguments = job_options.model_dump(mode="json", exclude_unset=True)
    return services.jobs.enqueue(Operation.MAPPING, dataset, caller.act, arguments)


def _shown(services: Services, dataset: Dataset, content_hash: Checksum, stored: StoredMapping) -> Mapping:
    run = mappings.last_run_of(services.database, dataset, content_hash)
    return Mapping(
        content_hash=content_hash,
        origin=origin_of(content_hash),
        processed=None if run is None else run.processed,
        fresh=run is not None and run.mapping == stored.tag,
        queries=stored.document.queries,
    )
