"""Resumable uploads in blocks. SQL lists the blocks; each is an object of its own until the upload is committed.

A block counts once its row exists, and rows never overlap: they are written while the upload's row is locked. Received
blocks survive a restart; an upload that receives nothing for long enough expires, and a vacuum deletes its objects.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from tarn.access import limits
from tarn.access.audit import AuditedAction
from tarn.archive import file_index, reservations
from tarn.archive.files import UNCONDITIONAL, Archive
from tarn.archive.reservations import BlockReservation
from tarn.datasets.registry import Dataset
from tarn.db import idempotency
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey
from tarn.db.tables import file_puts, upload_blocks, uploads
from tarn.errors import (
    BodyTooLarge,
    EmptyBody,
    OverlappingBlocks,
    PreconditionFailed,
    RangeMissing,
    TarnError,
    Unavailable,
    UploadNotFound,
)
from tarn.model.file import ArchiveFile, NewFile
from tarn.model.ids import new_id, now
from tarn.model.names import Checksum, FilePath, Origin, TenantName
from tarn.model.preconditions import Conditions
from tarn.model.upload import ByteRange, NewUpload, Span, Upload, merge_spans, missing_spans
from tarn.settings import Settings
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)

MOST_BLOCKS = 100_000
"""Most blocks of one upload."""

SHOWN = 10
"""Most ranges that an error lists."""


class Uploads:
    """Receives files in blocks, and puts them into archives."""

    def __init__(self, database: Database, store: Store, settings: Settings, archive: Archive) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._archive = archive

    def create(
        self, dataset: Dataset, tenant: TenantName, path: FilePath, new: NewUpload, act: AuditedAction
    ) -> Upload:
        """Begin an upload. Its length is reserved until it is committed, aborted or expires. Raises BodyTooLarge,
        QuotaExceeded, DatasetNotFound."""
        limit = self._settings.max_file_bytes
        if new.length > limit:
            raise BodyTooLarge(f"a file has at most {limit} bytes", limit=limit)
        id = new_id()
        fields = new.model_dump(include={"length", "checksum", "origin", "meta"})
        values = {"id": id, "dataset_id": dataset.id, "tenant": tenant, "path": path, **fields}
        with self._database.write() as connection:
            reservations.resize(connection, self._settings, dataset, tenant, id, new.length)
            # Uploads begun by an earlier release have reserved nothing.
            in_progress = uploads.c.tenant == tenant, uploads.c.file.is_(None), uploads.c.expires > now()
            unreserved = uploads.c.id.not_in(select(file_puts.c.id))
            length = func.coalesce(func.sum(uploads.c.length), 0)
            others = int(connection.execute(select(length).where(*in_progress, unreserved)).scalar_one())
            limits.reserve(connection, tenant, self._settings, size=others)
            limits.release(connection, tenant, size=others)
            connection.execute(insert(uploads).values(**values, created=now(), expires=self._expiry()))
            upload = self._state(connection, dataset, tenant, id)
            act.done(connection, target=f"{act.target}/{id}")
        return upload

    def reservation(self, dataset: Dataset, tenant: TenantName, upload: str) -> BlockReservation:
        """Return a reservation for the bytes of a block while it is received."""
        return BlockReservation(self._database, self._settings, dataset, tenant, upload)

    def get(self, dataset: Dataset, tenant: TenantName, upload: str) -> Upload:
        """Return the state of an upload. Raises UploadNotFound, also for another tenant's."""
        with self._database.read() as connection:
            return self._state(connection, dataset, tenant, upload)

    def _state(self, connection: Connection, dataset: Dataset, tenant: TenantName, upload: str) -> Upload:
        row = self._find(connection, dataset, tenant, upload)
        return _upload(row, _spans(_blocks(connection, upload)))

    def put_block(
        self,
        dataset: Dataset,
        tenant: TenantName,
        upload: str,
        offset: int,
        chunks: Iterable[bytes],
        act: AuditedAction,
        once: Callable[[str], IdempotencyKey | None] | None = None,
        reservation: BlockReservation | None = None,
    ) -> Upload:
        """Add a block, and return the state of the upload. With `once`, which makes a key of its SHA-256, add it once.

        Only an empty file may have an empty block, and it needs none. Raises UploadNotFound, EmptyBody,
        OverlappingBlocks, IdempotencyMismatch, and BodyTooLarge for a block beyond the end.
        """
        with self._database.read() as connection:
            row = self._find(connection, dataset, tenant, upload)
            if once is None:
                # Check before the body is read, to fail early.
                _require_free(row, _spans(_blocks(connection, upload)), Span(offset, offset + 1))
        part = new_id()
        object_path = dataset.layout.upload_part(upload, part)
        digest = hashlib.sha256()
        counted = chunks if reservation is None else reservation.each(chunks)
        size = self._store.put_stream(object_path, _within(counted, max(0, row.length - offset), digest))
        named = None if once is None else once(digest.hexdigest())
        try:
            if size == 0 and row.length > 0:
                raise EmptyBody("the block has no bytes")  # noqa: TRY301 - its object is deleted below
            with self._database.write() as connection:
                row = self._hold(connection, dataset, tenant, upload)
                before = None if named is None else idempotency.find(connection, tenant, named)
                if before is None:
                    if reservation is not None and reservation.is_held:
                        reservation.give_back(connection)
                    if size > 0:
                        _add(connection, row, Span(offset, offset + size), part)
                    act.done(connection, offset=offset, size=size)
                    state = self._state(connection, dataset, tenant, upload)
                    if named is not None:
                        idempotency.store(connection, tenant, named, 200, state.model_dump(mode="json"))
                    if size > 0:
                        return state
        except BaseException:
            self._sweep([object_path])
            raise
        self._sweep([object_path])
        if reservation is not None:
            reservation.release()
        return state if before is None else Upload.model_validate(before.answer)

    def commit(
        self,
        dataset: Dataset,
        tenant: TenantName,
        upload: str,
        act: AuditedAction,
        target: Callable[[ArchiveFile], str],
        conditions: Conditions = UNCONDITIONAL,
    ) -> ArchiveFile:
        """Make a file of the blocks. Of concurrent commits one does it, and all return the same file.

        `target` returns what the audit log names as the file.

        Conditions are checked against the files at its path, and not once the upload is committed. Raises
        UploadNotFound, RangeMissing, and what `Archive.put` does: then the upload is unchanged.
        """
        row, blocks = self._complete(dataset, tenant, upload)
        if row.file is not None:
            return ArchiveFile.model_validate(row.file)

        def done(connection: Connection, files: list[ArchiveFile]) -> None:
            (file,) = files
            self._hold(connection, dataset, tenant, upload)
            own = update(uploads).where(uploads.c.id == upload, uploads.c.file.is_(None))
            file_index.withdraw(connection, [upload])
            if connection.execute(own.values(file=file.model_dump(mode="json"))).rowcount == 1:
                connection.execute(delete(upload_blocks).where(upload_blocks.c.upload == upload))
                act.done(connection, target=target(file), size=file.size)

        new_file = _new_file(row, conditions)
        parts = [dataset.layout.upload_part(upload, block.part) for block in blocks]
        try:
            self._archive.require(dataset, new_file)
            file = self._archive.put(dataset, tenant, new_file, self._bytes(parts), done, reservation=upload)
        except (TarnError, ObjectMissing) as error:
            self._reserve_again(dataset, tenant, upload)
            if not isinstance(error, ObjectMissing | PreconditionFailed):
                raise
            # Another commit may have finished, and its file may be the reason why the conditions do not hold.
            with self._database.read() as connection:
                row = self._find(connection, dataset, tenant, upload)
            if row.file is not None:
                return ArchiveFile.model_validate(row.file)
            if isinstance(error, PreconditionFailed):
                raise
            raise Unavailable(f"a block of the upload {upload} is missing in the storage") from None
        self._sweep(parts)
        return file

    def _reserve_again(self, dataset: Dataset, tenant: TenantName, upload: str) -> None:
        """Reserve the length of an upload again after its commit failed. With a full quota, the next commit fails."""
        try:
            with self._database.write() as connection:
                row = self._hold(connection, dataset, tenant, upload)
                if row.file is None:
                    reservations.resize(connection, self._settings, dataset, tenant, upload, row.length)
        except TarnError as error:
            log.warning("cannot reserve the length of an upload again", upload=upload, problem=error.slug)

    def abort(self, dataset: Dataset, tenant: TenantName, upload: str, act: AuditedAction) -> None:
        """Delete an upload. If it was committed, its file stays. Raises UploadNotFound."""
        with self._database.write() as connection:
            self._hold(connection, dataset, tenant, upload)
            paths = forget(connection, [upload])
            act.done(connection)
        self._sweep([dataset.layout.upload_part(upload, part) for part in paths])

    def _complete(self, dataset: Dataset, tenant: TenantName, upload: str) -> tuple[Row[Any], Sequence[Row[Any]]]:
        """Return an upload and all of its blocks, or none if it is committed. Raises RangeMissing if any is missing."""
        with self._database.read() as connection:
            row = self._find(connection, dataset, tenant, upload)
            blocks = _blocks(connection, upload)
        missing = [] if row.file is not None else missing_spans(_spans(blocks), row.length)
        if missing:
            named = ", ".join(f"{span.start} to {span.end}" for span in missing[:SHOWN])
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            raise RangeMissing(f"bytes {named}{more} have not arrived")
        return row, blocks

    def _bytes(self, parts: Iterable[str]) -> Iterator[bytes]:
        for part in parts:
            yield from self._store.stream(part)

    def _find(self, connection: Connection, dataset: Dataset, tenant: TenantName, upload: str) -> Row[Any]:
        row = connection.execute(select(uploads).where(*_own(dataset, tenant, upload))).first()
        if row is None:
            raise UploadNotFound(f"{dataset.name!r} has no upload {upload!r}, or it has expired")
        return row

    def _hold(self, connection: Connection, dataset: Dataset, tenant: TenantName, upload: str) -> Row[Any]:
        """Lock an upload until this transaction ends, and extend its expiry."""
        own = update(uploads).where(*_own(dataset, tenant, upload)).values(expires=self._expiry())
        if connection.execute(own).rowcount != 1:
            raise UploadNotFound(f"{dataset.name!r} has no upload {upload!r}, or it has expired")
        connection.execute(update(file_puts).where(file_puts.c.id == upload).values(expires=self._expiry()))
        return self._find(connection, dataset, tenant, upload)

    def _sweep(self, paths: list[str]) -> None:
        try:
            self._store.delete(paths)
        except TarnError as error:
            log.warning("cannot delete blocks of an upload; a vacuum will", blocks=len(paths), problem=error.slug)

    def _expiry(self) -> Any:
        return now() + timedelta(seconds=self._settings.upload_expiry)


def forget(connection: Connection, ids: Sequence[str]) -> list[str]:
    """Delete the rows of uploads, release their reservations, and return the names of their blocks' objects."""
    file_index.withdraw(connection, ids)
    own = delete(upload_blocks).where(upload_blocks.c.upload.in_(ids)).returning(upload_blocks.c.part)
    parts = list(connection.execute(own).scalars())
    connection.execute(delete(uploads).where(uploads.c.id.in_(ids)))
    return parts


def _own(dataset: Dataset, tenant: TenantName, upload: str) -> tuple[Any, ...]:
    return uploads.c.id == upload, uploads.c.dataset_id == dataset.id, uploads.c.tenant == tenant


def _blocks(connection: Connection, upload: str) -> Sequence[Row[Any]]:
    query = select(upload_blocks).where(upload_blocks.c.upload == upload).order_by(upload_blocks.c.start)
    return connection.execute(query).all()


def _spans(blocks: Sequence[Row[Any]]) -> list[Span]:
    return [Span(block.start, block.end) for block in blocks]


def _add(connection: Connection, upload: Row[Any], block: Span, part: str) -> None:
    spans = _blocks(connection, upload.id)
    if len(spans) >= MOST_BLOCKS:
        raise BodyTooLarge(f"an upload has at most {MOST_BLOCKS} blocks", limit=MOST_BLOCKS)
    _require_free(upload, _spans(spans), block)
    connection.execute(insert(upload_blocks).values(upload=upload.id, part=part, **block._asdict()))


def _require_free(row: Row[Any], spans: list[Span], block: Span) -> None:
    """Raise OverlappingBlocks if any byte of a block was received already; after the commit, all were."""
    received = [Span(0, row.length)] if row.file is not None else spans
    for other in received:
        if other.start < block.end and block.start < other.end:
            raise OverlappingBlocks(f"bytes {other.start} to {other.end} have arrived already")


def _within(chunks: Iterable[bytes], room: int, digest: Any) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > room:
            raise BodyTooLarge(
                f"the block goes beyond the end of the file, which is {room} bytes after its offset", limit=room
            )
        digest.update(chunk)
        yield chunk


def _new_file(row: Row[Any], conditions: Conditions) -> NewFile:
    return NewFile(
        path=FilePath(row.path),
        origin=None if row.origin is None else Origin(row.origin),
        meta=row.meta,
        checksum=None if row.checksum is None else Checksum(row.checksum),
        conditions=conditions,
    )


def _upload(row: Row[Any], blocks: list[Span]) -> Upload:
    received = blocks if row.file is None or row.length == 0 else [Span(0, row.length)]
    return Upload(
        id=row.id,
        path=row.path,
        length=row.length,
        checksum=row.checksum,
        origin=row.origin,
        meta=row.meta,
        committed=[ByteRange(start=span.start, end=span.end) for span in merge_spans(received)],
        missing=[ByteRange(start=span.start, end=span.end) for span in missing_spans(received, row.length)],
        created=row.created,
        expires=row.expires,
        file=row.file,
    )
