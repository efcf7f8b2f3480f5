"""Flushes on a store whose requests fail, stall or lose their responses, and on a full disk."""

import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import pytest
from deltalake import DeltaTable
from tarn.errors import PathExists, StorageFull, Unavailable
from tarn.lake import snapshots
from tarn.model.datasets.flush import FlushOutcome
from tarn.model.ftm.schema_buckets import buckets
from tarn.pipeline.tasks import kernel
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.pipeline.tasks.kernel import Kernel
from tarn.pipeline.tasks.task import Task
from tarn.storage.connection import Connection
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.faults.checks import check, check_now, history_of, unflushed_commits
from tests.faults.scene import Killed, Scene, error_slug, in_background, kill_at
from tests.in_process_api import ONE_DATABASE
from tests.pipeline.kernels import DirectKernels, run_tasks

CALLS = [
    ("get", "*/config.yml"),
    ("put_hint", "*/.LOCK"),
    ("get", "*/snapshots/*1.json"),
    ("get", "*/snapshots/*2.json"),
    ("head", "*/statements/_delta_log/*"),
    ("head", "*/translog/_delta_log/*"),
    ("sync", "*/statements/_delta_log/*"),
    ("sync", "*/translog/_delta_log/*"),
    ("put_new", "*/snapshots/*"),
    ("delete", "*/.LOCK"),
    ("put_hint", "*/snapshots/HEAD"),
    ("put_hint", "*/tags/*"),
]
INFORMATIONAL = {
    ("put_hint", "*/.LOCK"),
    ("delete", "*/.LOCK"),
    ("put_hint", "*/snapshots/HEAD"),
    ("put_hint", "*/tags/*"),
}
"""Calls that write informational files, which no process reads."""


@ONE_DATABASE
def test_flush_makes_exactly_the_calls_that_the_fault_cases_cover(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)

    scene.worker("w", store=faulty)()

    calls = {(call.method, call.path) for call in faulty.calls}
    for method, path in calls:
        assert any(method == each and fnmatchcase(path, glob) for each, glob in CALLS), (method, path)
    for method, glob in CALLS:
        assert any(method == each and fnmatchcase(path, glob) for each, path in calls), (method, glob)


@pytest.mark.contract("W3")
@ONE_DATABASE
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("method", "glob"), CALLS)
def test_flush_after_a_failed_call_or_a_lost_response_completes_with_one_commit(
    scene: Scene, method: str, glob: str, after: bool
):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail(method, glob, Unavailable("the store does not respond"), after=after)

    done = scene.worker("w", store=faulty)()

    check_now(scene)
    assert error_slug(done.error) == (None if (method, glob) in INFORMATIONAL else "unavailable")
    scene.flush()
    assert len(history_of(scene)) == 2
    check(scene)


@pytest.mark.parametrize(("method", "glob"), CALLS)
@ONE_DATABASE
def test_call_that_stalls_until_another_worker_has_published_leaves_one_commit(scene: Scene, method: str, glob: str):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    gate = faulty.block(method, glob)
    with in_background(scene.worker("stalled", store=faulty)) as stalled:
        gate.wait_arrived()
        scene.expire_leases()
        by_other = scene.flush()
        gate.release()
        resumed: FlushOutcome = stalled()

    assert resumed.error is None
    published = {each.id for each in [*by_other, *resumed.snapshots]}
    assert published == {each.id for each in history_of(scene)[1:]}
    assert len(published) == 1
    check(scene)


@pytest.mark.contract("H2")
def test_manifest_whose_response_was_lost_is_the_commit_and_is_recorded_by_the_next_flush(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", Unavailable("no response"), after=True)

    lost = scene.worker("w", store=faulty)()
    put = snapshots.read_if_exists(scene.store, scene.dataset, 2)
    recorded = len(history_of(scene))
    again = scene.flush()

    assert error_slug(lost.error) == "unavailable"
    assert recorded == 1
    assert again == []
    assert put == history_of(scene)[1]
    check(scene)


def test_manifest_put_that_is_repeated_and_finds_its_own_manifest_succeeds(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"), after=True)

    done = scene.worker("w", store=faulty)()

    assert done.error is None
    assert done.snapshots == history_of(scene)[1:]
    check(scene)


def test_manifest_put_that_finds_the_manifest_of_another_worker_fails(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    gate = faulty.block("put_new", "*/snapshots/*")
    with in_background(scene.worker("slow", store=faulty)) as slow:
        gate.wait_arrived()
        scene.expire_leases()
        with pytest.raises(Killed):
            scene.worker("dies", kill_at("manifest put"))()
        other = snapshots.read_if_exists(scene.store, scene.dataset, 2)
        gate.release()
        lost: FlushOutcome = slow()

    # It lost to a commit that is not recorded yet, and to record it, it needs the lease of the killed worker.
    assert (lost.snapshots, error_slug(lost.error)) == ([], "locked")
    scene.expire_leases()
    assert scene.flush() == []
    assert other == history_of(scene)[1]
    check(scene)


@ONE_DATABASE
def test_slow_store_changes_nothing(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    for method, glob in CALLS:
        faulty.delay(method, glob, 0.005, every=True)

    done = scene.worker("w", store=faulty)()

    assert done.error is None
    check(scene)


# Full disks


class FullDisk(DirectKernels):
    """Kernels whose disk is full when they write data files."""

    def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        tasks = [task for partition in partitions for task in partition]
        connection = Connection.from_settings(self._settings)
        full_disk_kernel = Kernel(Journal.at(self._settings.database_url), connection, buckets(), "256m")
        yield from self._pool.submit(run_on_full_disk, full_disk_kernel, tasks).result()


class FullStore(Store):
    """A store in which the operating system refuses to write more than a few bytes of a file."""

    def put_new(self, path: str, data: bytes) -> None:
        with limited_file_size():
            super().put_new(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes], durable: bool = True) -> int:
        with limited_file_size():
            return super().put_stream(path, chunks, durable)


LIMIT_LOCK = threading.Lock()


@contextmanager
def limited_file_size() -> Iterator[None]:
    # The limit belongs to the process, and several threads write files: each would restore the limit of another.
    with LIMIT_LOCK:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_on_full_disk(full_disk_kernel: Kernel, tasks: list[Task[Any]]) -> list[tuple[int, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "Store", FullStore)
        return run_tasks(full_disk_kernel, tasks)


def test_disk_full_while_data_files_are_written_is_an_error_and_the_next_flush_completes(
    scene: Scene, kernels: DirectKernels
):
    scene.with_history(1)

    full = scene.worker("w", kernels=FullDisk(kernels._settings, kernels._pool))()

    assert (full.snapshots, error_slug(full.error)) == ([], "storage-full")
    check_now(scene)
    assert len(history_of(scene)) == 1
    assert len([*unflushed_commits(scene)]) == 2
    check(scene)


@pytest.mark.parametrize("table", ["statements", "translog"])
@ONE_DATABASE
def test_disk_full_while_a_delta_log_is_written_is_an_error_and_the_next_flush_completes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, table: str
):
    scene.with_history(1)
    commit = DeltaTable.create_write_transaction

    def full(self: DeltaTable, *arguments, **options) -> None:
        if table in self.table_uri:
            # The error of deltalake 1.6 on a full disk.
            raise OSError("Generic LocalFileSystem error\n Unable to copy data to file\n No space left on device")
        commit(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(DeltaTable, "create_write_transaction", full)
        done = scene.worker("w")()

    assert (done.snapshots, error_slug(done.error)) == ([], "storage-full")
    check_now(scene)
    assert len(history_of(scene)) == 1
    check(scene)


@ONE_DATABASE
def test_disk_full_while_the_manifest_is_written_is_an_error_and_the_next_flush_completes(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", StorageFull("the store is full"))

    full = scene.worker("w", store=faulty)()

    assert (full.snapshots, error_slug(full.error)) == ([], "storage-full")
    check_now(scene)
    assert snapshots.read_if_exists(scene.store, scene.dataset, 2) is None
    check(scene)


# Partial files


@pytest.mark.parametrize("table", ["statements", "translog"])
@ONE_DATABASE
def test_partial_log_entry_and_data_file_of_a_killed_writer_are_ignored(scene: Scene, table: str):
    scene.with_history(1)
    folder = f"{scene.store.connection.folder}/{scene.dataset.layout.root}/entities/{table}"
    # deltalake's store writes a temporary file next to the target and renames it when it is complete.
    with open(f"{folder}/_delta_log/{2:020d}.json#1", "wb") as entry:
        entry.write(b'{"add":{"pa')
    with open(f"{folder}/half.parquet", "wb") as data:
        data.write(b"PAR1")

    check(scene)
