"""Mappings: which entities the rows of an archived file stand for."""

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
from tarn.archive.mappings import Run, StoredMapping
from tarn.datasets.registry import Dataset
from tarn.db import jobs
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
from tarn.model.dataset import matches_none_match
from tarn.model.job import Job, MappingOptions, Operation, ProcessOptions
from tarn.model.mapping import TYPES, ListedMapping, Mapping, origin_of, parsed
from tarn.model.names import Checksum, FileName
from tarn.storage import versions
from tarn.storage.store import Missing

routes = router("/v1/datasets/{dataset}/mappings", "mappings")

DOCUMENT = FileName("mapping.yml")
PARSED_AT_ONCE = 2
_THREADS = Threads("mapping threads", PARSED_AT_ONCE)
"""Mappings that are parsed at once. A large one takes a second or more: other requests do not wait for its thread."""


class MappingPage(Page[ListedMapping]):
    """Mappings, by the hash of what they are for."""


@routes.get("")
def list_mappings(house: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> MappingPage:
    """List the mappings of a dataset."""
    found = mappings.hashes(house.store, dataset, paging.after, paging.fetch)
    with house.database.read() as connection:
        runs = mappings.last_runs(connection, dataset)
    results, cursor = paging.cut(found, str)
    listed = [
        ListedMapping(content_hash=one, origin=origin_of(one), processed=runs[one].processed if one in runs else None)
        for one in results
    ]
    return MappingPage(results=listed, next=cursor)


@routes.get(
    "/{content_hash}",
    responses={304: {"description": "The caller has it already."}, **raises(MappingNotFound, DocumentInvalid)},
)
async def get_mapping(
    house: ServicesDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> Mapping:
    """Show the mapping of a source file."""

    def get() -> Mapping:
        kept = mappings.read(house.store, dataset, content_hash)
        response.headers["ETag"] = kept.tag
        if if_none_match is not None and matches_none_match(if_none_match, kept.tag):
            return Response(status_code=304, headers={"ETag": kept.tag})  # type: ignore[return-value]  # FastAPI passes it on
        return _shown(house, dataset, content_hash, kept)

    return await _THREADS.run(get)


@routes.put(
    "/{content_hash}",
    responses={201: {"model": Mapping, "description": "It is the first"}, **raises(PreconditionFailed)},
    openapi_extra=records_body(TYPES),
)
async def put_mapping(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
    if_none_match: Annotated[str | None, Header(max_length=1000, description="`*`: only if there is none yet.")] = None,
) -> Mapping:
    """Keep a mapping for a source file: FtM's own, as JSON or YAML. The former version is kept."""
    kind, _ = media_type(request.headers.get("content-type", ""))
    if kind not in TYPES:
        raise UnsupportedMediaType(
            f"send a mapping as JSON or YAML, not {kind or 'without a type'}", supported=[*TYPES]
        )
    body = await request.body()
    if not body.strip():
        raise EmptyBody("this route needs a mapping")

    def put() -> tuple[Mapping, str, bool]:
        document = parsed(body, kind)
        kept, is_first = mappings.put(
            house.database, house.store, dataset, content_hash, document, if_match, if_none_match, caller.act
        )
        return _shown(house, dataset, content_hash, kept), kept.tag, is_first

    shown, tag, is_first = await _THREADS.run(put)
    response.status_code = 201 if is_first else 200
    response.headers["ETag"] = tag
    return shown


@routes.get("/{content_hash}/versions")
def list_mapping_versions(
    house: ServicesDep, dataset: DatasetDep, content_hash: Checksum, paging: PagingDep
) -> VersionPage:
    """List former versions of a mapping, newest first."""
    found = versions.list_versions(house.store, dataset.layout.mapping_versions(content_hash))
    later = [version for version in found if paging.after is None or version.timestamp < paging.after]
    results, cursor = paging.cut(later[: paging.fetch], lambda version: version.timestamp)
    return VersionPage(results=results, next=cursor)


@routes.get(
    "/{content_hash}/versions/{timestamp}",
    response_class=Response,
    responses={**SENT, **raises(VersionNotFound, RangeNotSatisfiable)},
)
async def get_mapping_version(
    house: ServicesDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    timestamp: Annotated[str, Path(max_length=32)],
    request: Request,
) -> Response:
    """Get a former version of a mapping, as it was."""
    path = versions.version_path(dataset.layout.mapping_versions(content_hash), timestamp, DOCUMENT)
    try:
        return await file_response(house.store, request, path, "application/yaml", DOCUMENT)
    except Missing:
        raise VersionNotFound(f"there is no version {timestamp} of the mapping") from None


@routes.post(
    "/{content_hash}/process",
    status_code=202,
    responses={
        200: {"model": Job, "description": "Over within the wait"},
        **raises(MappingNotFound, FileNotFound, DocumentInvalid),
    },
)
async def process_mapping(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    content_hash: Checksum,
    response: Response,
    options: ProcessOptions = ProcessOptions(),  # noqa: B008 - the same for all
    wait: WaitParam = 0,
) -> Job:
    """Make entities of the rows of a source file, in the place of those that the last run made."""
    job = await _THREADS.run(lambda: _enqueue(house, caller, dataset, content_hash, options))
    return await job_response(house, job, wait, response)


def _enqueue(house: Services, caller: Caller, dataset: Dataset, content_hash: Checksum, options: ProcessOptions) -> Job:
    mappings.read(house.store, dataset, content_hash)
    if house.store.head(dataset.layout.blob_data(content_hash)) is None:
        raise FileNotFound(f"there is no file {content_hash} in the archive of {dataset.name!r}")
    wanted = MappingOptions(content_hash=content_hash, **options.model_dump(exclude_unset=True))
    arguments = wanted.model_dump(mode="json", exclude_unset=True)
    with house.database.write() as connection:
        tenant, request = caller.identity.tenant, caller.act.request
        job = jobs.enqueue(connection, Operation.MAPPING, dataset.id, tenant, request, arguments)
        caller.act.done(connection, job=job.id)
    return job


def _shown(house: Services, dataset: Dataset, content_hash: Checksum, kept: StoredMapping) -> Mapping:
    with house.database.read() as connection:
        run: Run | None = mappings.last_run(connection, dataset, content_hash)
    return Mapping(
        content_hash=content_hash,
        origin=origin_of(content_hash),
        processed=None if run is None else run.processed,
        fresh=run is not None and run.mapping == kept.tag,
        queries=kept.document.queries,
    )
