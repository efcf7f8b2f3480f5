"""Guarantees on a local disk beyond those of obstore: durability, disk full, and no empty folders."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from tarn.errors import StartRefused, StorageFull, Unavailable
from tarn.settings import Settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store


@pytest.fixture
def store(disk: Connection) -> Store:
    return Store(disk)


@pytest.fixture
def root(disk: Connection) -> Path:
    assert disk.folder
    return disk.folder


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record what is fsynced, in order."""
    done: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", record)
    return done


WRITES = {
    "put": lambda store: store.put("ds/a/doc", b"1"),
    "put_new": lambda store: store.put_new("ds/a/doc", b"1"),
    "put_stream": lambda store: store.put_stream("ds/a/doc", [b"1"]),
    "copy": lambda store: store.copy("source", "ds/a/doc"),
    "copy_new": lambda store: store.copy_new("source", "ds/a/doc"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_is_synced_with_every_folder_up_to_the_root(store, root, synced, write):
    (root / "source").write_bytes(b"1")
    write(store)
    assert synced[0] == root / "ds/a/doc"
    assert sorted(synced[1:]) == [root, root / "ds", root / "ds/a"]


def test_sync_covers_files_of_other_libraries_and_each_folder_once(store, root, synced):
    log = root / "ds/t/_delta_log"
    log.mkdir(parents=True)
    for name in ("0.json", "1.json"):
        (log / name).write_text("{}")
    store.sync(["ds/t/_delta_log/0.json", "ds/t/_delta_log/1.json", "ds/t/gone.parquet"])
    assert sorted(synced[:2]) == [log / "0.json", log / "1.json"]
    assert sorted(synced[2:]) == [root, root / "ds", root / "ds/t", log]


def test_sync_of_many_files_syncs_each_exactly_once(store, root, synced):
    names = [f"ds/{number % 3}/{number}" for number in range(50)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    store.sync(names)
    assert sorted(synced) == sorted(
        [root, root / "ds", *(root / f"ds/{n}" for n in range(3)), *map(root.joinpath, names)]
    )


def test_sync_without_ancestors_covers_only_the_folders_of_the_files(store, root, synced):
    (root / "ds/a").mkdir(parents=True)
    (root / "ds/a/doc").write_text("{}")
    store.sync(["ds/a/doc"], above=False)
    assert synced == [root / "ds/a/doc", root / "ds/a"]


def test_created_root_is_synced(tmp_path, synced):
    Store(Connection(str(tmp_path / "new/lake")))
    assert synced == [tmp_path / "new", tmp_path]


def test_fsync_on_a_full_disk_is_storage_full(store, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull):
        store.put("doc", b"1")


def test_failed_fsync_is_storage_unavailable(store, monkeypatch):
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(Unavailable):
        store.put_new("doc", b"1")


def test_delete_of_the_last_object_leaves_no_folder(store, root):
    names = ["ds/a/b/c/1", "ds/a/b/2", "ds/3"]
    for name in names:
        store.put(name, b"")
    store.put("other/doc", b"")
    store.delete(names)
    assert sorted(path.name for path in root.rglob("*")) == ["doc", "other"]
    store.delete(["other/doc"])
    assert root.is_dir()
    assert list(root.iterdir()) == []


def test_concurrent_writes_and_deletes_in_one_folder_lose_nothing(store):
    start = Barrier(8)

    def churn(writer: int) -> None:
        start.wait()
        for turn in range(40):
            store.put_new(f"ds/deep/folder/{writer}-{turn}", b"1")
            store.delete([f"ds/deep/folder/{writer}-{turn}"])
        store.put_stream(f"ds/deep/folder/{writer}", [b"kept"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(churn, range(8)))
    assert [entry.path for entry in store.list("ds")] == [f"ds/deep/folder/{writer}" for writer in range(8)]


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no disk can be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.put("ds/doc", b"x" * 300_000),
        lambda store: store.put_new("ds/doc", b"x" * 300_000),
        lambda store: store.put_stream("ds/doc", (b"x" * 10_000 for _ in range(1000))),
    ],
)
def test_full_disk_is_storage_full_and_leaves_nothing(small_disk, write):
    store = Store(Connection.from_settings(Settings(lake_uri=str(small_disk))))
    store.put("kept", b"1")
    with pytest.raises(StorageFull):
        write(store)
    assert [path.name for path in small_disk.rglob("*")] == ["kept"]


def test_file_above_the_process_limit_is_storage_full_and_leaves_nothing(tmp_path):
    script = """
import resource, sys
from tarn.errors import StorageFull
from tarn.storage.connection import Connection
from tarn.storage.store import Store
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    Store(Connection(sys.argv[1])).put_new("ds/doc", b"x" * 200_000)
except StorageFull as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert run.stdout == "the store has no space left\n"
    assert list(tmp_path.iterdir()) == []


def test_root_that_cannot_be_created_stops_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartRefused, match="cannot be created"):
        Store(Connection(str(tmp_path / "file" / "lake")))
