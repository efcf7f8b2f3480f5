"""Files: put, listed, taken out, and told of as entities."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import orjson
from anyio import CancelScope
from fastapi import Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from sqlalchemy import Connection

from tarn.api.http.bodies.body_feed import run_fetch, run_with_body
from tarn.api.http.bodies.body_middleware import LIMIT
from tarn.api.http.bodies.multipart import FORM, LONGEST_HEADER, Form
from tarn.api.http.idempotency import fingerprint_of
from tarn.api.http.ingest import KeyHeader, WritingDep, Written, moment_now, write_responses
from tarn.api.http.limits.threads import run_in_threadpool
from tarn.api.http.paging import Page, Paging, PagingDep, foreign_cursor
from tarn.api.http.problems import Responses, raises
from tarn.api.http.route_access import Caller, CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.streaming.file_responses import OCTETS, SENT, file_response
from tarn.api.routes.datasets import IfNoneMatch
from tarn.archive import documents
from tarn.archive import file_index as records
from tarn.archive.file_index import Position
from tarn.archive.files import Staged
from tarn.archive.reservations import Reservation
from tarn.datasets.registry import Dataset
from tarn.db import idempotency as answers
from tarn.db.idempotency import IdempotencyKey
from tarn.errors import (
    Backpressure,
    Fault,
    FileNotFound,
    InvalidFormat,
    InvalidPath,
    PreconditionFailed,
    QuotaExceeded,
    RangeNotSatisfiable,
    SchemaViolation,
    SourceFailed,
    TarnError,
)
from tarn.journal.batches import Batch, Overtaken
from tarn.journal.event_buffer import Events
from tarn.model.dataset import matches_none_match
from tarn.model.entity import Exploder
from tarn.model.file import ArchiveFile, NewFile, RemoteFile
from tarn.model.metadata import Metadata
from tarn.model.names import Checksum, FileId, FilePath, Origin, TenantName
from tarn.model.omissions import Omissions
from tarn.model.preconditions import Conditions
from tarn.storage.store import Missing

routes = router("/v1/datasets/{dataset}/files", "files")

FILE, META = "file", "meta"

LONGEST_META = 16_384
"""Characters of what may be said of a file in a query; a form takes more."""

LONGEST_LENGTH = 18
"""Digits of a body's length: no file is larger, and Python refuses to read numbers of thousands of digits."""

Found = TypeVar("Found")

PathParam = Annotated[str, Query(max_length=FilePath.longest, description="Where the file came from: `a/b/c.pdf`.")]
OriginParam = Annotated[Origin | None, Query(description="Which process put it there; `default` if nothing else does.")]
ChecksumParam = Annotated[Checksum | None, Query(description="The SHA-256 that it must have.")]
EntityParam = Annotated[bool, Query(description="Write the Document entity as well, and its folders.")]
TextOrigin = Annotated[Origin, Path(description="Which process extracted the text.")]

MetaParam = Annotated[
    str | None, Query(max_length=LONGEST_META, description="A JSON object that is kept with the file.")
]

PUT = (InvalidPath, QuotaExceeded, Backpressure)
DATA: Responses = {**SENT, **raises(FileNotFound, RangeNotSatisfiable)}

_META: TypeAdapter[dict[str, Any]] = TypeAdapter(Metadata)


class FilePage(Page[ArchiveFile]):
    """Files by path; of one path, those of different content by id."""


class WrittenText(BaseModel):
    """What was kept of a text."""

    size: int = Field(description="Bytes.")


class WrittenDocument(Written):
    """What was written of a Document and its folders."""

    id: str = Field(description="The Document's id, which is the file's.")


def bytes_body(kind: str, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    """The OpenAPI description of a body that is bytes, or a form with them."""
    plain = {"type": "string", "format": "binary"}
    form = {"type": "object", "properties": properties, "required": [FILE]}
    return {"requestBody": {"required": True, "content": {kind: {"schema": plain if properties is None else form}}}}


FORM_BODY = bytes_body(
    FORM,
    {
        FILE: {"type": "string", "format": "binary"},
        META: {"type": "string", "description": "A JSON object that is kept with the file."},
    },
)


def _conditions(
    request: Request,
    if_match: Annotated[
        str | None, Header(max_length=1000, description="Entity tags, one of which a file that is there must have.")
    ] = None,
    if_none_match: Annotated[
        str | None, Header(max_length=1000, description="Entity tags that no file that is there may have; `*`: any.")
    ] = None,
) -> Conditions:
    """What must hold of the files that are there. A header may come on several lines, which are one list."""
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
    house: ServicesDep,
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
    """Put a file: its bytes are the body, hashed while they arrive. The same content at the same path is one file.

    `If-Match` and `If-None-Match` are held against all files at the path: each is known by the entity tag of its
    content, and by that of its record.
    """
    place = _queried_path(request, path)
    told = _meta(None if meta is None else _queried_meta(request, meta))
    said = NewFile(path=place, origin=origin, checksum=checksum, meta=told, conditions=conditions)
    staged = await _staged(house, caller, dataset, request, said, request.stream(), key, length_of(request))
    return await _committed(house, caller, dataset, request, staged, key, entity)


@routes.post(
    "",
    status_code=201,
    response_model=ArchiveFile,
    responses=raises(*PUT, PreconditionFailed),
    openapi_extra=FORM_BODY,
)
async def post_file(
    request: Request,
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    conditions: ConditionsDep,
    path: Annotated[PathParam | None, Query(description="Where it came from, if not what the form calls it.")] = None,
    origin: OriginParam = None,
    checksum: ChecksumParam = None,
    entity: EntityParam = False,
    key: KeyHeader = None,
) -> Response:
    """Put a file that is part of a form, with a JSON object beside it that is kept with the file.

    Conditions are held against the files at its path, as they are for a PUT.
    """
    request.scope[LIMIT] = house.settings.max_file_bytes
    form = Form(request, FILE, (META,), house.settings.max_document_bytes)
    named = await form.until_file()
    if path is None and named is None:
        raise InvalidPath("the file has no name, and there is no path")
    place = checked_path(named or "") if path is None else _queried_path(request, path)
    said = NewFile(path=place, origin=origin, checksum=checksum, conditions=conditions)
    # All that is no file: its own header, and a field with its header.
    around = house.settings.max_document_bytes + 3 * LONGEST_HEADER
    least = max(0, (length_of(request) or 0) - around)
    staged = await _staged(house, caller, dataset, request, said, form.file(), key, least)
    try:
        await form.rest()
        staged = replace(staged, said=said.model_copy(update={"meta": _meta(form.fields.get(META))}))
    except BaseException:
        await run_in_threadpool(house.archive.drop, [staged])
        raise
    return await _committed(house, caller, dataset, request, staged, key, entity)


@routes.post(
    "/fetch",
    status_code=201,
    response_model=ArchiveFile,
    responses=raises(*PUT, FileNotFound, SourceFailed, PreconditionFailed),
)
async def fetch_file(
    request: Request,
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    remote: RemoteFile,
    conditions: ConditionsDep,
    origin: OriginParam = None,
    entity: EntityParam = False,
) -> Response:
    """Fetch a file from elsewhere and put it: its bytes are hashed while they arrive.

    Conditions are held against the files at its path, as they are for a PUT.
    """
    path = None if remote.path is None else checked_path(remote.path)

    def said(place: FilePath) -> NewFile:
        new = NewFile(path=place, origin=origin, meta=remote.meta, checksum=remote.checksum, conditions=conditions)
        house.archive.require(dataset, new)
        return new

    def stage() -> Staged:
        named = None if path is None else said(path)  # before anybody is asked for its bytes
        reservation = house.archive.reservation(dataset, caller.identity.tenant)
        with house.fetcher.open(remote.uri) as source:
            if named is None and source.name is None:
                raise InvalidPath("the source does not say what the file is called, and there is no path")
            new = named or said(checked_path(source.name or ""))
            reservation.declare(source.size)
            return house.archive.stage(dataset, new, source, reservation)

    staged = await run_fetch(stage)
    return await _committed(house, caller, dataset, request, staged, None, entity)


@routes.get("", responses=raises(InvalidPath))
def list_files(
    request: Request,
    house: ServicesDep,
    dataset: DatasetDep,
    paging: PagingDep,
    prefix: Annotated[str, Query(max_length=FilePath.longest, description="What paths begin with.")] = "",
    path: Annotated[PathParam | None, Query(description="The whole path.")] = None,
) -> FilePage:
    """List files by path."""
    if prefix:
        _queried_path(request, prefix.removesuffix("/"))
    whole = None if path is None else _queried_path(request, path)
    return _page(house, dataset, paging, prefix=prefix, path=whole)


@routes.get("/{checksum}", responses=raises(FileNotFound))
def list_file_records(house: ServicesDep, dataset: DatasetDep, paging: PagingDep, checksum: Checksum) -> FilePage:
    """List the files that have a content."""
    with house.database.read() as connection:
        records.first_of(connection, dataset, checksum)
    return _page(house, dataset, paging, checksum=checksum)


@routes.get("/{checksum}/data", response_class=Response, responses=DATA)
async def get_file_data(house: ServicesDep, dataset: DatasetDep, checksum: Checksum, request: Request) -> Response:
    """Get a content: all of it, or the part that `Range` asks for. Its entity tag is its checksum."""
    return await _sent(house, dataset, checksum, request)


@routes.head("/{checksum}/data", response_class=Response, responses=DATA)
async def head_file_data(house: ServicesDep, dataset: DatasetDep, checksum: Checksum, request: Request) -> Response:
    """Look what a content is like, without its bytes."""
    return await _sent(house, dataset, checksum, request)


@routes.get(
    "/{checksum}/{file}",
    responses={304: {"description": "The caller has it already."}, **raises(FileNotFound)},
)
def get_file(
    house: ServicesDep,
    dataset: DatasetDep,
    checksum: Checksum,
    file: FileId,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> ArchiveFile:
    """Show a file. The entity tag is that of its record, which says more than its content."""
    found = _found(house, dataset, checksum, file)
    response.headers["ETag"] = found.record_tag
    if if_none_match is not None and matches_none_match(if_none_match, found.record_tag):
        return Response(status_code=304, headers={"ETag": found.record_tag})  # type: ignore[return-value]  # FastAPI passes it on
    return found


@routes.delete("/{checksum}/{file}", status_code=204, responses=raises(FileNotFound, PreconditionFailed))
def delete_file(
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    checksum: Checksum,
    file: FileId,
    conditions: ConditionsDep,
) -> None:
    """Delete a file; its content stays as long as another has it, and until the next vacuum."""
    house.archive.delete(dataset, checksum, file, caller.act.done, conditions)


@routes.post(
    "/{checksum}/{file}/entity",
    responses=write_responses(WrittenDocument, FileNotFound),
    response_model=WrittenDocument,
)
async def add_file_entity(writing: WritingDep, checksum: Checksum, file: FileId) -> Response:
    """Write the Document entity of a file that is there, and the folders it is in."""
    found = await run_in_threadpool(_found, writing.house, writing.dataset, checksum, file)
    omitted = Omissions()
    origin = writing.origin or found.origin
    events = await run_in_threadpool(_events, writing.dataset, found, origin, omitted)
    counts = {"entities": events.entities, "statements": events.statements, "rejected": 0}
    answer = WrittenDocument(id=found.id, omitted=omitted, **counts)
    return await writing.write(events, answer)


@routes.put(
    "/{checksum}/text/{origin}", responses=raises(FileNotFound, QuotaExceeded), openapi_extra=bytes_body(OCTETS)
)
async def put_file_text(
    request: Request,
    house: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    checksum: Checksum,
    origin: TextOrigin,
    key: KeyHeader = None,
) -> WrittenText:
    """Keep the text that an origin extracted from a content, in the place of the one before."""
    request.scope[LIMIT] = house.settings.max_file_bytes
    await run_in_threadpool(_first, house, dataset, checksum)
    tenant, archive = caller.identity.tenant, house.archive
    if key is not None and await run_in_threadpool(_is_known, house, tenant, key):
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

    def put(keep: Keep) -> Any:
        def recorded(connection: Connection) -> None:
            caller.act.done(connection, size=staged.size)
            keep(connection, {"size": staged.size})

        archive.put_text(dataset, tenant, checksum, origin, staged, recorded)
        return {"size": staged.size}

    written = await run_in_threadpool(_answered, house, caller, _digest(request, key, staged), staged, put)
    return WrittenText.model_validate(written)


@routes.delete("/{checksum}/text/{origin}", status_code=204, responses=raises(FileNotFound))
def delete_file_text(
    house: ServicesDep, caller: CallerDep, dataset: DatasetDep, checksum: Checksum, origin: TextOrigin
) -> None:
    """Delete the text that an origin extracted from a content."""
    house.archive.delete_text(dataset, checksum, origin, caller.act.done)


@routes.get("/{checksum}/text/{origin}", response_class=Response, responses=DATA)
async def get_file_text(
    house: ServicesDep, dataset: DatasetDep, checksum: Checksum, origin: TextOrigin, request: Request
) -> Response:
    """Get the text that an origin extracted from a content."""
    await run_in_threadpool(_first, house, dataset, checksum)
    path, name = dataset.layout.text(checksum, origin), f"{origin}.txt"
    try:
        return await file_response(house.store, request, path, "text/plain; charset=utf-8", name)
    except Missing:
        raise FileNotFound(f"there is no text of {checksum} by {origin!r}") from None


def checked_path(text: str) -> FilePath:
    """A path that a caller names. Raises InvalidPath, with the reason."""
    try:
        return FilePath(text)
    except ValueError as error:
        raise InvalidPath(str(error)) from None


def _queried_path(request: Request, text: str) -> FilePath:
    """A path in the query. Raises InvalidPath."""
    if _is_garbled(request, text):
        raise InvalidPath("the path is not UTF-8")
    return checked_path(text)


def _queried_meta(request: Request, text: str) -> bytes:
    if _is_garbled(request, text):
        raise InvalidFormat(f"{META} is not UTF-8", errors=[Fault(field=META, reason="is not UTF-8")])
    return text.encode()


def _is_garbled(request: Request, text: str) -> bool:
    """Whether a text in the query was none: bytes that are not UTF-8 have become question marks by now."""
    return "\ufffd" in text and b"%EF%BF%BD" not in request.scope["query_string"].upper()


async def write_document(house: Services, caller: Caller, dataset: Dataset, file: ArchiveFile) -> None:
    """Write the Document entity of a file, and its folders, under its origin. Raises Backpressure, QuotaExceeded."""
    events = await run_in_threadpool(_events, dataset, file, file.origin, Omissions())
    batch = Batch(dataset, caller.identity.tenant, caller.act, file.origin)
    await asyncio.wrap_future(house.writer.submit(batch, events))


def length_of(request: Request) -> int | None:
    """The bytes of a body as its sender declares them; None: it does not, or compresses it."""
    length = request.headers.get("Content-Length", "")
    is_plain = request.headers.get("Content-Encoding", "identity").strip().lower() == "identity"
    return int(length) if is_plain and length.isdigit() and len(length) <= LONGEST_LENGTH else None


async def reserved(
    reservation: Reservation,
    length: int | None,
    pieces: AsyncIterator[bytes],
    work: Callable[[Iterator[bytes]], Found],
) -> Found:
    """Let a thread work on a body whose bytes are counted against the quota, from before the first is read.

    Raises QuotaExceeded, and what the work raises: then nothing is reserved.
    """
    try:
        await run_in_threadpool(reservation.declare, length)
        return await run_with_body(pieces, work)
    except BaseException:
        with CancelScope(shield=True):
            await run_in_threadpool(reservation.release)
        raise


async def _staged(
    house: Services,
    caller: Caller,
    dataset: Dataset,
    request: Request,
    said: NewFile,
    pieces: AsyncIterator[bytes],
    key: str | None,
    length: int | None,
) -> Staged:
    request.scope[LIMIT] = house.settings.max_file_bytes
    tenant = caller.identity.tenant
    if key is None:
        await run_in_threadpool(house.archive.require, dataset, said)
    elif await run_in_threadpool(_is_known, house, tenant, key):
        # It was put already, and is answered again, or refused; in either case its bytes are not needed.
        return await run_with_body(pieces, lambda chunks: house.archive.stage(dataset, said, chunks, keep=False))
    reservation = house.archive.reservation(dataset, tenant)
    return await reserved(
        reservation, length, pieces, lambda chunks: house.archive.stage(dataset, said, chunks, reservation)
    )


def _is_known(house: Services, tenant: TenantName, key: str) -> bool:
    with house.database.read() as connection:
        return answers.is_known(connection, tenant, key)


async def _committed(
    house: Services, caller: Caller, dataset: Dataset, request: Request, staged: Staged, key: str | None, entity: bool
) -> Response:
    """Put what was staged into the archive, once for a key; and write its entities, which may be done again."""

    def put(keep: Keep) -> Any:
        def recorded(connection: Connection, files: list[ArchiveFile]) -> None:
            (file,) = files
            caller.act.done(connection, target=file_path(dataset, file), size=file.size)
            keep(connection, file.model_dump(mode="json"))

        return house.archive.commit(dataset, caller.identity.tenant, [staged], recorded)[0]

    once = _digest(request, key, staged)
    file = ArchiveFile.model_validate(await run_in_threadpool(_answered, house, caller, once, staged, put))
    if entity:
        await write_document(house, caller, dataset, file)
    headers = {"Location": file_path(dataset, file), "ETag": file.content_tag}
    return Response(file.model_dump_json(), 201, headers, "application/json")


def file_path(dataset: Dataset, file: ArchiveFile) -> str:
    """Where a file is found."""
    return f"/v1/datasets/{dataset.name}/files/{file.checksum}/{file.id}"


Keep = Callable[[Connection, Any], None]
"""Keeps an answer in the transaction that makes it true."""


def _digest(request: Request, key: str | None, staged: Staged) -> IdempotencyKey | None:
    if key is None:
        return None
    digest = hashlib.sha256(orjson.dumps([staged.checksum, staged.said.meta], option=orjson.OPT_SORT_KEYS))
    return IdempotencyKey(key, fingerprint_of(request, digest.hexdigest()))


def _answered(
    house: Services, caller: Caller, once: IdempotencyKey | None, staged: Staged, work: Callable[[Keep], Any]
) -> Any:
    """Do something with what was staged, or give the answer that it got before. Raises IdempotencyMismatch."""
    tenant = caller.identity.tenant

    def keep(connection: Connection, answer: Any) -> None:
        if once is not None and not answers._insert(connection, tenant, once, 200, answer):
            raise Overtaken

    def before() -> Any:
        with house.database.read() as connection:
            kept = None if once is None else answers.find(connection, tenant, once)
            return None if kept is None else kept.answer

    try:
        found = before()
    except TarnError:
        house.archive.drop([staged])
        raise
    if found is not None:
        house.archive.drop([staged])
        return found
    try:
        return work(keep)
    except Overtaken:
        return before()


def _events(dataset: Dataset, file: ArchiveFile, origin: Origin, omitted: Omissions) -> Events:
    """The entities of a file. Not for the event loop: a path may have two thousand folders."""
    exploder = Exploder()  # that of the process is the event loop's own
    events, moment = Events(), moment_now()
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
        fault = Fault(field=META, line=error.lineno, reason=error.msg)
        raise InvalidFormat(f"{META} is not valid JSON: {error.msg}", errors=[fault]) from None
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SchemaViolation(f"{META}: {reason}", errors=[Fault(field=META, reason=reason)]) from None


def _page(house: Services, dataset: Dataset, paging: Paging, **asked: Any) -> FilePage:
    after = None
    if paging.after is not None:
        named, slash, path = paging.after.partition("/")
        if not slash:
            raise foreign_cursor()
        after = Position(path, named)
    with house.database.read() as connection:
        found = records.page(connection, dataset, paging.fetch, after, **asked)
    results, cursor = paging.cut(found, lambda file: f"{file.id}/{file.path}")
    return FilePage(results=results, next=cursor)


def _found(house: Services, dataset: Dataset, checksum: Checksum, file: FileId) -> ArchiveFile:
    with house.database.read() as connection:
        return records.get(connection, dataset, checksum, file)


def _first(house: Services, dataset: Dataset, checksum: Checksum) -> ArchiveFile:
    with house.database.read() as connection:
        return records.first_of(connection, dataset, checksum)


async def _sent(house: Services, dataset: Dataset, checksum: Checksum, request: Request) -> Response:
    file = await run_in_threadpool(_first, house, dataset, checksum)
    path = dataset.layout.blob_data(checksum)
    try:
        return await file_response(house.store, request, path, file.mime_type, file.name, checksum)
    except Missing:
        raise FileNotFound(f"the content of {checksum} is not in the archive") from None
