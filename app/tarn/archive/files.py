"""The archive: every content is stored once, under its SHA-256, with a File record for each path it came from.

Bytes are processed once: they are hashed while they are written to `uploads/`, and the object is copied to its final
path when its checksum is known. A file that fits in one chunk is kept in memory instead and written directly.
"""

import codecs
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection

from tarn.archive import file_index, texts
from tarn.archive.mime import HEAD, mime_type
from tarn.archive.reservations import UNRESERVED, Reservation
from tarn.archive.texts import CountedText
from tarn.datasets.config_documents import require_alive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import BodyTooLarge, FieldError, FileNotFound, PathExists, SchemaViolation, TarnError, Unavailable
from tarn.journal.parsing.event_chunks import DEFAULT_ORIGIN
from tarn.model.file import ArchiveFile, NewFile, file_id
from tarn.model.ids import new_id, now
from tarn.model.names import Checksum, FileId, FilePath, Origin, TenantName
from tarn.model.preconditions import Conditions
from tarn.settings import Settings
from tarn.storage.store import ObjectMissing, Store

log = structlog.get_logger(__name__)

SMALL = UNRESERVED
"""Bytes up to which a file is kept in memory until its checksum is known."""

TRIES = 5
"""Attempts of a put, which starts again if the same file is deleted concurrently."""

WRITERS = 8
"""Files of one commit that are written concurrently."""

DATA = "data"
"""The name of an upload's object."""

UNCONDITIONAL = Conditions()

Recorded = Callable[[Connection, list[ArchiveFile]], None]
"""Callback that gets the files in the transaction that records them, and may write more in it."""

Reached = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """A received file that is not in the archive yet."""

    new_file: NewFile
    checksum: Checksum
    sha1: str
    size: int
    mime_type: str
    data: bytes | None = field(repr=False)
    """The bytes, if the file is small."""
    upload_path: str | None
    """The path of the object in `uploads/`, if it is not."""
    reservation: str | None = None
    """The id of the reservation that counts it against the quota until it is committed."""

    @property
    def is_kept(self) -> bool:
        """Return whether its bytes are stored, and not only hashed."""
        return self.data is not None or self.upload_path is not None


class Archive:
    """Puts files into the archives of datasets, reads and deletes them."""

    def __init__(self, database: Database, store: Store, settings: Settings, reached: Reached = lambda _: None) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._reached = reached

    # Putting

    def put(
        self,
        dataset: Dataset,
        tenant: TenantName,
        new_file: NewFile,
        chunks: Iterable[bytes],
        recorded: Recorded = lambda *_: None,
        reservation: str | None = None,
    ) -> ArchiveFile:
        """Put a file, and return its record: the existing one if this content is already at this path.

        A file may be empty. Raises BodyTooLarge, SchemaViolation if the checksum differs from the expected one,
        QuotaExceeded, DatasetNotFound, PreconditionFailed, and whatever `chunks` raises; then nothing is stored.

        If the caller passes a reservation, the file replaces it and no other is made.
        """
        room = None if reservation is not None else self.reservation(dataset, tenant)
        staged = self.stage(dataset, new_file, chunks, room)
        if reservation is not None:
            staged = replace(staged, reservation=reservation)
        return self.commit(dataset, tenant, [staged], recorded)[0]

    def reservation(self, dataset: Dataset, tenant: TenantName) -> Reservation:
        """Return a reservation that counts the bytes of one body against its tenant's quota while it is received."""
        return Reservation(self._database, self._settings, dataset, tenant)

    def stage(
        self,
        dataset: Dataset,
        new_file: NewFile,
        chunks: Iterable[bytes],
        reservation: Reservation | None = None,
        keep: bool = True,
    ) -> Staged:
        """Receive a file's bytes. The caller must commit or drop the result; otherwise a vacuum deletes it.

        With a reservation the bytes are counted as they arrive, and released if this fails. Without `keep` they are
        hashed but not stored: to find out whether a file is known when it must not be put. Raises what `put` does,
        except DatasetNotFound.
        """
        try:
            return self._stage(dataset, new_file, chunks, reservation, keep)
        except BaseException:
            if reservation is not None:
                reservation.release()
            raise

    def _stage(
        self, dataset: Dataset, new_file: NewFile, chunks: Iterable[bytes], reservation: Reservation | None, keep: bool
    ) -> Staged:
        digest = _Digest(self._settings.max_file_bytes)
        remaining = digest.each(chunks if reservation is None else reservation.each(chunks))
        first, data = _gathered(remaining, SMALL), None
        upload_path = None
        if not keep:
            for _ in remaining:
                pass
        elif digest.over:
            data = b"".join(first)
        else:
            upload_path = dataset.layout.upload_part(new_id(), DATA)
            self._store.put_stream(upload_path, chain(first, remaining))
        staged = Staged(
            new_file,
            Checksum(digest.sha256.hexdigest()),
            digest.sha1.hexdigest(),
            digest.size,
            mime_type(new_file.path.name, digest.head),
            data,
            upload_path,
            reservation.id if reservation is not None and reservation.is_held else None,
        )
        self._reached("staged")
        try:
            _require(staged)
        except TarnError:
            self.drop([staged])
            raise
        return staged

    def drop(self, staged: Iterable[Staged]) -> None:
        """Delete staged files and release their reservations. A failure is only logged: a vacuum deletes them later."""
        dropped = list(staged)
        self._delete_staged(dropped)
        self._release([one.reservation for one in dropped if one.reservation is not None])

    def _release(self, reservations: Sequence[str]) -> None:
        if not reservations:
            return
        try:
            with self._database.write() as connection:
                file_index.withdraw(connection, reservations)
        except TarnError as error:
            log.warning("cannot release reserved bytes; they will expire", problem=error.slug)

    def _delete_staged(self, staged: Iterable[Staged]) -> None:
        paths = [one.upload_path for one in staged if one.upload_path is not None]
        try:
            self._store.delete(paths)
        except TarnError as error:
            log.warning("cannot delete a staged upload; a vacuum will", path=paths[0], problem=error.slug)

    def commit(
        self,
        dataset: Dataset,
        tenant: TenantName,
        staged: Sequence[Staged],
        recorded: Recorded = lambda *_: None,
    ) -> list[ArchiveFile]:
        """Put staged files into the archive, all in the same few transactions, and return their records in order.

        1. announce  from here on the blobs are not collected. Quota is taken, in place of what was reserved
        2. blob      put or copied to its path, if it does not exist
        3. record    put-if-absent: this is the commit of a file. With conditions it is put in 4, once they hold
        4. index     rows for readers, the tag, and what `recorded` writes: one transaction. Files whose announcement
                     is gone start again
        5. clean up  delete the uploads

        Safe to repeat after a crash. A crash after 3 leaves a record without its row: the next put of the file, or a
        vacuum once the announcement has expired, does the rest. Raises QuotaExceeded, DatasetNotFound,
        PreconditionFailed and what `recorded` raises: then nothing is stored, except those of many files that were
        recorded before.
        """
        if not all(one.is_kept for one in staged):
            self.drop(staged)
            raise Unavailable("the bytes of the file were not stored: send it again", retry_after=1)
        records = [self._wanted(dataset, tenant, one) for one in staged]
        reserved = [one.reservation for one in staged if one.reservation is not None]
        done: dict[int, ArchiveFile] = {}
        try:
            for _ in range(TRIES):
                numbers = [number for number in range(len(staged)) if number not in done]
                if not numbers:
                    break
                done |= self._committed(dataset, tenant, staged, records, numbers, recorded, reserved)
            else:
                raise Unavailable("the same files are being deleted concurrently", retry_after=1)
        finally:
            self._delete_staged(staged)
            self._release(reserved)
        return [done[number] for number in range(len(staged))]

    def _committed(
        self,
        dataset: Dataset,
        tenant: TenantName,
        staged: Sequence[Staged],
        records: Sequence[ArchiveFile],
        numbers: Sequence[int],
        recorded: Recorded,
        reserved: list[str],
    ) -> dict[int, ArchiveFile]:
        """Do steps 1 to 4 for some files, and return the recorded ones. The first call empties `reserved`."""
        coming = [records[number] for number in numbers]
        checksums = [file.checksum for file in coming]
        with self._database.write() as connection:
            file_index.hold(self._database, connection, dataset, checksums)
            announced = file_index.announce(connection, self._settings, dataset, tenant, coming, reserved)
        reserved.clear()
        self._reached("announced")
        try:
            written = self._written(dataset, [staged[number] for number in numbers], coming)
            self._reached("written")
            done: dict[int, ArchiveFile] = {}
            with self._database.write() as connection:
                file_index.hold(self._database, connection, dataset, checksums, [file.path for file in coming])
                for position, number in enumerate(numbers):
                    if staged[number].new_file.conditions:
                        written[position] = self._put_if(
                            connection, dataset, staged[number].new_file, coming[position], announced
                        )
                updated = [
                    _with_new_fields(file, staged[number].new_file)
                    for number, file in zip(numbers, written, strict=True)
                ]
                recorded_ids = file_index.record_all(connection, dataset, dict(zip(announced, updated, strict=True)))
                for number, name, file, updated_file in zip(numbers, announced, written, updated, strict=True):
                    if name in recorded_ids:
                        if updated_file != file:
                            require_alive(connection)
                            self._store.put(dataset.layout.file_record(file.checksum, file.id), updated_file.to_json())
                        done[number] = updated_file
                if done:
                    recorded(connection, list(done.values()))
                    # Last, for the order of locks: `recorded` may lock rows that others lock before this tag.
                    file_index.touch_updated(connection, dataset)
            self._reached("recorded")
        except Exception:
            self._withdraw(dataset, announced, coming)
            raise
        return done

    def _withdraw(self, dataset: Dataset, announced: list[str], coming: Sequence[ArchiveFile]) -> None:
        """Withdraw announcements, and delete the records that were put for them and no other put needs."""
        try:
            with self._database.write() as connection:
                file_index.hold(self._database, connection, dataset, [file.checksum for file in coming])
                file_index.withdraw(connection, announced)
                unwanted = [
                    file for file in coming if not file_index.is_recorded_or_announced(connection, dataset, file.id)
                ]
                require_alive(connection)
                self._store.delete([dataset.layout.file_record(file.checksum, file.id) for file in unwanted])
        except TarnError as error:  # the announcement expires, and a vacuum finishes it
            log.warning(
                "cannot withdraw the announcement of a failed put; a vacuum will",
                dataset=dataset.name,
                problem=error.slug,
            )

    def _written(self, dataset: Dataset, staged: Sequence[Staged], records: Sequence[ArchiveFile]) -> list[ArchiveFile]:
        """Write blobs and records to their paths, and return the records that are stored now.

        All are written before the first is synced, which costs a disk little more than syncing one. No record is
        written before its blob is durable, and blobs that others have put are synced as well.
        """
        with ThreadPoolExecutor(min(WRITERS, len(staged)), thread_name_prefix="archive") as pool:
            self._store.sync(pool.map(lambda one: self._put_blob(dataset, one), staged))
            self._reached("placed")
            free = [file for one, file in zip(staged, records, strict=True) if not one.new_file.conditions]
            stored_records = list(pool.map(lambda file: self._put_record(dataset, file), free))
            self._store.sync(
                (dataset.layout.file_record(file.checksum, file.id) for file in stored_records), above=False
            )
        stored = {file.id: file for file in stored_records}
        return [stored.get(file.id, file) for file in records]

    def _put_if(
        self, connection: Connection, dataset: Dataset, new_file: NewFile, record: ArchiveFile, announced: Sequence[str]
    ) -> ArchiveFile:
        """Put the record of a file if its conditions hold, under the lock of its path, and return the stored record.

        A file that others have announced counts as soon as its record exists, even if the index lacks it: they or a
        vacuum will index it. Raises PreconditionFailed.
        """
        tags = [tag for file in file_index.at(connection, dataset, new_file.path) for tag in file.tags]
        for other in file_index.announced_for(connection, dataset, new_file.path, announced):
            file = self._record_at(dataset.layout.file_record(other.checksum, other.file_id))
            tags += [] if file is None else file.tags
        new_file.conditions.require(list(dict.fromkeys(tags)))
        require_alive(connection)
        file = self._put_record(dataset, record)
        self._store.sync([dataset.layout.file_record(file.checksum, file.id)], above=False)
        self._reached("put")
        return file

    def _put_blob(self, dataset: Dataset, staged: Staged) -> str:
        target = dataset.layout.blob_data(staged.checksum)
        with suppress(PathExists):
            if staged.data is not None:
                self._store.place(target, staged.data)
            elif self._store.head(target) is None:
                assert staged.upload_path is not None
                self._store.place_copy(staged.upload_path, target)
        return target

    def _put_record(self, dataset: Dataset, record: ArchiveFile) -> ArchiveFile:
        path = dataset.layout.file_record(record.checksum, record.id)
        try:
            self._store.place(path, record.to_json())
        except PathExists:
            if (existing := self._record_at(path)) is not None:
                return existing
            self._store.put(path, record.to_json())
        return record

    def _record_at(self, path: str) -> ArchiveFile | None:
        try:
            return ArchiveFile.model_validate_json(self._store.get(path))
        except (ObjectMissing, ValidationError):
            return None

    def _wanted(self, dataset: Dataset, tenant: TenantName, staged: Staged) -> ArchiveFile:
        path = staged.new_file.path
        return ArchiveFile(
            id=file_id(dataset.name, path, staged.checksum),
            checksum=staged.checksum,
            sha1=staged.sha1,
            path=path,
            name=path.name,
            size=staged.size,
            mime_type=staged.mime_type,
            created=now(),
            tenant=tenant,
            origin=staged.new_file.origin or DEFAULT_ORIGIN,
            meta=staged.new_file.meta or {},
        )

    # Reading and deleting

    def open(self, dataset: Dataset, checksum: Checksum, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Return the bytes of a content, from `start` up to `end`. Raises FileNotFound if it does not exist."""
        try:
            return self._store.open(dataset.layout.blob_data(checksum), start, end)[1]
        except ObjectMissing:
            raise FileNotFound(f"{dataset.name!r} has no file with the checksum {checksum}") from None

    def require(self, dataset: Dataset, new_file: NewFile) -> None:
        """Raise PreconditionFailed if a file's conditions do not hold now, before its bytes are received."""
        if not new_file.conditions:
            return
        with self._database.read() as connection:
            tags = [tag for file in file_index.at(connection, dataset, new_file.path) for tag in file.tags]
        new_file.conditions.require(tags)

    def delete(
        self,
        dataset: Dataset,
        checksum: Checksum,
        id: FileId,
        recorded: Callable[[Connection], None],
        conditions: Conditions = UNCONDITIONAL,
    ) -> None:
        """Delete a File record; a vacuum deletes the content once no other record refers to it. The texts of a content
        that no other file has are deleted at once, as they count against a quota.

        The record file is deleted in the transaction that removes it from the index: a crash in between leaves it in
        the index, and deleting it again succeeds. Raises FileNotFound, PreconditionFailed.
        """
        with self._database.write() as connection:
            file_index.hold(self._database, connection, dataset, [checksum])
            file = file_index.get(connection, dataset, checksum, id)
            file_index.hold(self._database, connection, dataset, [], [file.path])
            conditions.require(file.tags)
            file_index.forget(connection, dataset, file)
            deleted_texts = texts.forget(connection, dataset, file_index.unreferenced(connection, dataset, [checksum]))
            file_index.touch_updated(connection, dataset)
            recorded(connection)
            require_alive(connection)
            paths = [dataset.layout.text(checksum, text.origin) for text in deleted_texts]
            self._store.delete([*paths, dataset.layout.file_record(checksum, id)])

    # Texts

    def stage_text(
        self,
        dataset: Dataset,
        origin: Origin,
        chunks: Iterable[bytes],
        reservation: Reservation | None = None,
        keep: bool = True,
    ) -> Staged:
        """Receive the bytes of a text, which may be empty. Raises BodyTooLarge, SchemaViolation if it is not UTF-8."""
        return self.stage(dataset, NewFile(path=FilePath(f"{origin}.txt")), _utf8(chunks), reservation, keep)

    def text_reservation(self, dataset: Dataset, tenant: TenantName, checksum: Checksum, origin: Origin) -> Reservation:
        """Return a reservation for a text: it counts only the bytes beyond those of the tenant's own text that it
        replaces."""
        with self._database.read() as connection:
            old = texts.find(connection, dataset, checksum, origin)
        replaced = old.size if old is not None and old.tenant == tenant else 0
        return Reservation(self._database, self._settings, dataset, tenant, replaced)

    def put_text(
        self,
        dataset: Dataset,
        tenant: TenantName,
        checksum: Checksum,
        origin: Origin,
        staged: Staged,
        recorded: Callable[[Connection], None],
    ) -> None:
        """Store the text that an origin extracted from a content, in place of the former one. It counts against the
        quota of the tenant that puts it, and the former one no more. Raises FileNotFound, QuotaExceeded.

        It is put in the transaction that records it, under the lock of the checksum: a vacuum that collects the content
        deletes all of its texts or none.
        """
        target = dataset.layout.text(checksum, origin)
        new = CountedText(checksum, origin, tenant, staged.size)
        reserved = [] if staged.reservation is None else [staged.reservation]
        try:
            if not staged.is_kept:
                raise Unavailable("the bytes of the text were not stored: send it again", retry_after=1)
            with self._database.write() as connection:
                file_index.hold(self._database, connection, dataset, [checksum])
                file_index.first_of(connection, dataset, checksum)
                file_index.withdraw(connection, reserved)
                texts.replace(connection, self._settings, dataset, new)
                file_index.touch_updated(connection, dataset)
                recorded(connection)
                require_alive(connection)
                if staged.data is not None:
                    self._store.put(target, staged.data)
                else:
                    assert staged.upload_path is not None
                    self._store.copy(staged.upload_path, target)
            reserved.clear()
        finally:
            self._delete_staged([staged])
            self._release(reserved)

    def delete_text(
        self, dataset: Dataset, checksum: Checksum, origin: Origin, recorded: Callable[[Connection], None]
    ) -> None:
        """Delete the text that an origin extracted from a content, and release its bytes. Raises FileNotFound.

        The object is deleted before the transaction commits, as in `delete`: a crash in between leaves it counted, and
        deleting it again succeeds.
        """
        target = dataset.layout.text(checksum, origin)
        with self._database.write() as connection:
            file_index.hold(self._database, connection, dataset, [checksum])
            file_index.first_of(connection, dataset, checksum)
            deleted_texts = texts.forget(connection, dataset, [checksum], origin)
            if not deleted_texts and self._store.head(target) is None:
                raise FileNotFound(f"there is no text of {checksum} from the origin {origin!r}")
            file_index.touch_updated(connection, dataset)
            recorded(connection)
            require_alive(connection)
            self._store.delete([target])


class _Digest:
    """Computes checksums, size and first bytes of a file while its chunks are passed on."""

    def __init__(self, limit: int) -> None:
        self.sha256 = hashlib.sha256()
        self.sha1 = hashlib.sha1(usedforsecurity=False)
        self.size = 0
        self.head = b""
        self.over = False
        self._limit = limit

    def each(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.size += len(chunk)
            if self.size > self._limit:
                raise BodyTooLarge(f"the file is larger than {self._limit} bytes", limit=self._limit)
            if len(self.head) < HEAD:
                self.head += chunk[: HEAD - len(self.head)]
            self.sha256.update(chunk)
            self.sha1.update(chunk)
            yield chunk
        self.over = True


def _gathered(chunks: Iterator[bytes], most: int) -> list[bytes]:
    """Read chunks until they exceed so many bytes, or until the end."""
    gathered, size = [], 0
    for chunk in chunks:
        gathered.append(chunk)
        size += len(chunk)
        if size > most:
            break
    return gathered


def _require(staged: Staged) -> None:
    expected = staged.new_file.checksum
    if expected is not None and expected != staged.checksum:
        reason = f"is {expected}, but the received bytes have {staged.checksum}"
        raise SchemaViolation(f"the checksum {reason}", errors=[FieldError(field="checksum", reason=reason)])


def _with_new_fields(file: ArchiveFile, new_file: NewFile) -> ArchiveFile:
    """Return a record with the fields that the sender sets now; the others stay."""
    update = {"origin": new_file.origin, "meta": new_file.meta}
    return file.model_copy(update={name: value for name, value in update.items() if value is not None})


def _utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a text. Raises SchemaViolation if they are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
            yield chunk
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason}"
        raise SchemaViolation(f"the text {reason}", errors=[FieldError(reason=reason)]) from None
