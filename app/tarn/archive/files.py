"""The archive: every content is stored once, under its SHA-256, and has a File record for each path it came from.

Bytes pass once: they are hashed while they are written to `uploads/`, and the object is copied to its place when its
name is known. A file that fits in one chunk is kept in memory instead, and written to its place at once.
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

from tarn.archive import file_index as records
from tarn.archive import texts
from tarn.archive.mime import HEAD, mime_type
from tarn.archive.reservations import UNRESERVED, Reservation
from tarn.archive.texts import CountedText
from tarn.datasets.documents import require_alive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import BodyTooLarge, Fault, FileNotFound, PathExists, SchemaViolation, TarnError, Unavailable
from tarn.journal.event_chunks import DEFAULT_ORIGIN
from tarn.model.file import ArchiveFile, NewFile, file_id
from tarn.model.ids import new_id, now
from tarn.model.names import Checksum, FileId, FilePath, Origin, TenantName
from tarn.model.preconditions import Conditions
from tarn.settings import Settings
from tarn.storage.store import Missing, Store

log = structlog.get_logger(__name__)

SMALL = UNRESERVED
"""Bytes of a file that is kept in memory until its checksum is known."""

TRIES = 5
"""How often a put begins again that others overtake, by deleting the same file each time."""

WRITERS = 8
"""Files of one commit that are written at once."""

DATA = "data"
"""What an upload's object is called."""

UNCONDITIONAL = Conditions()

Recorded = Callable[[Connection, list[ArchiveFile]], None]
"""Is told of files in the transaction that records them, and may write more in it."""

Reached = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that has arrived and is not in the archive yet."""

    said: NewFile
    checksum: Checksum
    sha1: str
    size: int
    mime_type: str
    data: bytes | None = field(repr=False)
    """All of it, if that is little."""
    place: str | None
    """Where it waits, if it is not."""
    reservation: str | None = None
    """What is counted against the quota for it until it is committed."""

    @property
    def is_kept(self) -> bool:
        """Whether its bytes are there, and not only known by their checksum."""
        return self.data is not None or self.place is not None


class Archive:
    """Puts files into datasets' archives, and takes them out."""

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
        said: NewFile,
        chunks: Iterable[bytes],
        recorded: Recorded = lambda *_: None,
        reservation: str | None = None,
    ) -> ArchiveFile:
        """Put a file, and return its record: the one that is there, if this content was at this path before.

        A file may have no bytes. Raises BodyTooLarge, SchemaViolation for another checksum than was said,
        QuotaExceeded, DatasetNotFound, PreconditionFailed, and whatever `chunks` raises; then nothing is stored.

        With a reservation that the caller made, which the file takes the place of, no other is made.
        """
        room = None if reservation is not None else self.reservation(dataset, tenant)
        staged = self.stage(dataset, said, chunks, room)
        if reservation is not None:
            staged = replace(staged, reservation=reservation)
        return self.commit(dataset, tenant, [staged], recorded)[0]

    def reservation(self, dataset: Dataset, tenant: TenantName) -> Reservation:
        """What counts the bytes of one body against its tenant's quota while it arrives."""
        return Reservation(self._database, self._settings, dataset, tenant)

    def stage(
        self,
        dataset: Dataset,
        said: NewFile,
        chunks: Iterable[bytes],
        reservation: Reservation | None = None,
        keep: bool = True,
    ) -> Staged:
        """Take a file's bytes. Whoever stages it commits or drops it; what nobody does, a vacuum sweeps.

        With a reservation they are counted as they arrive, and released if this fails. Without `keep` they are hashed
        and not stored: to find out whether a file is known, when it must not be put. Raises what `put` does but for
        dataset.
        """
        try:
            return self._stage(dataset, said, chunks, reservation, keep)
        except BaseException:
            if reservation is not None:
                reservation.release()
            raise

    def _stage(
        self, dataset: Dataset, said: NewFile, chunks: Iterable[bytes], reservation: Reservation | None, keep: bool
    ) -> Staged:
        passing = _Digest(self._settings.max_file_bytes)
        left = passing.each(chunks if reservation is None else reservation.each(chunks))
        first, data = _gathered(left, SMALL), None
        place = None
        if not keep:
            for _ in left:
                pass
        elif passing.over:
            data = b"".join(first)
        else:
            place = dataset.layout.upload_part(new_id(), DATA)
            self._store.put_stream(place, chain(first, left))
        staged = Staged(
            said,
            Checksum(passing.sha256.hexdigest()),
            passing.sha1.hexdigest(),
            passing.size,
            mime_type(said.path.name, passing.head),
            data,
            place,
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
        """Give up what was staged. Whether that works changes nothing: a vacuum would take it."""
        dropped = list(staged)
        self._delete_staged(dropped)
        self._release([one.reservation for one in dropped if one.reservation is not None])

    def _release(self, reservations: Sequence[str]) -> None:
        if not reservations:
            return
        try:
            with self._database.write() as connection:
                records.withdraw(connection, reservations)
        except TarnError as error:
            log.warning("reserved bytes are left to expire", problem=error.slug)

    def _delete_staged(self, staged: Iterable[Staged]) -> None:
        places = [one.place for one in staged if one.place is not None]
        try:
            self._store.delete(places)
        except TarnError as error:
            log.warning("an upload is left to the vacuum", place=places[0], problem=error.slug)

    def commit(
        self,
        dataset: Dataset,
        tenant: TenantName,
        staged: Sequence[Staged],
        recorded: Recorded = lambda *_: None,
    ) -> list[ArchiveFile]:
        """Put what was staged into the archive, all in the same few transactions; the records, in their order.

        1. announce  from here on nobody collects the blobs. Quota is taken, in the place of what was reserved
        2. blob      put or copied to its place, if nothing is there
        3. record    put-if-absent: this is the commit of a file. With conditions it is put in 4, once they hold
        4. index     rows for readers, the tag, and what `recorded` writes: one transaction. Files whose announcement
                     is gone begin again
        5. tidy      delete the uploads

        Run again after a crash it ends the same. A crash after 3 leaves a record without its row: the next put of the
        file, or a vacuum once the announcement has expired, does the rest. Raises QuotaExceeded, DatasetNotFound,
        PreconditionFailed and what `recorded` raises: then nothing of it is left, but for those files of many that were
        recorded before.
        """
        if not all(one.is_kept for one in staged):
            self.drop(staged)
            raise Unavailable("the bytes of the file were not kept: send it again", retry_after=1)
        wanted = [self._wanted(dataset, tenant, one) for one in staged]
        reserved = [one.reservation for one in staged if one.reservation is not None]
        done: dict[int, ArchiveFile] = {}
        try:
            for _ in range(TRIES):
                left = [number for number in range(len(staged)) if number not in done]
                if not left:
                    break
                done |= self._committed(dataset, tenant, staged, wanted, left, recorded, reserved)
            else:
                raise Unavailable("the same files are deleted as fast as they are put", retry_after=1)
        finally:
            self._delete_staged(staged)
            self._release(reserved)
        return [done[number] for number in range(len(staged))]

    def _committed(
        self,
        dataset: Dataset,
        tenant: TenantName,
        staged: Sequence[Staged],
        wanted: Sequence[ArchiveFile],
        left: Sequence[int],
        recorded: Recorded,
        reserved: list[str],
    ) -> dict[int, ArchiveFile]:
        """Steps 1 to 4 for some of the files; those that were not overtaken. `reserved` is used up by the first."""
        coming = [wanted[number] for number in left]
        checksums = [file.checksum for file in coming]
        with self._database.write() as connection:
            records.hold(self._database, connection, dataset, checksums)
            announced = records.announce(connection, self._settings, dataset, tenant, coming, reserved)
        reserved.clear()
        self._reached("announced")
        try:
            written = self._written(dataset, [staged[number] for number in left], coming)
            self._reached("written")
            done: dict[int, ArchiveFile] = {}
            with self._database.write() as connection:
                records.hold(self._database, connection, dataset, checksums, [file.path for file in coming])
                for place, number in enumerate(left):
                    if staged[number].said.conditions:
                        written[place] = self._put_if(
                            connection, dataset, staged[number].said, coming[place], announced
                        )
                said = [_with_new_fields(file, staged[number].said) for number, file in zip(left, written, strict=True)]
                kept = records.record_all(connection, dataset, dict(zip(announced, said, strict=True)))
                for number, name, file, now_said in zip(left, announced, written, said, strict=True):
                    if name in kept:
                        if now_said != file:
                            require_alive(connection)
                            self._store.put(dataset.layout.file_record(file.checksum, file.id), now_said.to_json())
                        done[number] = now_said
                if done:
                    recorded(connection, list(done.values()))
                    # Last: what `recorded` writes may lock what others lock before this tag.
                    records.touch_updated(connection, dataset)
            self._reached("recorded")
        except Exception:
            self._withdraw(dataset, announced, coming)
            raise
        return done

    def _withdraw(self, dataset: Dataset, announced: list[str], coming: Sequence[ArchiveFile]) -> None:
        """Take back what was announced, and the records that were put for it and nobody else wants."""
        try:
            with self._database.write() as connection:
                records.hold(self._database, connection, dataset, [file.checksum for file in coming])
                records.withdraw(connection, announced)
                unwanted = [
                    file for file in coming if not records.is_recorded_or_announced(connection, dataset, file.id)
                ]
                require_alive(connection)
                self._store.delete([dataset.layout.file_record(file.checksum, file.id) for file in unwanted])
        except TarnError as error:  # it expires, and then a vacuum finishes it
            log.warning("a put that failed is still announced", dataset=dataset.name, problem=error.slug)

    def _written(self, dataset: Dataset, staged: Sequence[Staged], wanted: Sequence[ArchiveFile]) -> list[ArchiveFile]:
        """Blobs and records put where they belong; the records that are there now.

        All are written before the first of them is synced, which costs a disk not much more than one. No record is
        written before its blob is safe, and what others have put is not taken for safe.
        """
        with ThreadPoolExecutor(min(WRITERS, len(staged)), thread_name_prefix="archive") as pool:
            self._store.sync(pool.map(lambda one: self._put_blob(dataset, one), staged))
            self._reached("placed")
            free = [file for one, file in zip(staged, wanted, strict=True) if not one.said.conditions]
            put = list(pool.map(lambda file: self._put_record(dataset, file), free))
            self._store.sync((dataset.layout.file_record(file.checksum, file.id) for file in put), above=False)
        there = {file.id: file for file in put}
        return [there.get(file.id, file) for file in wanted]

    def _put_if(
        self, connection: Connection, dataset: Dataset, said: NewFile, wanted: ArchiveFile, announced: Sequence[str]
    ) -> ArchiveFile:
        """Put the record of a file if its conditions hold, while its path is held; the record that is there now.

        A file that others have announced is there once its record is, though the index lacks it: it will be recorded,
        by them or by a vacuum. Raises PreconditionFailed.
        """
        tags = [tag for file in records.at(connection, dataset, said.path) for tag in file.tags]
        for other in records.announced_for(connection, dataset, said.path, announced):
            file = self._record_at(dataset.layout.file_record(other.checksum, other.file_id))
            tags += [] if file is None else file.tags
        said.conditions.require(list(dict.fromkeys(tags)))
        require_alive(connection)
        file = self._put_record(dataset, wanted)
        self._store.sync([dataset.layout.file_record(file.checksum, file.id)], above=False)
        self._reached("put")
        return file

    def _put_blob(self, dataset: Dataset, staged: Staged) -> str:
        target = dataset.layout.blob_data(staged.checksum)
        with suppress(PathExists):
            if staged.data is not None:
                self._store.place(target, staged.data)
            elif self._store.head(target) is None:
                assert staged.place is not None
                self._store.place_copy(staged.place, target)
        return target

    def _put_record(self, dataset: Dataset, wanted: ArchiveFile) -> ArchiveFile:
        path = dataset.layout.file_record(wanted.checksum, wanted.id)
        try:
            self._store.place(path, wanted.to_json())
        except PathExists:
            if (found := self._record_at(path)) is not None:
                return found
            self._store.put(path, wanted.to_json())
        return wanted

    def _record_at(self, path: str) -> ArchiveFile | None:
        try:
            return ArchiveFile.model_validate_json(self._store.get(path))
        except (Missing, ValidationError):
            return None

    def _wanted(self, dataset: Dataset, tenant: TenantName, staged: Staged) -> ArchiveFile:
        path = staged.said.path
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
            origin=staged.said.origin or DEFAULT_ORIGIN,
            meta=staged.said.meta or {},
        )

    # Taking out

    def open(self, dataset: Dataset, checksum: Checksum, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of a content, from `start` up to `end`. Raises FileNotFound if it is not there."""
        try:
            return self._store.open(dataset.layout.blob_data(checksum), start, end)[1]
        except Missing:
            raise FileNotFound(f"{dataset.name!r} has no file with the checksum {checksum}") from None

    def require(self, dataset: Dataset, said: NewFile) -> None:
        """Raise PreconditionFailed if a file's conditions do not hold now, which saves its bytes the way."""
        if not said.conditions:
            return
        with self._database.read() as connection:
            tags = [tag for file in records.at(connection, dataset, said.path) for tag in file.tags]
        said.conditions.require(tags)

    def delete(
        self,
        dataset: Dataset,
        checksum: Checksum,
        id: FileId,
        recorded: Callable[[Connection], None],
        conditions: Conditions = UNCONDITIONAL,
    ) -> None:
        """Delete a File record; the content stays until a vacuum finds that no other refers to it. The texts of a
        content that no other file has are deleted, too, as they count against a quota.

        The record goes first, in the transaction that takes it out of the index: a crash between the two leaves it in
        the index, and deleting it again ends the same. Raises FileNotFound, PreconditionFailed.
        """
        with self._database.write() as connection:
            records.hold(self._database, connection, dataset, [checksum])
            file = records.get(connection, dataset, checksum, id)
            records.hold(self._database, connection, dataset, [], [file.path])
            conditions.require(file.tags)
            records.forget(connection, dataset, file)
            gone = texts.forget(connection, dataset, records.unreferenced(connection, dataset, [checksum]))
            records.touch_updated(connection, dataset)
            recorded(connection)
            require_alive(connection)
            places = [dataset.layout.text(checksum, text.origin) for text in gone]
            self._store.delete([*places, dataset.layout.file_record(checksum, id)])

    # Texts

    def stage_text(
        self,
        dataset: Dataset,
        origin: Origin,
        chunks: Iterable[bytes],
        reservation: Reservation | None = None,
        keep: bool = True,
    ) -> Staged:
        """Take the bytes of a text, which may be empty. Raises BodyTooLarge, SchemaViolation for what is not UTF-8."""
        return self.stage(dataset, NewFile(path=FilePath(f"{origin}.txt")), _utf8(chunks), reservation, keep)

    def text_reservation(self, dataset: Dataset, tenant: TenantName, checksum: Checksum, origin: Origin) -> Reservation:
        """What counts the bytes of a text while it arrives: those by which it is larger than the tenant's own text that
        it replaces."""
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
        """Keep the text that an origin extracted from a content, in the place of the one before. It counts against the
        quota of who puts it, and the one before no more. Raises FileNotFound, QuotaExceeded.

        It is put in the transaction that tells of it, under the lock of the checksum: a vacuum that collects the
        content takes its texts too, or none.
        """
        target = dataset.layout.text(checksum, origin)
        new = CountedText(checksum, origin, tenant, staged.size)
        reserved = [] if staged.reservation is None else [staged.reservation]
        try:
            if not staged.is_kept:
                raise Unavailable("the bytes of the text were not kept: send it again", retry_after=1)
            with self._database.write() as connection:
                records.hold(self._database, connection, dataset, [checksum])
                records.first_of(connection, dataset, checksum)
                records.withdraw(connection, reserved)
                texts.replace(connection, self._settings, dataset, new)
                records.touch_updated(connection, dataset)
                recorded(connection)
                require_alive(connection)
                if staged.data is not None:
                    self._store.put(target, staged.data)
                else:
                    assert staged.place is not None
                    self._store.copy(staged.place, target)
            reserved.clear()
        finally:
            self._delete_staged([staged])
            self._release(reserved)

    def delete_text(
        self, dataset: Dataset, checksum: Checksum, origin: Origin, recorded: Callable[[Connection], None]
    ) -> None:
        """Delete the text that an origin extracted from a content, and give its bytes back. Raises FileNotFound.

        The object goes first, as in `delete`: a crash between the two leaves it counted, and deleting it again ends the
        same.
        """
        target = dataset.layout.text(checksum, origin)
        with self._database.write() as connection:
            records.hold(self._database, connection, dataset, [checksum])
            records.first_of(connection, dataset, checksum)
            gone = texts.forget(connection, dataset, [checksum], origin)
            if not gone and self._store.head(target) is None:
                raise FileNotFound(f"there is no text of {checksum} by {origin!r}")
            records.touch_updated(connection, dataset)
            recorded(connection)
            require_alive(connection)
            self._store.delete([target])


class _Digest:
    """What becomes known of bytes while they pass."""

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
    """Chunks until they are more than so many bytes, or until there are none left."""
    gathered, size = [], 0
    for chunk in chunks:
        gathered.append(chunk)
        size += len(chunk)
        if size > most:
            break
    return gathered


def _require(staged: Staged) -> None:
    expected = staged.said.checksum
    if expected is not None and expected != staged.checksum:
        reason = f"is {expected}, and what arrived has {staged.checksum}"
        raise SchemaViolation(f"the checksum {reason}", errors=[Fault(field="checksum", reason=reason)])


def _with_new_fields(file: ArchiveFile, said: NewFile) -> ArchiveFile:
    """A record with what a sender says now; what it does not say stays."""
    update = {"origin": said.origin, "meta": said.meta}
    return file.model_copy(update={name: value for name, value in update.items() if value is not None})


def _utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks of a text. Raises SchemaViolation if they are none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
            yield chunk
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason}"
        raise SchemaViolation(f"the text {reason}", errors=[Fault(reason=reason)]) from None
