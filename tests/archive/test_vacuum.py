"""What a vacuum takes from an archive, and what it leaves."""

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

from tests.archive.dataset_archive import DatasetArchive, new_file, traces
from tests.faults.scene import Killed, held_at, killed_at
from tests.in_process_api import ONE_DATABASE

LARGE = b"0123456789abcdef" * (SMALL // 8)


def vacuum(desk: DatasetArchive, dry_run: bool = False, reached: Any = lambda _: None, **changes: Any) -> list[str]:
    settings = desk.settings.model_copy(update=changes)
    collector = Collector(desk.database, desk.store, settings, reached)
    gone = [entry.path for some in collector.run(desk.dataset, now() + timedelta(days=1), dry_run) for entry in some]
    return sorted("/".join(path.split("/")[-2:]) for path in gone)


def uploader(desk: DatasetArchive) -> Uploads:
    return Uploads(desk.database, desk.store, desk.settings, desk.archive())


def begin(desk: DatasetArchive, length: int) -> str:
    with desk.database.write() as connection:
        new = NewUpload(length=length, path="a.txt")
        return uploader(desk).create(connection, desk.dataset, ADMIN, new_file("a.txt").path, new).id


def expire(desk: DatasetArchive) -> None:
    with desk.database.write() as connection:
        for table in (file_puts, uploads):
            connection.execute(update(table).values(expires=now() - timedelta(seconds=1)))


def test_content_is_collected_once_no_file_refers_to_it(desk: DatasetArchive):
    one, other, third = desk.put("a.txt"), desk.put("b.txt"), desk.put("c.txt", b"third")
    text_of = Origin("ocr")
    staged = desk.archive().stage_text(desk.dataset, text_of, [b"text"])
    desk.archive().put_text(desk.dataset, ADMIN, one.checksum, text_of, staged, lambda _: None)
    # As a version before this one put it: nobody counts it.
    desk.store.put(desk.dataset.layout.text(one.checksum, Origin("old")), b"text")
    desk.delete(one)
    assert vacuum(desk) == []
    assert desk.used() == len(b"content") + len(b"third") + len(b"text")
    desk.delete(other)

    assert desk.used() == len(b"third")
    assert vacuum(desk, dry_run=True) == [f"{one.checksum}/data", f"{one.checksum}/old.txt"]
    assert desk.stored() == sorted([*traces(third), f"{one.checksum}/data", f"{one.checksum}/old.txt"])
    assert vacuum(desk) == [f"{one.checksum}/data", f"{one.checksum}/old.txt"]
    assert desk.stored() == traces(third)
    assert desk.content(third) == b"third"
    with pytest.raises(FileNotFound):
        desk.content(one)


@ONE_DATABASE
def test_content_that_is_too_young_stays(desk: DatasetArchive):
    desk.delete(desk.put("a.txt"))
    collector = Collector(desk.database, desk.store, desk.settings)

    assert list(collector.run(desk.dataset, now() - timedelta(hours=1))) == []


def test_put_is_never_collected_while_it_is_under_way(desk: DatasetArchive):
    desk.delete(desk.put("a.txt", LARGE))
    taken: list[str] = []

    def reached(step: str) -> None:
        if step in ("announced", "placed", "written"):
            taken.extend(vacuum(desk))

    file = desk.archive(reached).put(desk.dataset, ADMIN, new_file("b.txt"), [LARGE])

    assert taken == []
    assert desk.content(file) == LARGE


def test_put_that_expired_under_way_begins_again_and_is_whole(desk: DatasetArchive):
    once = iter([expire])

    def reached(step: str) -> None:
        if step == "placed":
            for act in once:
                act(desk)
                vacuum(desk)

    file = desk.archive(reached).put(desk.dataset, ADMIN, new_file("b.txt"), [LARGE])

    assert desk.files() == [file]
    assert desk.content(file) == LARGE
    assert (desk.announced(), desk.used()) == (0, len(LARGE))


def test_put_waits_for_the_vacuum_that_is_deleting_its_content(desk: DatasetArchive):
    desk.delete(desk.put("a.txt"))
    gate = Gate()
    vacuuming = threading.Thread(target=vacuum, args=[desk], kwargs={"reached": held_at("collecting", gate)})
    vacuuming.start()
    gate.wait_arrived()
    putting = threading.Thread(target=desk.put, args=["b.txt"])
    putting.start()
    gate.release()
    vacuuming.join()
    putting.join()

    (file,) = desk.files()
    assert desk.content(file) == b"content"
    assert desk.stored() == traces(file)


@pytest.mark.contract("W9")
@pytest.mark.parametrize(
    ("step", "kept"), [("staged", False), ("announced", False), ("placed", False), ("written", True)]
)
def test_put_that_died_is_finished_or_leaves_nothing_after_a_vacuum(desk: DatasetArchive, step: str, kept: bool):
    with pytest.raises(Killed):
        desk.archive(killed_at(step)).put(desk.dataset, ADMIN, new_file("a.txt"), [LARGE])
    expire(desk)

    vacuum(desk, upload_expiry=-3600)

    found = desk.files()
    assert [desk.content(file) for file in found] == ([LARGE] if kept else [])
    assert desk.stored() == traces(*found)
    assert (desk.announced(), desk.used()) == (0, len(LARGE) if kept else 0)


@ONE_DATABASE
def test_vacuum_that_dies_amid_deleting_is_finished_by_the_next(desk: DatasetArchive):
    desk.delete(desk.put("a.txt"))
    with pytest.raises(Killed):
        vacuum(desk, reached=killed_at("collecting"))

    assert len(vacuum(desk)) == 1
    assert desk.stored() == []


@ONE_DATABASE
def test_record_that_the_index_does_not_know_is_not_deleted(desk: DatasetArchive):
    file = desk.put("a.txt")
    with desk.database.write() as connection:
        connection.execute(text("DELETE FROM files"))

    assert vacuum(desk) == []
    assert desk.stored() == traces(file)


def test_abandoned_upload_is_given_up_and_one_that_goes_on_is_kept(desk: DatasetArchive):
    old = begin(desk, 10)
    uploader(desk).put_block(desk.dataset, ADMIN, old, 0, [b"old"])
    expire(desk)
    young = begin(desk, 10)
    uploader(desk).put_block(desk.dataset, ADMIN, young, 0, [b"young"])

    assert vacuum(desk) == []
    gone = vacuum(desk, upload_expiry=-3600)

    assert [path.split("/")[0] for path in gone] == [old]
    assert [path.split("/")[0] for path in desk.stored()] == [young]
    with pytest.raises(UploadNotFound), desk.database.read() as connection:
        uploader(desk).get(connection, desk.dataset, ADMIN, old)


@ONE_DATABASE
def test_what_a_killed_writer_left_on_the_disk_is_swept(desk: DatasetArchive, tmp_path: Path):
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
    died = subprocess.run([sys.executable, "-c", program, desk.settings.lake_uri], check=False)
    left = [path for path in Path(desk.settings.lake_uri).rglob("*") if path.is_file() and "uploads" in str(path)]
    assert (died.returncode, len(left)) == (-signal.SIGKILL, 1)
    assert desk.stored() == []

    vacuum(desk)
    assert left[0].exists()
    os.utime(left[0], (0, 0))
    vacuum(desk)

    assert not left[0].parent.exists()


def test_deleted_dataset_gives_its_quota_back_and_takes_no_more_files(desk: DatasetArchive):
    desk.put("a.txt")
    desk.put("b.txt", LARGE)
    with pytest.raises(Killed):
        desk.archive(killed_at("announced")).put(desk.dataset, ADMIN, new_file("c.txt"), [b"c"])
    uploader(desk).put_block(desk.dataset, ADMIN, begin(desk, 10), 0, [b"old"])
    with desk.database.write() as connection:
        connection.execute(text("UPDATE datasets SET state = 'deleting'"))

    remove_files(desk.database, desk.dataset.id, lambda *_: None)

    assert (desk.files(), desk.announced(), desk.used()) == ([], 0, 0)
    with pytest.raises(DatasetNotFound):
        desk.put("a.txt")
