"""Bytes that arrive are counted against the quota before they are written, and given back when they do not stay."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
from sqlalchemy import text, update
from tarn.archive import file_index as records
from tarn.archive.dataset_removal import remove_files
from tarn.archive.files import SMALL, Archive
from tarn.archive.reservations import BlockReservation, Reservation
from tarn.archive.uploads import Uploads
from tarn.db.tables import file_puts
from tarn.errors import DatasetNotFound, QuotaExceeded
from tarn.integrity.archive_vacuum import Collector
from tarn.model.ids import now
from tarn.model.names import Checksum, Origin
from tarn.model.tenant import ADMIN
from tarn.model.upload import NewUpload

from tests.archive.dataset_archive import DatasetArchive, new_file, traces
from tests.in_process_api import ONE_DATABASE

OCR = Origin("ocr")
BLOCK = bytes(1 << 18)
ROOM = 2 * SMALL


class CountingBody:
    """A body of so many blocks, which counts those that were taken."""

    def __init__(self, blocks: int, at: Callable[[int], None] = lambda _: None) -> None:
        self.blocks, self.taken, self.at = blocks, 0, at

    def __iter__(self) -> Iterator[bytes]:
        for number in range(self.blocks):
            self.at(number)
            self.taken += 1
            yield BLOCK


def put(desk: DatasetArchive, archive: Archive, path: str, body: Any) -> Any:
    return archive.put(desk.dataset, ADMIN, new_file(path), body)


def put_text(desk: DatasetArchive, archive: Archive, checksum: Checksum, content: bytes, origin: Origin = OCR) -> None:
    reservation = archive.text_reservation(desk.dataset, ADMIN, checksum, origin)
    reservation.declare(len(content))
    staged = archive.stage_text(desk.dataset, origin, [content], reservation)
    archive.put_text(desk.dataset, ADMIN, checksum, origin, staged, lambda _: None)


def reserved(desk: DatasetArchive, **changes: Any) -> Reservation:
    return Reservation(desk.database, desk.settings.model_copy(update=changes), desk.dataset, ADMIN)


@ONE_DATABASE
def test_body_over_the_quota_is_stopped_after_the_first_block_beyond_it(desk: DatasetArchive):
    body = CountingBody(1000)

    with pytest.raises(QuotaExceeded):
        put(desk, desk.archive(quota_bytes=ROOM), "a", body)

    assert body.taken == ROOM // len(BLOCK) + 1
    assert (desk.stored(), desk.used(), desk.announced()) == ([], 0, 0)


@ONE_DATABASE
def test_body_that_fits_the_quota_to_the_byte_is_taken(desk: DatasetArchive):
    file = put(desk, desk.archive(quota_bytes=ROOM), "a", CountingBody(ROOM // len(BLOCK)))

    assert (desk.used(), desk.announced(), desk.stored()) == (ROOM, 0, traces(file))


@ONE_DATABASE
def test_body_that_is_said_to_be_too_large_is_not_begun(desk: DatasetArchive):
    reservation = reserved(desk, quota_bytes=100)

    with pytest.raises(QuotaExceeded, match="may keep None statements and 100 bytes, has 0 and 0, and asked for 0 and"):
        reservation.declare(101)
    reservation.declare(100)

    assert (desk.used(), desk.announced(), reservation.is_held) == (0, 0, False)


def test_bodies_at_once_are_together_never_more_than_the_quota(desk: DatasetArchive):
    """Each would fit alone, and all have begun before the first reserves anything."""
    bodies, blocks = 6, 2 * SMALL // len(BLOCK)
    quota = 3 * blocks * len(BLOCK)
    meeting = threading.Barrier(bodies)
    seen: list[int] = []

    def halfway(number: int) -> None:
        if number == SMALL // len(BLOCK) - 1:  # the last before anything is reserved
            meeting.wait(60)
        seen.append(desk.used())

    def one(number: int) -> bool:
        try:
            put(
                desk,
                desk.archive(quota_bytes=quota),
                f"{number}",
                chain([b"%d" % number], CountingBody(blocks - 1, halfway)),
            )
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(bodies) as pool:
        taken = sum(pool.map(one, range(bodies)))

    assert max(seen) <= quota
    # Bodies that do not say how large they are may keep each other out, even all of them.
    assert taken <= 3
    assert (desk.used(), desk.announced()) == (sum(file.size for file in desk.files()), 0)


@ONE_DATABASE
def test_reservation_of_a_process_that_died_is_given_back_by_a_vacuum(desk: DatasetArchive):
    reserved(desk, quota_bytes=1 << 30).declare(5 << 20)
    assert (desk.used(), desk.announced()) == (5 << 20, 1)
    with desk.database.write() as connection:
        connection.execute(update(file_puts).values(expires=now() - timedelta(seconds=1)))

    list(Collector(desk.database, desk.store, desk.settings).run(desk.dataset, now()))

    assert (desk.used(), desk.announced()) == (0, 0)


@ONE_DATABASE
def test_body_whose_reservation_expired_meanwhile_is_counted_anew(desk: DatasetArchive):
    def expire(number: int) -> None:
        if number == 8:
            with desk.database.write() as connection:
                connection.execute(update(file_puts).values(expires=now() - timedelta(seconds=1)))
            list(Collector(desk.database, desk.store, desk.settings).run(desk.dataset, now()))
            assert desk.used() == 0

    file = put(desk, desk.archive(quota_bytes=1 << 30), "a", CountingBody(60, expire))

    assert (desk.used(), desk.announced()) == (file.size, 0)


@ONE_DATABASE
def test_body_for_a_dataset_that_is_deleted_meanwhile_reserves_nothing(desk: DatasetArchive):
    def delete(number: int) -> None:
        if number == 6:
            with desk.database.write() as connection:
                connection.execute(text("UPDATE datasets SET state = 'deleting'"))
            remove_files(desk.database, desk.dataset.id, lambda *_: None)

    with pytest.raises(DatasetNotFound):
        put(desk, desk.archive(quota_bytes=1 << 30), "a", CountingBody(60, delete))

    assert (desk.used(), desk.announced()) == (0, 0)


@ONE_DATABASE
def test_without_a_quota_nothing_is_reserved(desk: DatasetArchive):
    seen: list[int] = []

    put(desk, desk.archive(), "a", CountingBody(20, lambda _: seen.append(desk.announced())))

    assert set(seen) == {0}


# Texts


def test_texts_count_against_the_quota_and_replacing_one_counts_the_difference(desk: DatasetArchive):
    archive = desk.archive(quota_bytes=1000)
    file = put(desk, archive, "a", [b"x" * 100])

    put_text(desk, archive, file.checksum, b"x" * 600)
    assert desk.used() == 700
    put_text(desk, archive, file.checksum, b"x" * 900)
    assert desk.used() == 1000
    with pytest.raises(QuotaExceeded):
        put_text(desk, archive, file.checksum, b"x" * 901)
    with pytest.raises(QuotaExceeded):
        put_text(desk, archive, file.checksum, b"x", Origin("other"))
    put_text(desk, archive, file.checksum, b"x" * 10)
    assert desk.used() == 110

    archive.delete_text(desk.dataset, file.checksum, OCR, lambda _: None)
    assert (desk.used(), desk.stored()) == (100, traces(file))


@ONE_DATABASE
def test_large_text_replaces_another_in_the_room_of_both(desk: DatasetArchive):
    archive = desk.archive(quota_bytes=5 * SMALL)
    file = put(desk, archive, "a", [b"x"])
    put_text(desk, archive, file.checksum, b"x" * 4 * SMALL)

    put_text(desk, archive, file.checksum, b"y" * (5 * SMALL - 1))

    assert (desk.used(), desk.announced()) == (5 * SMALL, 0)
    with pytest.raises(QuotaExceeded):
        put_text(desk, archive, file.checksum, b"z" * 5 * SMALL)
    assert (desk.used(), desk.announced()) == (5 * SMALL, 0)
    assert desk.store.get(desk.dataset.layout.text(file.checksum, OCR))[:1] == b"y"


@ONE_DATABASE
def test_texts_at_once_are_together_never_more_than_the_quota(desk: DatasetArchive):
    archive = desk.archive(quota_bytes=1000)
    file = put(desk, archive, "a", [b""])

    def one(number: int) -> bool:
        try:
            put_text(desk, archive, file.checksum, b"x" * 300, Origin(f"o{number}"))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(8))) == 3
    assert (desk.used(), desk.announced()) == (900, 0)


def test_dataset_that_is_removed_gives_the_bytes_of_its_texts_back(desk: DatasetArchive):
    archive = desk.archive()
    file = put(desk, archive, "a", [b"content"])
    for number in range(3):
        put_text(desk, archive, file.checksum, b"text", Origin(f"o{number}"))
    with desk.database.write() as connection:
        connection.execute(text("UPDATE datasets SET state = 'deleting'"))

    remove_files(desk.database, desk.dataset.id, lambda *_: None)

    assert desk.used() == 0
    with desk.database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM file_texts")).scalar_one() == 0


# Uploads


def uploader(desk: DatasetArchive, **changes: Any) -> Uploads:
    settings = desk.settings.model_copy(update=changes)
    return Uploads(desk.database, desk.store, settings, desk.archive(**changes))


def begin(desk: DatasetArchive, uploads: Uploads, length: int, path: str = "a") -> str:
    with desk.database.write() as connection:
        new = NewUpload(length=length, path=path)
        return uploads.create(connection, desk.dataset, ADMIN, new_file(path).path, new).id


def block(
    desk: DatasetArchive, uploads: Uploads, upload: str, offset: int, body: Any, declared: int | None = None
) -> None:
    reservation: BlockReservation = uploads.reservation(desk.dataset, ADMIN, upload)
    try:
        reservation.declare(declared)
        uploads.put_block(desk.dataset, ADMIN, upload, offset, body, reservation=reservation)
    except BaseException:
        reservation.release()
        raise


def test_upload_reserves_its_length_from_its_beginning_to_its_commit(desk: DatasetArchive):
    length = 4 * SMALL
    uploads = uploader(desk, quota_bytes=length)
    upload = begin(desk, uploads, length)

    with pytest.raises(QuotaExceeded):
        put(desk, desk.archive(quota_bytes=length), "other", [b"x"])
    block(desk, uploads, upload, 0, CountingBody(8), 2 * SMALL)
    block(desk, uploads, upload, 2 * SMALL, CountingBody(8))
    assert (desk.used(), desk.announced()) == (length, 1)

    uploads.commit(desk.dataset, ADMIN, upload)

    assert (desk.used(), desk.announced()) == (length, 0)


@ONE_DATABASE
def test_blocks_at_once_of_the_same_bytes_are_together_never_more_than_the_quota(desk: DatasetArchive):
    length = 4 * SMALL
    uploads = uploader(desk, quota_bytes=length)
    upload = begin(desk, uploads, length)
    meeting = threading.Barrier(2)
    refused: list[int] = []

    def wait(number: int) -> None:
        if number == 15:
            meeting.wait(60)
            meeting.wait(60)

    def other() -> None:
        meeting.wait(60)
        body = CountingBody(16)
        with pytest.raises(QuotaExceeded):
            block(desk, uploads, upload, 0, body, length)
        refused.append(body.taken)
        with pytest.raises(QuotaExceeded):
            block(desk, uploads, upload, 0, body)
        refused.append(body.taken)
        assert desk.used() == length
        meeting.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(block, desk, uploads, upload, 0, CountingBody(16, wait), length), pool.submit(other)
        second.result(120)
        first.result(120)

    assert refused == [0, SMALL // len(BLOCK) + 1]
    uploads.commit(desk.dataset, ADMIN, upload)
    assert (desk.used(), desk.announced()) == (length, 0)


@ONE_DATABASE
def test_upload_that_is_given_up_or_fails_to_commit_keeps_the_count_right(desk: DatasetArchive):
    uploads = uploader(desk, quota_bytes=100)
    upload = begin(desk, uploads, 60)
    assert desk.used() == 60
    uploads.abort(desk.dataset, ADMIN, upload, lambda _: None)
    assert (desk.used(), desk.announced()) == (0, 0)

    with desk.database.write() as connection:
        new = NewUpload(length=60, path="a", checksum=Checksum("1" * 64))
        upload = uploads.create(connection, desk.dataset, ADMIN, new_file("a").path, new).id
    block(desk, uploads, upload, 0, [b"x" * 60])
    with pytest.raises(Exception, match="checksum"):
        uploads.commit(desk.dataset, ADMIN, upload)
    assert (desk.used(), desk.announced()) == (60, 1)


@ONE_DATABASE
def test_upload_that_an_earlier_version_began_counts_though_it_reserved_nothing(desk: DatasetArchive):
    uploads = uploader(desk, quota_bytes=100)
    upload = begin(desk, uploads, 60)
    with desk.database.write() as connection:
        records.withdraw(connection, [upload])

    with pytest.raises(QuotaExceeded):
        begin(desk, uploads, 41, "b")
    block(desk, uploads, upload, 0, [b"x" * 60])
    uploads.commit(desk.dataset, ADMIN, upload)

    assert (desk.used(), desk.announced()) == (60, 0)
