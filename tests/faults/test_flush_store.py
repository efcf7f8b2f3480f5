"""Flush on a store that fails, stalls, loses answers or is full."""

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
from tarn.model.flush import FlushOutcome
from tarn.model.schema_buckets import buckets
from tarn.pipeline.tasks import kernel
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.pipeline.tasks.kernel import Kernel
from tarn.pipeline.tasks.task import Task
from tarn.storage.connection import Connection
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.faults.checks import check, check_now, history_of, unflushed_commits
from tests.faults.scene import Killed, Scene, in_background, kill_at, error_slug
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
ONLY_SHOWN = {
    ("put_hint", "*/.LOCK"),
    ("delete", "*/.LOCK"),
    ("put_hint", "*/snapshots/HEAD"),
    ("put_hint", "*/tags/*"),
}
"""What people see and nobody relies on."""


@ONE_DATABASE
def test_flush_makes_the_calls_that_the_cases_below_disturb_and_no_others(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)

    scene.worker("w", store=faulty)()

    made = {(call.method, call.path) for call in faulty.calls}
    for method, path in made:
        assert any(method == each and fnmatchcase(path, glob) for each, glob in CALLS), (method, path)
    for method, glob in CALLS:
        assert any(method == each and fnmatchcase(path, glob) for each, path in made), (method, glob)


@pytest.mark.contract("W3")
@ONE_DATABASE
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("method", "glob"), CALLS)
def test_call_that_fails_or_whose_answer_is_lost_changes_nothing_that_the_next_try_does_not_finish(
    scene: Scene, method: str, glob: str, after: bool
):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail(method, glob, Unavailable("the store does not answer"), after=after)

    done = scene.worker("w", store=faulty)()

    check_now(scene)
    assert error_slug(done.error) == (None if (method, glob) in ONLY_SHOWN else "unavailable")
    scene.flush()
    assert len(history_of(scene)) == 2
    check(scene)


@pytest.mark.parametrize(("method", "glob"), CALLS)
@ONE_DATABASE
def test_call_that_stalls_until_another_has_published_leaves_one_commit(scene: Scene, method: str, glob: str):
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
    made = {each.id for each in [*by_other, *resumed.snapshots]}
    assert made == {each.id for each in history_of(scene)[1:]}
    assert len(made) == 1
    check(scene)


@pytest.mark.contract("H2")
def test_manifest_put_whose_answer_was_lost_is_the_commit_and_is_recorded_by_the_next(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", Unavailable("no answer"), after=True)

    lost = scene.worker("w", store=faulty)()
    put = snapshots.read_if_exists(scene.store, scene.dataset, 2)
    recorded = len(history_of(scene))
    again = scene.flush()

    assert error_slug(lost.error) == "unavailable"
    assert recorded == 1
    assert again == []
    assert put == history_of(scene)[1]
    check(scene)


def test_manifest_put_that_was_repeated_and_finds_itself_has_won(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"), after=True)

    done = scene.worker("w", store=faulty)()

    assert done.error is None
    assert done.snapshots == history_of(scene)[1:]
    check(scene)


def test_manifest_put_that_finds_another_has_lost(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    gate = faulty.block("put_new", "*/snapshots/*")
    with in_background(scene.worker("slow", store=faulty)) as slow:
        gate.wait_arrived()
        scene.expire_leases()
        with pytest.raises(Killed):
            scene.worker("dies", kill_at("manifest put"))()
        theirs = snapshots.read_if_exists(scene.store, scene.dataset, 2)
        gate.release()
        lost: FlushOutcome = slow()

    # It lost to a commit that nobody had recorded, and had to wait for a dead holder's lease to find out.
    assert (lost.snapshots, error_slug(lost.error)) == ([], "locked")
    scene.expire_leases()
    assert scene.flush() == []
    assert theirs == history_of(scene)[1]
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


# No room


class FullDisk(DirectKernels):
    """Kernels whose data files the disk has no room for."""

    def run(self, slots: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        tasks = [task for slot in slots for task in slot]
        connection = Connection.from_settings(self._settings)
        made = Kernel(Journal.at(self._settings.database_url), connection, buckets(), "256m")
        yield from self._pool.submit(run_on_full_disk, made, tasks).result()


class FullStore(Store):
    """The system refuses to write more than a few bytes of a file."""

    def put_new(self, path: str, data: bytes) -> None:
        with no_room():
            super().put_new(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes], durable: bool = True) -> int:
        with no_room():
            return super().put_stream(path, chunks, durable)


ALONE = threading.Lock()


@contextmanager
def no_room() -> Iterator[None]:
    # The limit is the process's, and files are put by several threads at once: each would restore another's.
    with ALONE:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_on_full_disk(made: Kernel, tasks: list[Task[Any]]) -> list[tuple[int, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "Store", FullStore)
        return run_tasks(made, tasks)


def test_disk_that_is_full_for_data_files_is_an_error_and_the_next_flush_has_room(scene: Scene, kernels: DirectKernels):
    scene.with_history(1)

    full = scene.worker("w", kernels=FullDisk(kernels._settings, kernels._pool))()

    assert (full.snapshots, error_slug(full.error)) == ([], "storage-full")
    check_now(scene)
    assert len(history_of(scene)) == 1
    assert len([*unflushed_commits(scene)]) == 2
    check(scene)


@pytest.mark.parametrize("table", ["statements", "translog"])
@ONE_DATABASE
def test_disk_that_is_full_for_a_delta_log_is_an_error_and_the_next_flush_has_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, table: str
):
    scene.with_history(1)
    commit = DeltaTable.create_write_transaction

    def full(self: DeltaTable, *arguments, **options) -> None:
        if table in self.table_uri:
            # As deltalake 1.6 says it on a disk without room.
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
def test_disk_that_is_full_for_the_manifest_is_an_error_and_the_next_flush_has_room(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", StorageFull("the store has no room left"))

    full = scene.worker("w", store=faulty)()

    assert (full.snapshots, error_slug(full.error)) == ([], "storage-full")
    check_now(scene)
    assert snapshots.read_if_exists(scene.store, scene.dataset, 2) is None
    check(scene)


# Halves


@pytest.mark.parametrize("table", ["statements", "translog"])
@ONE_DATABASE
def test_log_entry_and_data_file_that_a_dead_writer_left_by_half_are_passed_over(scene: Scene, table: str):
    scene.with_history(1)
    folder = f"{scene.store.connection.folder}/{scene.dataset.layout.root}/entities/{table}"
    # deltalake's store writes beside the place and moves what is whole.
    with open(f"{folder}/_delta_log/{2:020d}.json#1", "wb") as entry:
        entry.write(b'{"add":{"pa')
    with open(f"{folder}/half.parquet", "wb") as data:
        data.write(b"PAR1")

    check(scene)
