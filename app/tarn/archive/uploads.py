"""Uploads in blocks. SQL knows which blocks there are; each is an object of its own until the upload is committed.

A block counts once its row is there, and rows never overlap: they are written while the upload's own row is held. What
arrived survives a restart; what nobody adds to for long enough is given up, and a vacuum takes its objects.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from tarn.access import limits
from tarn.archive import file_index as records
from tarn.archive import reservations
from tarn.archive.files import UNCONDITIONAL, Archive
from tarn.archive.reservations import BlockReservation
from tarn.datasets.registry import Dataset
from tarn.db import idempotency as answers
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
from tarn.model.upload import ByteRange, NewUpload, Span, Upload, merge_spans, missing
from tarn.settings import Settings
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)

MOST_BLOCKS = 100_000
"""Blocks of one upload."""

SHOWN = 10
"""Ranges that an error names."""


class Uploads:
    """Takes files in blocks, and puts them into archives."""

    def __init__(self, database: Database, store: Store, settings: Settings, archive: Archive) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._archive = archive

    def create(
        self, connection: Connection, dataset: Dataset, tenant: TenantName, path: FilePath, new: NewUpload
    ) -> Upload:
        """Begin an upload. Its length is reserved until it is committed, given up or expires. Raises BodyTooLarge,
        QuotaExceeded, DatasetNotFound."""
        limit = self._settings.max_file_bytes
        if new.length > limit:
            raise BodyTooLarge(f"a file has at most {limit} bytes", limit=limit)
        id = new_id()
        reservations.resize(connection, self._settings, dataset, tenant, id, new.length)
        # Uploads that a version before this one began have reserved nothing.
        going_on = uploads.c.tenant == tenant, uploads.c.file.is_(None), uploads.c.expires > now()
        unreserved = uploads.c.id.not_in(select(file_puts.c.id))
        length = func.coalesce(func.sum(uploads.c.length), 0)
        others = int(connection.execute(select(length).where(*going_on, unreserved)).scalar_one())
        limits.reserve(connection, tenant, self._settings, size=others)
        limits.release(connection, tenant, size=others)
        said = new.model_dump(include={"length", "checksum", "origin", "meta"})
        values = {"id": id, "dataset_id": dataset.id, "tenant": tenant, "path": path, **said}
        connection.execute(insert(uploads).values(**values, created=now(), expires=self._expiry()))
        return self.get(connection, dataset, tenant, values["id"])

    def reservation(self, dataset: Dataset, tenant: TenantName, upload: str) -> BlockReservation:
        """What counts the bytes of a block while it arrives."""
        return BlockReservation(self._database, self._settings, dataset, tenant, upload)

    def get(self, connection: Connection, dataset: Dataset, tenant: TenantName, upload: str) -> Upload:
        """How far an upload is. Raises UploadNotFound, for another tenant's too."""
        row = self._find(connection, dataset, tenant, upload)
        return _upload(row, _spans(_blocks(connection, upload)))

    def put_block(
        self,
        dataset: Dataset,
        tenant: TenantName,
        upload: str,
        offset: int,
        chunks: Iterable[bytes],
        once: Callable[[str], IdempotencyKey] | None = None,
        recorded: Callable[[Connection, int], None] = lambda *_: None,
        reservation: BlockReservation | None = None,
    ) -> Upload:
        """Add a block; how far the upload is then. With a key, made with its SHA-256, it is added once.

        Only a file of no bytes may have a block of none, and needs no block. Raises UploadNotFound, EmptyBody,
        OverlappingBlocks, IdempotencyMismatch, and BodyTooLarge for one that goes beyond the end.
        """
        with self._database.read() as connection:
            row = self._find(connection, dataset, tenant, upload)
            if once is None:
                # Before it is read, as it would be in vain.
                _require_free(row, _spans(_blocks(connection, upload)), Span(offset, offset + 1))
        part = new_id()
        place = dataset.layout.upload_part(upload, part)
        digest = hashlib.sha256()
        counted = chunks if reservation is None else reservation.each(chunks)
        size = self._store.put_stream(place, _within(counted, max(0, row.length - offset), digest))
        named = None if once is None else once(digest.hexdigest())
        try:
            if size == 0 and row.length > 0:
                raise EmptyBody("the block has no bytes")  # noqa: TRY301 - its object goes like any other's
            with self._database.write() as connection:
                row = self._hold(connection, dataset, tenant, upload)
                before = None if named is None else answers.find(connection, tenant, named)
                if before is None:
                    if reservation is not None and reservation.is_held:
                        reservation.give_back(connection)
                    if size > 0:
                        _add(connection, row, Span(offset, offset + size), part)
                    recorded(connection, size)
                    there = self.get(connection, dataset, tenant, upload)
                    if named is not None:
                        answers._insert(connection, tenant, named, 200, there.model_dump(mode="json"))
                    if size > 0:
                        return there
        except BaseException:
            self._sweep([place])
            raise
        self._sweep([place])
        if reservation is not None:
            reservation.release()
        return there if before is None else Upload.model_validate(before.answer)

    def commit(
        self,
        dataset: Dataset,
        tenant: TenantName,
        upload: str,
        recorded: Callable[[Connection, ArchiveFile], None] = lambda *_: None,
        conditions: Conditions = UNCONDITIONAL,
    ) -> ArchiveFile:
        """Make a file of the blocks; of many commits one does it, and all get the same file.

        Conditions are held against the files at its path, and no more once the upload is committed. Raises
        UploadNotFound, RangeMissing, and what `Archive.put` does: then the upload is as it was.
        """
        row, blocks = self._whole(dataset, tenant, upload)
        if row.file is not None:
            return ArchiveFile.model_validate(row.file)

        def done(connection: Connection, files: list[ArchiveFile]) -> None:
            (file,) = files
            self._hold(connection, dataset, tenant, upload)
            own = update(uploads).where(uploads.c.id == upload, uploads.c.file.is_(None))
            records.withdraw(connection, [upload])
            if connection.execute(own.values(file=file.model_dump(mode="json"))).rowcount == 1:
                connection.execute(delete(upload_blocks).where(upload_blocks.c.upload == upload))
                recorded(connection, file)

        said = _new_file(row, conditions)
        parts = [dataset.layout.upload_part(upload, block.part) for block in blocks]
        try:
            self._archive.require(dataset, said)
            file = self._archive.put(dataset, tenant, said, self._bytes(parts), done, reservation=upload)
        except (TarnError, Missing) as error:
            self._reserve_again(dataset, tenant, upload)
            if not isinstance(error, Missing | PreconditionFailed):
                raise
            # Another commit may be done with the blocks, and its file is what does not fit the conditions any more.
            with self._database.read() as connection:
                row = self._find(connection, dataset, tenant, upload)
            if row.file is not None:
                return ArchiveFile.model_validate(row.file)
            if isinstance(error, PreconditionFailed):
                raise
            raise Unavailable(f"a block of the upload {upload} is lost") from None
        self._sweep(parts)
        return file

    def _reserve_again(self, dataset: Dataset, tenant: TenantName, upload: str) -> None:
        """Reserve the length of an upload whose commit failed. If another took the room, the next commit is refused."""
        try:
            with self._database.write() as connection:
                row = self._hold(connection, dataset, tenant, upload)
                if row.file is None:
                    reservations.resize(connection, self._settings, dataset, tenant, upload, row.length)
        except TarnError as error:
            log.warning("an upload has no reservation any more", upload=upload, problem=error.slug)

    def abort(self, dataset: Dataset, tenant: TenantName, upload: str, recorded: Callable[[Connection], None]) -> None:
        """Give an upload up. A file that it became stays. Raises UploadNotFound."""
        with self._database.write() as connection:
            self._hold(connection, dataset, tenant, upload)
            gone = forget(connection, [upload])
            recorded(connection)
        self._sweep([dataset.layout.upload_part(upload, part) for part in gone])

    def _whole(self, dataset: Dataset, tenant: TenantName, upload: str) -> tuple[Row[Any], Sequence[Row[Any]]]:
        """An upload and its blocks, which are all there unless it is committed. Raises RangeMissing."""
        with self._database.read() as connection:
            row = self._find(connection, dataset, tenant, upload)
            blocks = _blocks(connection, upload)
        left = [] if row.file is not None else missing(_spans(blocks), row.length)
        if left:
            named = ", ".join(f"{span.start} to {span.end}" for span in left[:SHOWN])
            more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
            raise RangeMissing(f"bytes {named}{more} have not arrived")
        return row, blocks

    def _bytes(self, parts: Iterable[str]) -> Iterator[bytes]:
        for part in parts:
            yield from self._store.stream(part)

    def _find(self, connection: Connection, dataset: Dataset, tenant: TenantName, upload: str) -> Row[Any]:
        row = connection.execute(select(uploads).where(*_own(dataset, tenant, upload))).first()
        if row is None:
            raise UploadNotFound(f"{dataset.name!r} has no upload {upload!r}, or no longer")
        return row

    def _hold(self, connection: Connection, dataset: Dataset, tenant: TenantName, upload: str) -> Row[Any]:
        """Let nobody else change an upload before this transaction ends, and keep it for another while."""
        own = update(uploads).where(*_own(dataset, tenant, upload)).values(expires=self._expiry())
        if connection.execute(own).rowcount != 1:
            raise UploadNotFound(f"{dataset.name!r} has no upload {upload!r}, or no longer")
        connection.execute(update(file_puts).where(file_puts.c.id == upload).values(expires=self._expiry()))
        return self._find(connection, dataset, tenant, upload)

    def _sweep(self, places: list[str]) -> None:
        try:
            self._store.delete(places)
        except TarnError as error:
            log.warning("blocks are left to the vacuum", blocks=len(places), problem=error.slug)

    def _expiry(self) -> Any:
        return now() + timedelta(seconds=self._settings.upload_expiry)


def forget(connection: Connection, ids: Sequence[str]) -> list[str]:
    """Take uploads out of SQL, and release what they reserved; the names of their blocks' objects."""
    records.withdraw(connection, ids)
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
    found = _blocks(connection, upload.id)
    if len(found) >= MOST_BLOCKS:
        raise BodyTooLarge(f"an upload has at most {MOST_BLOCKS} blocks", limit=MOST_BLOCKS)
    _require_free(upload, _spans(found), block)
    connection.execute(insert(upload_blocks).values(upload=upload.id, part=part, **block._asdict()))


def _require_free(row: Row[Any], found: list[Span], block: Span) -> None:
    """Raise OverlappingBlocks if any of a block is there already; all is, once the upload is committed."""
    there = [Span(0, row.length)] if row.file is not None else found
    for other in there:
        if other.start < block.end and block.start < other.end:
            raise OverlappingBlocks(f"bytes {other.start} to {other.end} have arrived already")


def _within(chunks: Iterable[bytes], room: int, digest: Any) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > room:
            raise BodyTooLarge(f"the block goes beyond the end of the file, which is {room} bytes away", limit=room)
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
    there = blocks if row.file is None or row.length == 0 else [Span(0, row.length)]
    return Upload(
        id=row.id,
        path=row.path,
        length=row.length,
        checksum=row.checksum,
        origin=row.origin,
        meta=row.meta,
        committed=[ByteRange(start=span.start, end=span.end) for span in merge_spans(there)],
        missing=[ByteRange(start=span.start, end=span.end) for span in missing(there, row.length)],
        created=row.created,
        expires=row.expires,
        file=row.file,
    )
