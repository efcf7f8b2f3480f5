"""Uploads in blocks, for files that are too large for one request, or lines that break."""

from typing import Annotated

from fastapi import Query, Request, Response
from sqlalchemy import Connection

from tarn.api.http.bodies.body_middleware import LIMIT
from tarn.api.http.idempotency import fingerprint_of
from tarn.api.http.ingest import KeyHeader
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import Services, ServicesDep
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
from tarn.archive.uploads import Uploads
from tarn.db.idempotency import IdempotencyKey
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

OffsetParam = Annotated[int, Query(ge=0, le=1 << 50, description="Where in the file the block begins.")]


@routes.post("", status_code=201, responses=raises(InvalidPath, QuotaExceeded, BodyTooLarge))
def create_upload(
    house: ServicesDep, caller: CallerDep, dataset: DatasetDep, new: NewUpload, response: Response
) -> Upload:
    """Begin the upload of a file in blocks."""
    path = checked_path(new.path)
    with house.database.write() as connection:
        upload = _uploads(house).create(connection, dataset, caller.identity.tenant, path, new)
        caller.act.done(connection, target=f"{caller.act.target}/{upload.id}")
    response.headers["Location"] = f"/v1/datasets/{dataset.name}/uploads/{upload.id}"
    return upload


@routes.get("/{upload}", responses=raises(UploadNotFound))
def get_upload(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, upload: IdParam) -> Upload:
    """Show what has arrived of an upload, and what is missing."""
    with house.database.read() as connection:
        return _uploads(house).get(connection, dataset, caller.identity.tenant, upload)


@routes.put(
    "/{upload}", responses=raises(UploadNotFound, OverlappingBlocks, QuotaExceeded), openapi_extra=bytes_body(OCTETS)
)
async def put_upload_block(
    request: Request,
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    upload: IdParam,
    offset: OffsetParam,
    key: KeyHeader = None,
) -> Upload:
    """Add a block: durable when answered. Blocks may come in any order, and several at once, and must not overlap."""
    request.scope[LIMIT] = house.settings.max_file_bytes
    once = None if key is None else (lambda digest: IdempotencyKey(key, fingerprint_of(request, digest)))
    add, tenant = _uploads(house).put_block, caller.identity.tenant

    def recorded(connection: Connection, size: int) -> None:
        caller.act.done(connection, offset=offset, size=size)

    reservation = _uploads(house).reservation(dataset, tenant, upload)
    return await reserved(
        reservation,
        length_of(request),
        request.stream(),
        lambda chunks: add(dataset, tenant, upload, offset, chunks, once, recorded, reservation),
    )


@routes.post(
    "/{upload}/commit",
    status_code=201,
    responses=raises(UploadNotFound, RangeMissing, QuotaExceeded, Backpressure, PreconditionFailed),
)
async def commit_upload(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    upload: IdParam,
    conditions: ConditionsDep,
    response: Response,
    entity: EntityParam = False,
) -> ArchiveFile:
    """Make a file of the blocks. Done again, it answers the same.

    Conditions are held against the files at its path, as they are for a PUT; the upload stays as it is if they fail.
    """

    def recorded(connection: Connection, file: ArchiveFile) -> None:
        caller.act.done(connection, target=file_path(dataset, file), size=file.size)

    commit = _uploads(house).commit
    file = await run_in_threadpool(commit, dataset, caller.identity.tenant, upload, recorded, conditions)
    if entity:
        await write_document(house, caller, dataset, file)
    response.headers["Location"], response.headers["ETag"] = file_path(dataset, file), file.content_tag
    return file


@routes.delete("/{upload}", status_code=204, responses=raises(UploadNotFound))
def delete_upload(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, upload: IdParam) -> None:
    """Give an upload up. A file that it became stays."""
    _uploads(house).abort(dataset, caller.identity.tenant, upload, caller.act.done)


def _uploads(house: Services) -> Uploads:
    return Uploads(house.database, house.store, house.settings, house.archive)
