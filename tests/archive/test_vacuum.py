"""Vacuum of the archive: what it deletes, and what it keeps."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from tarn.archive.dataset_removal import remove_files
from tarn.archive.files import SMALL
from tarn.archive.uploads import Uploads
from tarn.db.tables import file_puts, uploads
from tarn.errors import DatasetNotFound, FileNotFound, UploadNotFound
from tarn.integrity.archive_vacuum import Collector
from tarn.model.ids import now
from tarn.model.names import Origin
from tarn.model.tenant import ADMIN
from tarn.model.upload import NewUpload
from tarn.storage.fault_injection import Gate

from tests.archive.dataset_archive import ACT, DatasetArchive, new_file, traces
from tests.faults.scene import Killed, kill_at, pause_at
from tests.in_process_api import ONE_DATABASE

LARGE = b"0123456789abcdef" * (SMALL // 8)


def vacuum(
    dataset_archive: DatasetArchive, dry_run: bool = False, reached: Any = lambda _: None, **changes: Any
) -> list[str]:
    settings = dataset_archive.settings.model_copy(update=changes)
    collector = Collector(dataset_archive.database, dataset_archive.store, settings, reached)
    gone = [
        entry.path
        for some in collector.run(dataset_archive.dataset, now() + timedelta(days=1), dry_run)
        for entry in some
    ]
    return sorted("/".join(path.split("/")[-2:]) for path in gone)


def uploader(dataset_archive: DatasetArchive) -> Uploads:
    return Uploads(dataset_archive.database, dataset_archive.store, dataset_archive.settings, dataset_archive.archive())


def begin(dataset_archive: DatasetArchive, length: int) -> str:
    new = NewUpload(length=length, path="a.txt")
    return uploader(dataset_archive).create(dataset_archive.dataset, ADMIN, new_file("a.txt").path, new, ACT).id


def expire(dataset_archive: DatasetArchive) -> None:
    with dataset_archive.database.write() as connection:
        for table in (file_puts, uploads):
            connection.execute(update(table).values(expires=now() - timedelta(seconds=1)))


def test_content_without_a_file_record_is_deleted(dataset_archive: DatasetArchive):
    one, other, third = (
        dataset_archive.put("a.txt"),
        dataset_archive.put("b.txt"),
        dataset_archive.put("c.txt", b"third"),
    )
    text_of = Origin("ocr")
    staged = dataset_archive.archive().stage_text(dataset_archive.dataset, text_of, [b"text"])
    dataset_archive.archive().put_text(dataset_archive.dataset, ADMIN, one.checksum, text_of, staged, lambda _: None)
    # As an earlier version stored it: without a reservation.
    dataset_archive.store.put(dataset_archive.dataset.layout.text(one.checksum, Origin("old")), b"text")
    dataset_archive.delete(one)
    assert vacuum(dataset_archive) == []
    assert dataset_archive.used() == len(b"content") + len(b"third") + len(b"text")
    dataset_archive.delete(other)

    assert dataset_archive.used() == len(b"third")
    assert vacuum(dataset_archive, dry_run=True) == [f"{one.checksum}/data", f"{one.checksum}/old.txt"]
    assert dataset_archive.stored() == sorted([*traces(third), f"{one.checksum}/data", f"{one.checksum}/old.txt"])
    assert vacuum(dataset_archive) == [f"{one.checksum}/data", f"{one.checksum}/old.txt"]
    assert dataset_archive.stored() == traces(third)
    assert dataset_archive.content(third) == b"third"
    with pytest.raises(FileNotFound):
        dataset_archive.content(one)


@ONE_DATABASE
def test_recent_content_is_kept(dataset_archive: DatasetArchive):
    dataset_archive.delete(dataset_archive.put("a.txt"))
    collector = Collector(dataset_archive.database, dataset_archive.store, dataset_archive.settings)

    assert list(collector.run(dataset_archive.dataset, now() - timedelta(hours=1))) == []


def test_content_of_a_running_put_is_kept(dataset_archive: DatasetArchive):
    dataset_archive.delete(dataset_archive.put("a.txt", LARGE))
    deleted: list[str] = []

    def reached(step: str) -> None:
        if step in ("announced", "placed", "written"):
            deleted.extend(vacuum(dataset_archive))

    file = dataset_archive.archive(reached).put(dataset_archive.dataset, ADMIN, new_file("b.txt"), [LARGE])

    assert deleted == []
    assert dataset_archive.content(file) == LARGE


def test_put_whose_claim_expired_is_restarted_and_complete(dataset_archive: DatasetArchive):
    once = iter([expire])

    def reached(step: str) -> None:
        if step == "placed":
            for act in once:
                act(dataset_archive)
                vacuum(dataset_archive)

    file = dataset_archive.archive(reached).put(dataset_archive.dataset, ADMIN, new_file("b.txt"), [LARGE])

    assert dataset_archive.files() == [file]
    assert dataset_archive.content(file) == LARGE
    assert (dataset_archive.announced(), dataset_archive.used()) == (0, len(LARGE))


def test_put_waits_for_a_vacuum_that_is_deleting_its_content(dataset_archive: DatasetArchive):
    dataset_archive.delete(dataset_archive.put("a.txt"))
    gate = Gate()
    vacuuming = threading.Thread(
        target=vacuum, args=[dataset_archive], kwargs={"reached": pause_at("collecting", gate)}
    )
    vacuuming.start()
    gate.wait_arrived()
    putting = threading.Thread(target=dataset_archive.put, args=["b.txt"])
    putting.start()
    gate.release()
    vacuuming.join()
    putting.join()

    (file,) = dataset_archive.files()
    assert dataset_archive.content(file) == b"content"
    assert dataset_archive.stored() == traces(file)


@pytest.mark.contract("W9")
@pytest.mark.parametrize(
    ("step", "completed"), [("staged", False), ("announced", False), ("placed", False), ("written", True)]
)
def test_killed_put_is_completed_or_leaves_nothing_after_a_vacuum(
    dataset_archive: DatasetArchive, step: str, completed: bool
):
    with pytest.raises(Killed):
        dataset_archive.archive(kill_at(step)).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), [LARGE])
    expire(dataset_archive)

    vacuum(dataset_archive, upload_expiry=-3600)

    files = dataset_archive.files()
    assert [dataset_archive.content(file) for file in files] == ([LARGE] if completed else [])
    assert dataset_archive.stored() == traces(*files)
    assert (dataset_archive.announced(), dataset_archive.used()) == (0, len(LARGE) if completed else 0)


@ONE_DATABASE
def test_vacuum_killed_during_deletion_is_completed_by_the_next(dataset_archive: DatasetArchive):
    dataset_archive.delete(dataset_archive.put("a.txt"))
    with pytest.raises(Killed):
        vacuum(dataset_archive, reached=kill_at("collecting"))

    assert len(vacuum(dataset_archive)) == 1
    assert dataset_archive.stored() == []


@ONE_DATABASE
def test_record_missing_in_the_index_is_not_deleted(dataset_archive: DatasetArchive):
    file = dataset_archive.put("a.txt")
    with dataset_archive.database.write() as connection:
        connection.execute(text("DELETE FROM files"))

    assert vacuum(dataset_archive) == []
    assert dataset_archive.stored() == traces(file)


def test_abandoned_upload_is_deleted_and_an_active_one_is_kept(dataset_archive: DatasetArchive):
    old = begin(dataset_archive, 10)
    uploader(dataset_archive).put_block(dataset_archive.dataset, ADMIN, old, 0, [b"old"], ACT)
    expire(dataset_archive)
    young = begin(dataset_archive, 10)
    uploader(dataset_archive).put_block(dataset_archive.dataset, ADMIN, young, 0, [b"young"], ACT)

    assert vacuum(dataset_archive) == []
    gone = vacuum(dataset_archive, upload_expiry=-3600)

    assert [path.split("/")[0] for path in gone] == [old]
    assert [path.split("/")[0] for path in dataset_archive.stored()] == [young]
    with pytest.raises(UploadNotFound):
        uploader(dataset_archive).get(dataset_archive.dataset, ADMIN, old)


@ONE_DATABASE
def test_temporary_files_of_a_killed_writer_are_deleted(dataset_archive: DatasetArchive, tmp_path: Path):
    program = (
        "import os, signal, sys\n"
        "from tarn.settings import load_settings\n"
        "from tarn.storage.connection import Connection\n"
        "from tarn.storage.store import Store\n"
        "store = Store(Connection.from_settings(load_settings(lake_uri=sys.argv[1])))\n"
        "def chunks():\n"
        "    for _ in range(20): yield bytes(1 << 20)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.put_stream('test/uploads/dead/data', chunks())\n"
    )
    died = subprocess.run([sys.executable, "-c", program, dataset_archive.settings.lake_uri], check=False)
    left = [
        path for path in Path(dataset_archive.settings.lake_uri).rglob("*") if path.is_file() and "uploads" in str(path)
    ]
    assert (died.returncode, len(left)) == (-signal.SIGKILL, 1)
    assert dataset_archive.stored() == []

    vacuum(dataset_archive)
    assert left[0].exists()
    os.utime(left[0], (0, 0))
    vacuum(dataset_archive)

    assert not left[0].parent.exists()


def test_deleted_dataset_releases_its_quota_and_accepts_no_more_files(dataset_archive: DatasetArchive):
    dataset_archive.put("a.txt")
    dataset_archive.put("b.txt", LARGE)
    with pytest.raises(Killed):
        dataset_archive.archive(kill_at("announced")).put(dataset_archive.dataset, ADMIN, new_file("c.txt"), [b"c"])
    uploader(dataset_archive).put_block(dataset_archive.dataset, ADMIN, begin(dataset_archive, 10), 0, [b"old"], ACT)
    with dataset_archive.database.write() as connection:
        connection.execute(text("UPDATE datasets SET state = 'deleting'"))

    remove_files(dataset_archive.database, dataset_archive.dataset.id, lambda *_: None)

    assert (dataset_archive.files(), dataset_archive.announced(), dataset_archive.used()) == ([], 0, 0)
    with pytest.raises(DatasetNotFound):
        dataset_archive.put("a.txt")
