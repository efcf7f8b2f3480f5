"""Rules of the commit protocol: when a build stays valid, what is retried, and which rows are set aside."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text, update
from tarn.access.audit import AuditedAction
from tarn.datasets import registry
from tarn.datasets.head import recorded_head
from tarn.db.tables import journal, journal_batches, journal_head, journal_rejected, snapshot_heads, tags
from tarn.errors import PathExists
from tarn.journal import head as heads
from tarn.journal import rejected, segments
from tarn.lake.commit import Build, HeadMoved
from tarn.lake.delta_tables import CommitRefused, DeltaStore
from tarn.model.datasets.flush import FlushOutcome
from tarn.model.datasets.snapshot import Head, Snapshot, SnapshotOperation
from tarn.model.ids import new_id
from tarn.model.tenant import ADMIN, Identity
from tarn.pipeline.tasks.task import TableFiles, Task
from tarn.storage.fault_injection import TIMEOUT_SECONDS, FaultyStore, Gate
from tarn.worker.loop import Worker

from tests.faults.checks import check, check_now, history_of, unflushed_commits
from tests.faults.scene import (
    BEFORE_MANIFEST,
    Killed,
    Scene,
    error_slug,
    in_background,
    kill_at,
    pause_at,
)
from tests.in_process_api import ONE_DATABASE
from tests.pipeline.kernels import DirectKernels
from tests.waiting import wait_until


def head_of(scene: Scene) -> Head:
    with scene.database.read() as connection:
        return recorded_head(connection, scene.dataset)


def seq_of(scene: Scene) -> int:
    """Return the number of the recorded head, also of a deleted dataset."""
    with scene.database.read() as connection:
        rows = select(snapshot_heads.c.seq).where(snapshot_heads.c.dataset_id == scene.dataset.id)
        return connection.execute(rows).scalar_one()


def empty_build(scene: Scene, change: SnapshotOperation) -> Build:
    """Return a build that changes no file, as those of optimize, revert and vacuum may be."""
    head = head_of(scene)
    return Build(scene.dataset, change, new_id(), head, head.segment, added={})


class Counting(DirectKernels):
    """Kernels that count their runs."""

    runs = 0

    def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        self.runs += 1
        return super().run(partitions)


@pytest.fixture
def counting(kernels: DirectKernels) -> Counting:
    return Counting(kernels._settings, kernels._pool)


# Flushes


@pytest.mark.contract("W1", "W2")
def test_flush_with_rows_makes_one_snapshot_that_counts_them_and_a_flush_without_rows_makes_none(scene: Scene):
    scene.with_history(1)
    (before,) = history_of(scene)
    consumed = sum(len(scene.acknowledged[commit]) for commit in unflushed_commits(scene))

    (snapshot,) = scene.flush()
    second = scene.flush()

    counts = snapshot.rows
    assert (snapshot.parent, snapshot.seq) == (before.id, before.seq + 1)
    assert counts.added + counts.seen + counts.deleted + counts.set_aside == consumed
    assert second == []
    assert history_of(scene) == [before, snapshot]


def test_segments_closed_by_killed_workers_are_flushed_in_order_into_one_snapshot_each(scene: Scene):
    commits = []
    for number in range(3):
        commits.append([scene.write()])
        with pytest.raises(Killed):
            scene.worker(f"dies {number}", kill_at("closed"))()

    flushed = scene.flush()

    assert [[batch.commit for batch in snapshot.batches] for snapshot in flushed] == commits
    check(scene)


def test_batch_written_during_a_flush_is_left_to_the_next_flush(scene: Scene):
    scene.with_history(0)
    flushed = [*unflushed_commits(scene)]
    gate = Gate()
    with in_background(scene.worker("w", pause_at("closed", gate))) as flushing:
        gate.wait_arrived()
        late = scene.write()
        gate.release()
        done: FlushOutcome = flushing()

    assert [batch.commit for snapshot in done.snapshots for batch in snapshot.batches] == flushed
    assert [*unflushed_commits(scene)] == [late]
    check(scene)


@ONE_DATABASE
def test_log_entries_are_synced_before_the_manifest_is_written_and_the_manifest_before_it_is_recorded(scene: Scene):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    order: list[str] = []
    worker = scene.worker("w", order.append, store=faulty)
    faulty.fail("put_new", "*/snapshots/*", Killed())

    with pytest.raises(Killed):
        worker()

    synced = [call.path.split("/")[2] for call in faulty.calls if call.method == "sync"]
    assert synced == ["statements", "translog"]
    assert order[-1] == "translog committed"
    check_now(scene)


# Retries


@pytest.mark.contract("H5")
@pytest.mark.parametrize("retries", [0, 3])
@ONE_DATABASE
def test_commit_that_always_loses_the_race_is_retried_as_often_as_configured(scene: Scene, retries: int):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"), every=True)

    done = scene.worker("w", store=faulty, commit_retries=retries)()

    puts = [call for call in faulty.calls if call.method == "put_new"]
    assert (error_slug(done.error), len(puts)) == ("snapshot-conflict", retries + 1)
    check(scene)


@pytest.mark.contract("H4")
def test_commit_that_lost_the_race_is_retried_with_the_same_id_and_files(scene: Scene, counting: Counting):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"))
    ids: list[str] = []
    put_new = faulty.put_new

    def remember(path: str, data: bytes) -> None:
        ids.append(Snapshot.from_json(path, data).id)
        put_new(path, data)

    faulty.put_new = remember  # type: ignore[method-assign]

    done = scene.worker("w", store=faulty, kernels=counting)()

    (snapshot,) = done.snapshots
    assert ids == [snapshot.id, snapshot.id]
    assert counting.runs == 1
    check(scene)


@ONE_DATABASE
def test_commit_on_an_existing_table_version_is_refused_and_not_rebased(scene: Scene):
    scene.with_history(1)
    (before,) = history_of(scene)
    (after,) = scene.flush()
    tables = DeltaStore(scene.store)
    version = before.statements.version

    with pytest.raises(CommitRefused):
        tables.commit(scene.dataset, "statements", version, after.statements.files[-1:], (), {})

    assert not tables.is_ahead(scene.dataset, "statements", after.statements.version)
    check(scene)


@pytest.mark.contract("H6", "M10", "W4")
@pytest.mark.parametrize("step", ["statements committed", "translog committed", "manifest put"])
@ONE_DATABASE
def test_files_manifests_and_log_entries_are_never_changed_after_they_are_written(scene: Scene, step: str):
    def immutable_files() -> dict[str, bytes]:
        mutable = ("/snapshots/HEAD", "/.LOCK", "/tags/")
        entries = scene.store.list(scene.dataset.layout.root)
        return {each.path: scene.store.get(each.path) for each in entries if not any(x in each.path for x in mutable)}

    scene.with_history(1)
    before = immutable_files()
    with pytest.raises(Killed):
        scene.worker("dies", kill_at(step))()
    partial = immutable_files()
    check(scene)
    after = immutable_files()

    assert before.items() <= partial.items() <= after.items()
    assert len([path for path in after if "/snapshots/" in path]) == 3


# Builds


@pytest.mark.parametrize("change", [SnapshotOperation.OPTIMIZE, SnapshotOperation.COMPACT])
@pytest.mark.contract("H4")
def test_build_stays_valid_across_a_change_that_keeps_all_rows(
    scene: Scene, counting: Counting, change: SnapshotOperation
):
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("w", pause_at("built", gate), kernels=counting)) as flushing:
        gate.wait_arrived()
        between = scene.publisher().publish(empty_build(scene, change))
        gate.release()
        done: FlushOutcome = flushing()

    (snapshot,) = done.snapshots
    assert counting.runs == 1
    assert (snapshot.parent, snapshot.content) == (between.id, snapshot.seq)
    assert between.content == between.seq - 1
    check(scene)


@pytest.mark.parametrize("change", [SnapshotOperation.REVERT, SnapshotOperation.VACUUM, SnapshotOperation.PURGE])
def test_build_is_repeated_after_a_change_that_removes_rows_or_files(
    scene: Scene, counting: Counting, change: SnapshotOperation
):
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("w", pause_at("built", gate), kernels=counting)) as flushing:
        gate.wait_arrived()
        between = scene.publisher().publish(empty_build(scene, change))
        gate.release()
        done: FlushOutcome = flushing()

    (snapshot,) = done.snapshots
    assert counting.runs == 2
    assert snapshot.parent == between.id
    check(scene)


@pytest.mark.parametrize("change", [SnapshotOperation.REVERT, SnapshotOperation.VACUUM, SnapshotOperation.PURGE])
def test_build_on_a_head_that_another_flush_replaced_is_refused(scene: Scene, change: SnapshotOperation):
    scene.with_history(1)
    stale = empty_build(scene, change)
    scene.flush()

    with pytest.raises(HeadMoved):
        scene.publisher().publish(stale)

    check(scene)


def test_segment_flushed_by_another_worker_before_it_is_read_is_skipped(scene: Scene, kernels: DirectKernels):
    class Overtaken(DirectKernels):
        def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
            scene.flush()
            return super().run(partitions)

    scene.with_history(1)
    done = scene.worker("w", kernels=Overtaken(kernels._settings, kernels._pool))()

    assert (done.snapshots, done.error) == ([], None)
    assert len(history_of(scene)) == 2
    check(scene)


def test_segment_with_a_row_that_was_not_read_is_not_marked_done(scene: Scene, kernels: DirectKernels):
    class Incomplete(DirectKernels):
        def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
            for number, output in super().run(partitions):
                assert isinstance(output, TableFiles)
                yield number, output._replace(tally=output.tally._replace(added=output.tally.added - 1))

    scene.with_history(1)
    done = scene.worker("w", kernels=Incomplete(kernels._settings, kernels._pool))()

    assert (done.snapshots, error_slug(done.error)) == ([], "internal")
    check(scene)


def test_task_that_runs_twice_leaves_unreferenced_files_and_no_duplicate_row(scene: Scene, kernels: DirectKernels):
    class Twice(DirectKernels):
        def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
            first = [*super().run(partitions)]
            assert first
            return super().run(partitions)

    scene.write(*(scene.new_statement(name) for name in ("a", "b", "c")))
    done = scene.worker("w", kernels=Twice(kernels._settings, kernels._pool))()

    (snapshot,) = done.snapshots
    folder = scene.dataset.layout.statements
    stored = [entry.path for entry in scene.store.list(folder) if entry.path.endswith(".parquet")]
    assert len(stored) == 2 * len(snapshot.statements.files)
    assert snapshot.rows.live == 3
    check(scene)


# Recreated datasets


def delete(scene: Scene) -> None:
    identity = Identity(ADMIN, "key", (), 0, 1)
    registry.begin_delete(
        scene.database,
        scene.store,
        scene.dataset,
        None,
        AuditedAction(identity, "delete_dataset", scene.dataset.name, "r"),
    )
    assert Worker(scene.settings, scene.database, scene.store).step()


@pytest.mark.contract("H7")
@pytest.mark.parametrize("earlier", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("step", [*BEFORE_MANIFEST, "manifest put"])
@ONE_DATABASE
def test_worker_paused_while_its_dataset_is_deleted_and_recreated_fails_and_changes_nothing(
    scene: Scene, kernels: DirectKernels, step: str, earlier: int
):
    scene.with_history(earlier)
    gate = Gate()
    with in_background(scene.worker("paused", pause_at(step, gate))) as paused:
        gate.wait_arrived()
        last = head_of(scene).seq
        delete(scene)
        recreated = Scene.make(scene.settings, scene.database, scene.store, kernels, seed=7)
        recreated.with_history(1)
        before = {entry.path: scene.store.get(entry.path) for entry in scene.store.list(recreated.dataset.layout.root)}
        gate.release()
        resumed: FlushOutcome = paused()
        after = {entry.path: scene.store.get(entry.path) for entry in scene.store.list(recreated.dataset.layout.root)}

    assert resumed.snapshots == []
    assert error_slug(resumed.error) == "dataset-not-found"
    assert before.items() <= after.items()
    # Only two strays are possible: a manifest with a number that the new dataset does not use, and one commit of the
    # translog, as the lease was checked only once for both tables. The next flush restores the table.
    layout = recreated.dataset.layout
    ahead = layout.delta_log(layout.translog, history_of(recreated)[0].translog.version + 1)
    strays = {layout.snapshot(last + 1), *([ahead] if step == "statements committed" else [])}
    assert after.keys() - before.keys() <= strays
    assert seq_of(scene) == last
    assert history_of(recreated)[0].seq == last + 2
    check(recreated)


@ONE_DATABASE
def test_dataset_that_is_being_deleted_is_not_flushed(scene: Scene):
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("paused", pause_at("translog committed", gate))) as paused:
        gate.wait_arrived()
        identity = Identity(ADMIN, "key", (), 0, 1)
        act = AuditedAction(identity, "delete_dataset", scene.dataset.name, "r")
        registry.begin_delete(scene.database, scene.store, scene.dataset, None, act)
        gate.release()
        resumed: FlushOutcome = paused()

    assert (resumed.snapshots, error_slug(resumed.error)) == ([], "dataset-not-found")
    assert seq_of(scene) == 1


# Rows that cannot be stored

INVALID_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"schema": "NoSuchSchema"}, "schema"),
    ({"value": None}, "value"),
    ({"kind": 9}, "kind"),
    ({"id": b"short"}, "id"),
]


def corrupt_event(scene: Scene, commit: int, position: int, **values: Any) -> None:
    """Overwrite columns of one event in the journal."""
    with scene.database.write() as connection:
        batch = connection.execute(select(journal_batches.c.id).where(journal_batches.c.commit == commit)).scalar_one()
        changed = connection.execute(
            update(journal).where(journal.c.batch == batch, journal.c.position == position).values(**values)
        )
        assert changed.rowcount == 1


@pytest.mark.contract("W2")
@pytest.mark.parametrize(("values", "reason"), INVALID_VALUES, ids=[reason for _, reason in INVALID_VALUES])
def test_row_that_cannot_be_stored_is_set_aside_with_its_reason_and_the_others_are_flushed(
    scene: Scene, values: dict[str, Any], reason: str
):
    first, invalid, last = (scene.new_statement(name) for name in ("a", "b", "c"))
    scene.with_history(1)
    commit = scene.write(first, invalid, last)
    corrupt_event(scene, commit, 1, **values)
    scene.acknowledged[commit] = [first, last]
    consumed = sum(len(scene.acknowledged[each]) for each in unflushed_commits(scene)) + 1

    (snapshot,) = scene.flush()

    with scene.database.read() as connection:
        (kept,) = connection.execute(select(journal_rejected)).all()
    counts = snapshot.rows
    assert (counts.set_aside, len(snapshot.set_aside)) == (1, 1)
    assert counts.added + counts.seen + counts.deleted + counts.set_aside == consumed
    assert reason in kept.reason
    assert (kept.reason, kept.batch, kept.position) == (
        snapshot.set_aside[0].reason,
        snapshot.set_aside[0].batch,
        1,
    )
    check(scene)


def test_row_set_aside_is_stored_when_its_retry_is_valid(scene: Scene):
    invalid = scene.new_statement("b")
    commit = scene.write(scene.new_statement("a"), invalid)
    corrupt_event(scene, commit, 1, schema="NotYetKnown")
    scene.acknowledged[commit] = scene.acknowledged[commit][:1]
    scene.flush()
    with scene.database.write() as connection:
        kept = connection.execute(select(journal_rejected.c.event)).scalar_one()
        connection.execute(update(journal_rejected).values(event=kept | {"schema": invalid["schema"]}))
        retried = rejected.retry(connection, scene.settings, scene.dataset, ADMIN, None)

    assert (retried.retried, retried.commit) == (1, commit + 1)
    scene.acknowledged[commit + 1] = [invalid]
    check_now(scene)
    scene.flush()
    check(scene)


def test_row_set_aside_is_set_aside_again_when_its_retry_is_invalid(scene: Scene):
    commit = scene.write(scene.new_statement("a"), scene.new_statement("b"))
    corrupt_event(scene, commit, 1, value=None)
    scene.acknowledged[commit] = scene.acknowledged[commit][:1]
    scene.flush()
    with scene.database.write() as connection:
        rejected.retry(connection, scene.settings, scene.dataset, ADMIN, None)
    scene.acknowledged[commit + 1] = []

    (snapshot,) = scene.flush()

    assert (snapshot.rows.set_aside, snapshot.rows.added, snapshot.content) == (1, 0, snapshot.seq - 1)
    with scene.database.read() as connection:
        assert len(connection.execute(select(journal_rejected)).all()) == 1
    check(scene)


@pytest.mark.parametrize("step", ["manifest put", "recorded"])
def test_row_is_set_aside_once_when_another_worker_records_the_snapshot(scene: Scene, step: str):
    commit = scene.write(scene.new_statement("a"), scene.new_statement("b"))
    corrupt_event(scene, commit, 1, value=None)
    scene.acknowledged[commit] = scene.acknowledged[commit][:1]
    with pytest.raises(Killed):
        scene.worker("dies", kill_at(step))()
    scene.expire_leases()

    scene.flush()

    with scene.database.read() as connection:
        assert len(connection.execute(select(journal_rejected)).all()) == 1
    check(scene)


# The journal's head


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_batch_committed_while_a_snapshot_is_recorded_counts_as_unflushed(scene: Scene):
    scene.with_history(0)
    gate = Gate()
    with in_background(scene.worker("w", pause_at("manifest put", gate))) as flushing:
        gate.wait_arrived()
        with scene.database.write() as connection:
            late = scene.write_in(connection)
            gate.release()
            wait_for_blocked_transaction(scene)
        flushing()

    assert [*unflushed_commits(scene)] == [late]
    check(scene)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_write_blocked_while_a_snapshot_is_recorded_is_newer_than_the_time_of_the_last_flush(scene: Scene):
    scene.with_history(0)
    scene.flush()
    with ThreadPoolExecutor(1) as pool, scene.database.write() as connection:
        connection.execute(select(journal_head).with_for_update())
        pool.submit(scene.write)
        wait_for_blocked_transaction(scene)
        segments.mark_done(connection, scene.dataset, 0, [], moved=False)

    with scene.database.read() as connection:
        at = {row.key: row.at for row in connection.execute(select(tags))}
    assert at[heads.LAST_UPDATED] > at[segments.LAST_FLUSHED]


def wait_for_blocked_transaction(scene: Scene) -> None:
    """Wait until a transaction waits for a lock."""

    def blocked() -> int:
        with scene.database.read() as connection:
            return connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one()

    wait_until(blocked, TIMEOUT_SECONDS)
