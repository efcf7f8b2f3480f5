"""Upload routes: files in blocks, for large files and unreliable connections."""

from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from tarn.api.http.bodies.body_middleware import LIMIT
from tarn.api.http.idempotency import idempotency_key
from tarn.api.http.ingest import KeyHeader
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import ServicesDep
from tarn.api.http.streaming.file_responses import OCTETS
from tarn.api.routes.files import (
    ConditionsDep,
    EntityParam,
    bytes_body,
    checked_path,
    file_path,
    length_of,
    reserved,
    write_document,
)
from tarn.errors import (
    Backpressure,
    BodyTooLarge,
    InvalidPath,
    OverlappingBlocks,
    PreconditionFailed,
    QuotaExceeded,
    RangeMissing,
    UploadNotFound,
)
from tarn.model.file import ArchiveFile
from tarn.model.upload import NewUpload, Upload

routes = router("/v1/datasets/{dataset}/uploads", "files")

OffsetParam = Annotated[int, Query(ge=0, le=1 << 50, description="The position of the block in the file, in bytes.")]


@routes.post("", status_code=201, responses=raises(InvalidPath, QuotaExceeded, BodyTooLarge))
def create_upload(
    services: ServicesDep, caller: CallerDep, dataset: DatasetDep, new: NewUpload, response: Response
) -> Upload:
    """Create an upload of a file in blocks."""
    path = checked_path(new.path)
    upload = services.uploads.create(dataset, caller.identity.tenant, path, new, caller.act)
    response.headers["Location"] = f"/v1/datasets/{dataset.name}/uploads/{upload.id}"
    return upload


@routes.get("/{upload}", responses=raises(UploadNotFound))
def get_upload(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, upload: IdParam) -> Upload:
    """Get an upload: the ranges that were received and those that are missing."""
    return services.uploads.get(dataset, caller.identity.tenant, upload)


@routes.put(
    "/{upload}", responses=raises(UploadNotFound, OverlappingBlocks, QuotaExceeded), openapi_extra=bytes_body(OCTETS)
)
async def put_upload_block(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    upload: IdParam,
    offset: OffsetParam,
    key: KeyHeader = None,
) -> Upload:
    """Upload a block: durable on return. Blocks may be sent in any order and concurrently, and must not overlap."""
    request.scope[LIMIT] = services.settings.max_file_bytes
    once = None if key is None else (lambda digest: idempotency_key(request, key, digest))
    add, tenant = services.uploads.put_block, caller.identity.tenant
    reservation = services.uploads.reservation(dataset, tenant, upload)
    return await reserved(
        reservation,
        length_of(request),
        request.stream(),
        lambda chunks: add(dataset, tenant, upload, offset, chunks, caller.act, once, reservation),
    )


@routes.post(
    "/{upload}/commit",
    status_code=201,
    responses=raises(UploadNotFound, RangeMissing, QuotaExceeded, Backpressure, PreconditionFailed),
)
async def commit_upload(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    upload: IdParam,
    conditions: ConditionsDep,
    response: Response,
    entity: EntityParam = False,
) -> ArchiveFile:
    """Commit an upload: create a file from its blocks. Idempotent: a repeated commit returns the same file.

    `If-Match` and `If-None-Match` apply to the files at its path, as for a PUT; if they fail, the upload is unchanged.
    """
    tenant, target = caller.identity.tenant, partial(file_path, dataset)
    file = await run_in_threadpool(services.uploads.commit, dataset, tenant, upload, caller.act, target, conditions)
    if entity:
        await write_document(services, caller, dataset, file)
    response.headers["Location"], response.headers["ETag"] = file_path(dataset, file), file.content_tag
    return file


@routes.delete("/{upload}", status_code=204, responses=raises(UploadNotFound))
def delete_upload(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, upload: IdParam) -> None:
    """Abort an upload. A file that was created from it is kept."""
    services.uploads.abort(dataset, caller.identity.tenant, upload, caller.act)
