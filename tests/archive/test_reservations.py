"""Byte quota: bytes are reserved before they are written, and released if the file is not stored."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
from sqlalchemy import text, update
from tarn.archive import file_index
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

from tests.archive.dataset_archive import ACT, DatasetArchive, new_file, traces
from tests.in_process_api import ONE_DATABASE

pytestmark = pytest.mark.both_databases

OCR = Origin("ocr")
BLOCK = bytes(1 << 18)
ROOM = 2 * SMALL


class CountingBody:
    """A body of a number of blocks, which counts those that were read."""

    def __init__(self, blocks: int, at: Callable[[int], None] = lambda _: None) -> None:
        self.blocks, self.blocks_read, self.at = blocks, 0, at

    def __iter__(self) -> Iterator[bytes]:
        for number in range(self.blocks):
            self.at(number)
            self.blocks_read += 1
            yield BLOCK


def put(dataset_archive: DatasetArchive, archive: Archive, path: str, body: Any) -> Any:
    return archive.put(dataset_archive.dataset, ADMIN, new_file(path), body)


def put_text(
    dataset_archive: DatasetArchive, archive: Archive, checksum: Checksum, content: bytes, origin: Origin = OCR
) -> None:
    reservation = archive.text_reservation(dataset_archive.dataset, ADMIN, checksum, origin)
    reservation.declare(len(content))
    staged = archive.stage_text(dataset_archive.dataset, origin, [content], reservation)
    archive.put_text(dataset_archive.dataset, ADMIN, checksum, origin, staged, lambda _: None)


def reserved(dataset_archive: DatasetArchive, **changes: Any) -> Reservation:
    return Reservation(
        dataset_archive.database, dataset_archive.settings.model_copy(update=changes), dataset_archive.dataset, ADMIN
    )


@ONE_DATABASE
def test_body_over_the_quota_is_refused_after_the_first_block_beyond_it(dataset_archive: DatasetArchive):
    body = CountingBody(1000)

    with pytest.raises(QuotaExceeded):
        put(dataset_archive, dataset_archive.archive(quota_bytes=ROOM), "a", body)

    assert body.blocks_read == ROOM // len(BLOCK) + 1
    assert (dataset_archive.stored(), dataset_archive.used(), dataset_archive.announced()) == ([], 0, 0)


@ONE_DATABASE
def test_body_of_exactly_the_quota_is_accepted(dataset_archive: DatasetArchive):
    file = put(dataset_archive, dataset_archive.archive(quota_bytes=ROOM), "a", CountingBody(ROOM // len(BLOCK)))

    assert (dataset_archive.used(), dataset_archive.announced(), dataset_archive.stored()) == (ROOM, 0, traces(file))


@ONE_DATABASE
def test_body_with_too_large_declared_length_is_refused_without_reading_it(dataset_archive: DatasetArchive):
    reservation = reserved(dataset_archive, quota_bytes=100)

    with pytest.raises(
        QuotaExceeded, match="has used 0 of unlimited statements and 0 of 100 bytes, and requested 0 and"
    ):
        reservation.declare(101)
    reservation.declare(100)

    assert (dataset_archive.used(), dataset_archive.announced(), reservation.is_held) == (0, 0, False)


def test_concurrent_bodies_never_exceed_the_quota_together(dataset_archive: DatasetArchive):
    """Start bodies that would each fit alone, all before the first reserves anything."""
    bodies, blocks = 6, 2 * SMALL // len(BLOCK)
    quota = 3 * blocks * len(BLOCK)
    meeting = threading.Barrier(bodies)
    seen: list[int] = []

    def halfway(number: int) -> None:
        if number == SMALL // len(BLOCK) - 1:  # the last before anything is reserved
            meeting.wait(60)
        seen.append(dataset_archive.used())

    def one(number: int) -> bool:
        try:
            put(
                dataset_archive,
                dataset_archive.archive(quota_bytes=quota),
                f"{number}",
                chain([b"%d" % number], CountingBody(blocks - 1, halfway)),
            )
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(bodies) as pool:
        stored = sum(pool.map(one, range(bodies)))

    assert max(seen) <= quota
    # Bodies without a declared length may exclude each other, even all of them.
    assert stored <= 3
    assert (dataset_archive.used(), dataset_archive.announced()) == (
        sum(file.size for file in dataset_archive.files()),
        0,
    )


@ONE_DATABASE
def test_reservation_of_a_killed_process_is_released_by_a_vacuum(dataset_archive: DatasetArchive):
    reserved(dataset_archive, quota_bytes=1 << 30).declare(5 << 20)
    assert (dataset_archive.used(), dataset_archive.announced()) == (5 << 20, 1)
    with dataset_archive.database.write() as connection:
        connection.execute(update(file_puts).values(expires=now() - timedelta(seconds=1)))

    list(
        Collector(dataset_archive.database, dataset_archive.store, dataset_archive.settings).run(
            dataset_archive.dataset, now()
        )
    )

    assert (dataset_archive.used(), dataset_archive.announced()) == (0, 0)


@ONE_DATABASE
def test_body_whose_reservation_expired_is_counted_again(dataset_archive: DatasetArchive):
    def expire(number: int) -> None:
        if number == 8:
            with dataset_archive.database.write() as connection:
                connection.execute(update(file_puts).values(expires=now() - timedelta(seconds=1)))
            list(
                Collector(dataset_archive.database, dataset_archive.store, dataset_archive.settings).run(
                    dataset_archive.dataset, now()
                )
            )
            assert dataset_archive.used() == 0

    file = put(dataset_archive, dataset_archive.archive(quota_bytes=1 << 30), "a", CountingBody(60, expire))

    assert (dataset_archive.used(), dataset_archive.announced()) == (file.size, 0)


@ONE_DATABASE
def test_body_for_a_dataset_deleted_concurrently_reserves_nothing(dataset_archive: DatasetArchive):
    def delete(number: int) -> None:
        if number == 6:
            with dataset_archive.database.write() as connection:
                connection.execute(text("UPDATE datasets SET state = 'deleting'"))
            remove_files(dataset_archive.database, dataset_archive.dataset.id, lambda *_: None)

    with pytest.raises(DatasetNotFound):
        put(dataset_archive, dataset_archive.archive(quota_bytes=1 << 30), "a", CountingBody(60, delete))

    assert (dataset_archive.used(), dataset_archive.announced()) == (0, 0)


@ONE_DATABASE
def test_without_a_quota_nothing_is_reserved(dataset_archive: DatasetArchive):
    seen: list[int] = []

    put(
        dataset_archive,
        dataset_archive.archive(),
        "a",
        CountingBody(20, lambda _: seen.append(dataset_archive.announced())),
    )

    assert set(seen) == {0}


# Texts


def test_texts_count_against_the_quota_and_replacing_one_counts_the_difference(dataset_archive: DatasetArchive):
    archive = dataset_archive.archive(quota_bytes=1000)
    file = put(dataset_archive, archive, "a", [b"x" * 100])

    put_text(dataset_archive, archive, file.checksum, b"x" * 600)
    assert dataset_archive.used() == 700
    put_text(dataset_archive, archive, file.checksum, b"x" * 900)
    assert dataset_archive.used() == 1000
    with pytest.raises(QuotaExceeded):
        put_text(dataset_archive, archive, file.checksum, b"x" * 901)
    with pytest.raises(QuotaExceeded):
        put_text(dataset_archive, archive, file.checksum, b"x", Origin("other"))
    put_text(dataset_archive, archive, file.checksum, b"x" * 10)
    assert dataset_archive.used() == 110

    archive.delete_text(dataset_archive.dataset, file.checksum, OCR, lambda _: None)
    assert (dataset_archive.used(), dataset_archive.stored()) == (100, traces(file))


@ONE_DATABASE
def test_large_text_replaces_another_within_the_quota_of_both(dataset_archive: DatasetArchive):
    archive = dataset_archive.archive(quota_bytes=5 * SMALL)
    file = put(dataset_archive, archive, "a", [b"x"])
    put_text(dataset_archive, archive, file.checksum, b"x" * 4 * SMALL)

    put_text(dataset_archive, archive, file.checksum, b"y" * (5 * SMALL - 1))

    assert (dataset_archive.used(), dataset_archive.announced()) == (5 * SMALL, 0)
    with pytest.raises(QuotaExceeded):
        put_text(dataset_archive, archive, file.checksum, b"z" * 5 * SMALL)
    assert (dataset_archive.used(), dataset_archive.announced()) == (5 * SMALL, 0)
    assert dataset_archive.store.get(dataset_archive.dataset.layout.text(file.checksum, OCR))[:1] == b"y"


@ONE_DATABASE
def test_concurrent_texts_never_exceed_the_quota_together(dataset_archive: DatasetArchive):
    archive = dataset_archive.archive(quota_bytes=1000)
    file = put(dataset_archive, archive, "a", [b""])

    def one(number: int) -> bool:
        try:
            put_text(dataset_archive, archive, file.checksum, b"x" * 300, Origin(f"o{number}"))
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(one, range(8))) == 3
    assert (dataset_archive.used(), dataset_archive.announced()) == (900, 0)


def test_deleted_dataset_releases_the_bytes_of_its_texts(dataset_archive: DatasetArchive):
    archive = dataset_archive.archive()
    file = put(dataset_archive, archive, "a", [b"content"])
    for number in range(3):
        put_text(dataset_archive, archive, file.checksum, b"text", Origin(f"o{number}"))
    with dataset_archive.database.write() as connection:
        connection.execute(text("UPDATE datasets SET state = 'deleting'"))

    remove_files(dataset_archive.database, dataset_archive.dataset.id, lambda *_: None)

    assert dataset_archive.used() == 0
    with dataset_archive.database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM file_texts")).scalar_one() == 0


# Uploads


def uploader(dataset_archive: DatasetArchive, **changes: Any) -> Uploads:
    settings = dataset_archive.settings.model_copy(update=changes)
    return Uploads(dataset_archive.database, dataset_archive.store, settings, dataset_archive.archive(**changes))


def begin(dataset_archive: DatasetArchive, uploads: Uploads, length: int, path: str = "a") -> str:
    new = NewUpload(length=length, path=path)
    return uploads.create(dataset_archive.dataset, ADMIN, new_file(path).path, new, ACT).id


def block(
    dataset_archive: DatasetArchive, uploads: Uploads, upload: str, offset: int, body: Any, declared: int | None = None
) -> None:
    reservation: BlockReservation = uploads.reservation(dataset_archive.dataset, ADMIN, upload)
    try:
        reservation.declare(declared)
        uploads.put_block(dataset_archive.dataset, ADMIN, upload, offset, body, ACT, reservation=reservation)
    except BaseException:
        reservation.release()
        raise


def test_upload_reserves_its_length_from_its_beginning_to_its_commit(dataset_archive: DatasetArchive):
    length = 4 * SMALL
    uploads = uploader(dataset_archive, quota_bytes=length)
    upload = begin(dataset_archive, uploads, length)

    with pytest.raises(QuotaExceeded):
        put(dataset_archive, dataset_archive.archive(quota_bytes=length), "other", [b"x"])
    block(dataset_archive, uploads, upload, 0, CountingBody(8), 2 * SMALL)
    block(dataset_archive, uploads, upload, 2 * SMALL, CountingBody(8))
    assert (dataset_archive.used(), dataset_archive.announced()) == (length, 1)

    uploads.commit(dataset_archive.dataset, ADMIN, upload, ACT, lambda file: file.id)

    assert (dataset_archive.used(), dataset_archive.announced()) == (length, 0)


@ONE_DATABASE
def test_concurrent_blocks_of_the_same_bytes_never_exceed_the_quota_together(dataset_archive: DatasetArchive):
    length = 4 * SMALL
    uploads = uploader(dataset_archive, quota_bytes=length)
    upload = begin(dataset_archive, uploads, length)
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
            block(dataset_archive, uploads, upload, 0, body, length)
        refused.append(body.blocks_read)
        with pytest.raises(QuotaExceeded):
            block(dataset_archive, uploads, upload, 0, body)
        refused.append(body.blocks_read)
        assert dataset_archive.used() == length
        meeting.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first, second = (
            pool.submit(block, dataset_archive, uploads, upload, 0, CountingBody(16, wait), length),
            pool.submit(other),
        )
        second.result(120)
        first.result(120)

    assert refused == [0, SMALL // len(BLOCK) + 1]
    uploads.commit(dataset_archive.dataset, ADMIN, upload, ACT, lambda file: file.id)
    assert (dataset_archive.used(), dataset_archive.announced()) == (length, 0)


@ONE_DATABASE
def test_aborted_or_failed_upload_keeps_the_count_correct(dataset_archive: DatasetArchive):
    uploads = uploader(dataset_archive, quota_bytes=100)
    upload = begin(dataset_archive, uploads, 60)
    assert dataset_archive.used() == 60
    uploads.abort(dataset_archive.dataset, ADMIN, upload, ACT)
    assert (dataset_archive.used(), dataset_archive.announced()) == (0, 0)

    new = NewUpload(length=60, path="a", checksum=Checksum("1" * 64))
    upload = uploads.create(dataset_archive.dataset, ADMIN, new_file("a").path, new, ACT).id
    block(dataset_archive, uploads, upload, 0, [b"x" * 60])
    with pytest.raises(Exception, match="checksum"):
        uploads.commit(dataset_archive.dataset, ADMIN, upload, ACT, lambda file: file.id)
    assert (dataset_archive.used(), dataset_archive.announced()) == (60, 1)


@ONE_DATABASE
def test_upload_started_by_an_earlier_version_counts_without_a_reservation(dataset_archive: DatasetArchive):
    uploads = uploader(dataset_archive, quota_bytes=100)
    upload = begin(dataset_archive, uploads, 60)
    with dataset_archive.database.write() as connection:
        file_index.withdraw(connection, [upload])

    with pytest.raises(QuotaExceeded):
        begin(dataset_archive, uploads, 41, "b")
    block(dataset_archive, uploads, upload, 0, [b"x" * 60])
    uploads.commit(dataset_archive.dataset, ADMIN, upload, ACT, lambda file: file.id)

    assert (dataset_archive.used(), dataset_archive.announced()) == (60, 0)
