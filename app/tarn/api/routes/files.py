"""File routes: upload, fetch, list, download and delete archived files; write their texts and Document entities."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from anyio import CancelScope
from fastapi import Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tarn.api.http.bodies.body_feed import run_fetch, run_with_body
from tarn.api.http.bodies.body_middleware import LIMIT
from tarn.api.http.bodies.multipart import FORM, LONGEST_HEADER, Form
from tarn.api.http.idempotency import idempotency_key
from tarn.api.http.ingest import KeyHeader, WriteRequestDep, Written, write_responses
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, Paging, PagingDep, foreign_cursor
from tarn.api.http.problems import Responses, raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.streaming.file_responses import OCTETS, SENT, file_response
from tarn.api.routes.datasets import IfNoneMatch
from tarn.archive import documents
from tarn.archive.file_index import Position
from tarn.archive.files import Staged
from tarn.archive.reservations import Reservation
from tarn.datasets.registry import Dataset
from tarn.errors import (
    Backpressure,
    FieldError,
    FileNotFound,
    InvalidFormat,
    InvalidPath,
    PreconditionFailed,
    QuotaExceeded,
    RangeNotSatisfiable,
    SchemaViolation,
    SourceFailed,
)
from tarn.journal.batches import Batch
from tarn.journal.parsing.event_buffer import Events
from tarn.model.entity_tags import matches_none_match
from tarn.model.file import ArchiveFile, NewFile, RemoteFile
from tarn.model.ftm.entity import Exploder
from tarn.model.ftm.omissions import Omissions
from tarn.model.ids import now
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, FileId, FilePath, Origin
from tarn.model.preconditions import Conditions
from tarn.model.timestamps import since_epoch
from tarn.storage.store import ObjectMissing

routes = router("/v1/datasets/{dataset}/files", "files")

FILE, META = "file", "meta"

LONGEST_META = 16_384
"""Maximum characters of `meta` in a query; a form accepts more."""

LONGEST_LENGTH = 18
"""Maximum digits of `Content-Length`: no file is larger, and Python refuses to parse numbers of thousands of digits."""

Result = TypeVar("Result")

PathParam = Annotated[
    str, Query(max_length=FilePath.longest, description="The path of the file at its source, such as `a/b/c.pdf`.")
]
OriginParam = Annotated[Origin | None, Query(description="The process that adds the file; `default` if not given.")]
ChecksumParam = Annotated[Checksum | None, Query(description="The SHA-256 that the content must have.")]
EntityParam = Annotated[
    bool, Query(description="Also write the Document entity of the file, and those of its folders.")
]
TextOrigin = Annotated[Origin, Path(description="The process that extracted the text.")]

MetaParam = Annotated[str | None, Query(max_length=LONGEST_META, description="A JSON object to store with the file.")]

PUT = (InvalidPath, QuotaExceeded, Backpressure)
DATA: Responses = {**SENT, **raises(FileNotFound, RangeNotSatisfiable)}

_META: TypeAdapter[dict[str, Any]] = TypeAdapter(Metadata)


class FilePage(Page[ArchiveFile]):
    """Files, sorted by path and id."""


class WrittenText(BaseModel):
    """The result of storing a text."""

    size: int = Field(description="Bytes.")


class WrittenDocument(Written):
    """The result of writing a Document and its folders."""

    id: str = Field(description="The id of the Document, which is that of the file.")


def bytes_body(kind: str, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the OpenAPI description of a binary body, or of a form with these properties."""
    plain = {"type": "string", "format": "binary"}
    form = {"type": "object", "properties": properties, "required": [FILE]}
    return {"requestBody": {"required": True, "content": {kind: {"schema": plain if properties is None else form}}}}


FORM_BODY = bytes_body(
    FORM,
    {
        FILE: {"type": "string", "format": "binary"},
        META: {"type": "string", "description": "A JSON object to store with the file."},
    },
)


def _conditions(
    request: Request,
    if_match: Annotated[
        str | None,
        Header(max_length=1000, description="Entity tags, one of which an existing file must have; else 412."),
    ] = None,
    if_none_match: Annotated[
        str | None,
        Header(max_length=1000, description="Entity tags that no existing file may have, or `*` for any; else 412."),
    ] = None,
) -> Conditions:
    """Return the preconditions on existing files. A header that is repeated is one list."""
    return Conditions(
        None if if_match is None else ",".join(request.headers.getlist("If-Match")),
        None if if_none_match is None else ",".join(request.headers.getlist("If-None-Match")),
    )


ConditionsDep = Annotated[Conditions, Depends(_conditions)]


@routes.put(
    "",
    status_code=201,
    response_model=ArchiveFile,
    responses=raises(*PUT, PreconditionFailed),
    openapi_extra=bytes_body(OCTETS),
)
async def put_file(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    path: PathParam,
    conditions: ConditionsDep,
    origin: OriginParam = None,
    checksum: ChecksumParam = None,
    meta: MetaParam = None,
    entity: EntityParam = False,
    key: KeyHeader = None,
) -> Response:
    """Upload a file: the body is its content. The same content at the same path is one file.

    `If-Match` and `If-None-Match` apply to all files at the path. The entity tags of a file are that of its content and
    that of its record.
    """
    archive_path = _queried_path(request, path)
    metadata = _meta(None if meta is None else _queried_meta(request, meta))
    new = NewFile(path=archive_path, origin=origin, checksum=checksum, meta=metadata, conditions=conditions)
    staged = await _staged(services, caller, dataset, request, new, request.stream(), key, length_of(request))
    return await _committed(services, caller, dataset, request, staged, key, entity)


@routes.post(
    "",
    status_code=201,
    response_model=ArchiveFile,
    responses=raises(*PUT, PreconditionFailed),
    openapi_extra=FORM_BODY,
)
async def post_file(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    conditions: ConditionsDep,
    path: Annotated[
        PathParam | None,
        Query(description="The path of the file at its source; by default, its file name in the form."),
    ] = None,
    origin: OriginParam = None,
    checksum: ChecksumParam = None,
    entity: EntityParam = False,
    key: KeyHeader = None,
) -> Response:
    """Upload a file in a form, optionally with a JSON object to store with it.

    `If-Match` and `If-None-Match` apply to the files at its path, as for a PUT.
    """
    request.scope[LIMIT] = services.settings.max_file_bytes
    form = Form(request, FILE, (META,), services.settings.max_document_bytes)
    named = await form.until_file()
    if path is None and named is None:
        raise InvalidPath("the file has no file name in the form; set `path`")
    archive_path = checked_path(named or "") if path is None else _queried_path(request, path)
    new = NewFile(path=archive_path, origin=origin, checksum=checksum, conditions=conditions)
    # Upper bound of the form's bytes that are not of the file: a field, and the headers of the parts.
    overhead = services.settings.max_document_bytes + 3 * LONGEST_HEADER
    least = max(0, (length_of(request) or 0) - overhead)
    staged = await _staged(services, caller, dataset, request, new, form.file(), key, least)
    try:
        await form.rest()
        staged = replace(staged, new_file=new.model_copy(update={"meta": _meta(form.fields.get(META))}))
    except BaseException:
        await run_in_threadpool(services.archive.drop, [staged])
        raise
    return await _committed(services, caller, dataset, request, staged, key, entity)


@routes.post(
    "/fetch",
    status_code=201,
    response_model=ArchiveFile,
    responses=raises(*PUT, FileNotFound, SourceFailed, PreconditionFailed),
)
async def fetch_file(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    remote: RemoteFile,
    conditions: ConditionsDep,
    origin: OriginParam = None,
    entity: EntityParam = False,
) -> Response:
    """Fetch a file from a URI and store it.

    `If-Match` and `If-None-Match` apply to the files at its path, as for a PUT.
    """
    path = None if remote.path is None else checked_path(remote.path)

    def new_file(at_path: FilePath) -> NewFile:
        new = NewFile(path=at_path, origin=origin, meta=remote.meta, checksum=remote.checksum, conditions=conditions)
        services.archive.require(dataset, new)
        return new

    def stage() -> Staged:
        named = None if path is None else new_file(path)  # check the conditions before the source is contacted
        reservation = services.archive.reservation(dataset, caller.identity.tenant)
        with services.fetcher.open(remote.uri) as source:
            if named is None and source.name is None:
                raise InvalidPath("the source does not name the file; set `path`")
            new = named or new_file(checked_path(source.name or ""))
            reservation.declare(source.size)
            return services.archive.stage(dataset, new, source, reservation)

    staged = await run_fetch(stage)
    return await _committed(services, caller, dataset, request, staged, None, entity)


@routes.get("", responses=raises(InvalidPath))
def list_files(
    request: Request,
    services: ServicesDep,
    dataset: DatasetDep,
    paging: PagingDep,
    prefix: Annotated[
        str, Query(max_length=FilePath.longest, description="List only paths that begin with this.")
    ] = "",
    path: Annotated[PathParam | None, Query(description="List only the files at this path.")] = None,
) -> FilePage:
    """List files, sorted by path."""
    if prefix:
        _queried_path(request, prefix.removesuffix("/"))
    exact = None if path is None else _queried_path(request, path)
    return _page(services, dataset, paging, prefix=prefix, path=exact)


@routes.get("/{checksum}", responses=raises(FileNotFound))
def list_file_records(services: ServicesDep, dataset: DatasetDep, paging: PagingDep, checksum: Checksum) -> FilePage:
    """List the files with this content."""
    services.files.first_of(dataset, checksum)
    return _page(services, dataset, paging, checksum=checksum)


@routes.get("/{checksum}/data", response_class=Response, responses=DATA)
async def get_file_data(services: ServicesDep, dataset: DatasetDep, checksum: Checksum, request: Request) -> Response:
    """Download a content, or the part of it that `Range` asks for. Its entity tag is its checksum."""
    return await _sent(services, dataset, checksum, request)


@routes.head("/{checksum}/data", response_class=Response, responses=DATA)
async def head_file_data(services: ServicesDep, dataset: DatasetDep, checksum: Checksum, request: Request) -> Response:
    """Get the headers of a content, without its bytes."""
    return await _sent(services, dataset, checksum, request)


@routes.get(
    "/{checksum}/{file}",
    responses={304: {"description": "Not modified: the caller has this version."}, **raises(FileNotFound)},
)
def get_file(
    services: ServicesDep,
    dataset: DatasetDep,
    checksum: Checksum,
    file: FileId,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> ArchiveFile:
    """Get a file's record. The entity tag is that of the record, not of the content."""
    stored = services.files.get(dataset, checksum, file)
    response.headers["ETag"] = stored.record_tag
    if if_none_match is not None and matches_none_match(if_none_match, stored.record_tag):
        return Response(status_code=304, headers={"ETag": stored.record_tag})  # type: ignore[return-value]  # FastAPI passes it on
    return stored


@routes.delete("/{checksum}/{file}", status_code=204, responses=raises(FileNotFound, PreconditionFailed))
def delete_file(
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    checksum: Checksum,
    file: FileId,
    conditions: ConditionsDep,
) -> None:
    """Delete a file; its content is kept while another file has it, else until the next vacuum."""
    services.archive.delete(dataset, checksum, file, caller.act.done, conditions)


@routes.post(
    "/{checksum}/{file}/entity",
    responses=write_responses(WrittenDocument, FileNotFound),
    response_model=WrittenDocument,
)
async def add_file_entity(writing: WriteRequestDep, checksum: Checksum, file: FileId) -> Response:
    """Write the Document entity of an existing file, and those of its folders."""
    stored = await run_in_threadpool(writing.services.files.get, writing.dataset, checksum, file)
    omitted = Omissions()
    origin = writing.origin or stored.origin
    events = await run_in_threadpool(_events, writing.dataset, stored, origin, omitted)
    counts = {"entities": events.entities, "statements": events.statements, "rejected": 0}
    answer = WrittenDocument(id=stored.id, omitted=omitted, **counts)
    return await writing.write(events, answer)


@routes.put(
    "/{checksum}/text/{origin}", responses=raises(FileNotFound, QuotaExceeded), openapi_extra=bytes_body(OCTETS)
)
async def put_file_text(
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    checksum: Checksum,
    origin: TextOrigin,
    key: KeyHeader = None,
) -> WrittenText:
    """Store the text that an origin extracted from a content, replacing its previous text."""
    request.scope[LIMIT] = services.settings.max_file_bytes
    await run_in_threadpool(services.files.first_of, dataset, checksum)
    tenant, archive = caller.identity.tenant, services.archive
    if key is not None and await run_in_threadpool(services.files.is_key_used, tenant, key):
        staged = await run_with_body(
            request.stream(), lambda chunks: archive.stage_text(dataset, origin, chunks, keep=False)
        )
    else:
        reservation = await run_in_threadpool(archive.text_reservation, dataset, tenant, checksum, origin)
        staged = await reserved(
            reservation,
            length_of(request),
            request.stream(),
            lambda chunks: archive.stage_text(dataset, origin, chunks, reservation),
        )
    once = idempotency_key(request, key, _digest(staged))
    return WrittenText(
        size=await run_in_threadpool(services.files.put_text, dataset, checksum, origin, staged, once, caller.act)
    )


@routes.delete("/{checksum}/text/{origin}", status_code=204, responses=raises(FileNotFound))
def delete_file_text(
    services: ServicesDep, caller: CallerDep, dataset: DatasetDep, checksum: Checksum, origin: TextOrigin
) -> None:
    """Delete the text that an origin extracted from a content."""
    services.archive.delete_text(dataset, checksum, origin, caller.act.done)


@routes.get("/{checksum}/text/{origin}", response_class=Response, responses=DATA)
async def get_file_text(
    services: ServicesDep, dataset: DatasetDep, checksum: Checksum, origin: TextOrigin, request: Request
) -> Response:
    """Download the text that an origin extracted from a content."""
    await run_in_threadpool(services.files.first_of, dataset, checksum)
    path, name = dataset.layout.text(checksum, origin), f"{origin}.txt"
    try:
        return await file_response(services.store, request, path, "text/plain; charset=utf-8", name)
    except ObjectMissing:
        raise FileNotFound(f"there is no text of {checksum} by {origin!r}") from None


def checked_path(text: str) -> FilePath:
    """Return a validated path. Raises InvalidPath with the reason."""
    try:
        return FilePath(text)
    except ValueError as error:
        raise InvalidPath(str(error)) from None


def _queried_path(request: Request, text: str) -> FilePath:
    """Return a validated path from the query. Raises InvalidPath."""
    if _is_garbled(request, text):
        raise InvalidPath("the path is not UTF-8")
    return checked_path(text)


def _queried_meta(request: Request, text: str) -> bytes:
    if _is_garbled(request, text):
        raise InvalidFormat(f"{META} is not UTF-8", errors=[FieldError(field=META, reason="is not UTF-8")])
    return text.encode()


def _is_garbled(request: Request, text: str) -> bool:
    """Return whether a query text was not UTF-8: invalid bytes have been decoded to replacement characters."""
    return "\ufffd" in text and b"%EF%BF%BD" not in request.scope["query_string"].upper()


async def write_document(services: Services, caller: Caller, dataset: Dataset, file: ArchiveFile) -> None:
    """Write the Document entities of a file and its folders under its origin. Raises Backpressure, QuotaExceeded."""
    events = await run_in_threadpool(_events, dataset, file, file.origin, Omissions())
    batch = Batch(dataset, caller.identity.tenant, caller.act, file.origin)
    await asyncio.wrap_future(services.writer.submit(batch, events))


def length_of(request: Request) -> int | None:
    """Return the body's declared `Content-Length`; None if it has none or is compressed."""
    length = request.headers.get("Content-Length", "")
    is_plain = request.headers.get("Content-Encoding", "identity").strip().lower() == "identity"
    return int(length) if is_plain and length.isdigit() and len(length) <= LONGEST_LENGTH else None


async def reserved(
    reservation: Reservation,
    length: int | None,
    pieces: AsyncIterator[bytes],
    work: Callable[[Iterator[bytes]], Result],
) -> Result:
    """Run work on a thread that reads a body, with the body's bytes reserved in the quota before the first is read.

    Raises QuotaExceeded, and what the work raises; the reservation is released then.
    """
    try:
        await run_in_threadpool(reservation.declare, length)
        return await run_with_body(pieces, work)
    except BaseException:
        with CancelScope(shield=True):
            await run_in_threadpool(reservation.release)
        raise


async def _staged(
    services: Services,
    caller: Caller,
    dataset: Dataset,
    request: Request,
    new: NewFile,
    pieces: AsyncIterator[bytes],
    key: str | None,
    length: int | None,
) -> Staged:
    request.scope[LIMIT] = services.settings.max_file_bytes
    tenant = caller.identity.tenant
    if key is None:
        await run_in_threadpool(services.archive.require, dataset, new)
    elif await run_in_threadpool(services.files.is_key_used, tenant, key):
        # The key was used before: the request is replayed or refused, and its bytes are not needed in either case.
        return await run_with_body(pieces, lambda chunks: services.archive.stage(dataset, new, chunks, keep=False))
    reservation = services.archive.reservation(dataset, tenant)
    return await reserved(
        reservation, length, pieces, lambda chunks: services.archive.stage(dataset, new, chunks, reservation)
    )


async def _committed(
    services: Services,
    caller: Caller,
    dataset: Dataset,
    request: Request,
    staged: Staged,
    key: str | None,
    entity: bool,
) -> Response:
    """Commit a staged file to the archive, once per idempotency key, and write its entities, which is idempotent."""
    once, target = idempotency_key(request, key, _digest(staged)), partial(file_path, dataset)
    file = await run_in_threadpool(services.files.commit, dataset, staged, once, caller.act, target)
    if entity:
        await write_document(services, caller, dataset, file)
    headers = {"Location": file_path(dataset, file), "ETag": file.content_tag}
    return Response(file.model_dump_json(), 201, headers, "application/json")


def file_path(dataset: Dataset, file: ArchiveFile) -> str:
    """Return the URL path of a file."""
    return f"/v1/datasets/{dataset.name}/files/{file.checksum}/{file.id}"


def _digest(staged: Staged) -> str:
    """Return the digest of what a request sent: the content and the metadata."""
    digest = hashlib.sha256(orjson.dumps([staged.checksum, staged.new_file.meta], option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def _events(dataset: Dataset, file: ArchiveFile, origin: Origin, omitted: Omissions) -> Events:
    """Return the events of a file's entities. Do not call on the event loop: a path may have two thousand folders."""
    exploder = Exploder()  # not `services.exploder`, which only the event loop may use
    events, moment = Events(), since_epoch(now())
    for entity in documents.entities(dataset.name, file):
        exploded = exploder.explode(dataset.name, entity)
        documents.report_omitted(entity, exploded, file.path, omitted)
        events.add_entity(exploded, origin, moment)
    return events


def _meta(text: bytes | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        return _META.validate_python(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        fault = FieldError(field=META, line=error.lineno, reason=error.msg)
        raise InvalidFormat(f"{META} is not valid JSON: {error.msg}", errors=[fault]) from None
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SchemaViolation(f"{META}: {reason}", errors=[FieldError(field=META, reason=reason)]) from None


def _page(services: Services, dataset: Dataset, paging: Paging, **criteria: Any) -> FilePage:
    after = None
    if paging.after is not None:
        named, slash, path = paging.after.partition("/")
        if not slash:
            raise foreign_cursor()
        after = Position(path, named)
    files = services.files.page(dataset, paging.fetch, after, **criteria)
    results, cursor = paging.cut(files, lambda file: f"{file.id}/{file.path}")
    return FilePage(results=results, next=cursor)


async def _sent(services: Services, dataset: Dataset, checksum: Checksum, request: Request) -> Response:
    file = await run_in_threadpool(services.files.first_of, dataset, checksum)
    path = dataset.layout.blob_data(checksum)
    try:
        return await file_response(services.store, request, path, file.mime_type, file.name, checksum)
    except ObjectMissing:
        raise FileNotFound(f"the content of {checksum} is not in the archive") from None
