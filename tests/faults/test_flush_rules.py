"""The rules under the steps of the protocol, each as a case: what holds, what is done again, what is set aside."""

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
from tarn.model.flush import FlushOutcome
from tarn.model.ids import new_id
from tarn.model.snapshot import Head, Snapshot, SnapshotOperation
from tarn.model.tenant import ADMIN, Identity
from tarn.pipeline.tasks.task import TableFiles, Task
from tarn.storage.fault_injection import TIMEOUT_SECONDS, FaultyStore, Gate
from tarn.worker.loop import Worker

from tests.faults.checks import check, check_now, history_of, unflushed_commits
from tests.faults.scene import (
    BEFORE_MANIFEST,
    Killed,
    Scene,
    in_background,
    pause_at,
    kill_at,
    error_slug,
)
from tests.in_process_api import ONE_DATABASE
from tests.pipeline.kernels import DirectKernels
from tests.waiting import wait_until


def head_of(scene: Scene) -> Head:
    with scene.database.read() as connection:
        return recorded_head(connection, scene.dataset)


def seq_of(scene: Scene) -> int:
    """The number of the recorded head, of a dataset that is gone too."""
    with scene.database.read() as connection:
        rows = select(snapshot_heads.c.seq).where(snapshot_heads.c.dataset_id == scene.dataset.id)
        return connection.execute(rows).scalar_one()


def by_hand(scene: Scene, change: SnapshotOperation) -> Build:
    """A change of no file, as optimize, revert and vacuum may be."""
    head = head_of(scene)
    return Build(scene.dataset, change, new_id(), head, head.segment, added={})


class Counting(DirectKernels):
    """Kernels that count how often something is built."""

    rounds = 0

    def run(self, slots: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        self.rounds += 1
        return super().run(slots)


@pytest.fixture
def counting(kernels: DirectKernels) -> Counting:
    return Counting(kernels._settings, kernels._pool)


# Flushes


@pytest.mark.contract("W1", "W2")
def test_flush_with_rows_makes_one_snapshot_on_the_head_that_counts_them_and_one_without_makes_none(scene: Scene):
    scene.with_history(1)
    (before,) = history_of(scene)
    consumed = sum(len(scene.acknowledged[commit]) for commit in unflushed_commits(scene))

    (made,) = scene.flush()
    none = scene.flush()

    counts = made.rows
    assert (made.parent, made.seq) == (before.id, before.seq + 1)
    assert counts.added + counts.seen + counts.deleted + counts.set_aside == consumed
    assert none == []
    assert history_of(scene) == [before, made]


def test_segments_that_dead_workers_closed_are_flushed_in_their_order_each_into_its_own_snapshot(scene: Scene):
    commits = []
    for number in range(3):
        commits.append([scene.write()])
        with pytest.raises(Killed):
            scene.worker(f"dies {number}", kill_at("closed"))()

    made = scene.flush()

    assert [[batch.commit for batch in snapshot.batches] for snapshot in made] == commits
    check(scene)


def test_what_is_written_while_a_flush_runs_waits_for_the_next_one(scene: Scene):
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
def test_log_entries_are_on_the_disk_before_the_manifest_and_the_manifest_before_it_is_recorded(scene: Scene):
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
def test_commit_that_always_loses_is_tried_as_often_as_configured_and_once_more(scene: Scene, retries: int):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"), every=True)

    done = scene.worker("w", store=faulty, commit_retries=retries)()

    puts = [call for call in faulty.calls if call.method == "put_new"]
    assert (error_slug(done.error), len(puts)) == ("snapshot-conflict", retries + 1)
    check(scene)


@pytest.mark.contract("H4")
def test_commit_that_lost_is_tried_again_with_its_id_and_the_files_it_has(scene: Scene, counting: Counting):
    scene.with_history(1)
    faulty = FaultyStore(scene.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"))
    tried: list[str] = []
    put_new = faulty.put_new

    def remember(path: str, data: bytes) -> None:
        tried.append(Snapshot.from_json(path, data).id)
        put_new(path, data)

    faulty.put_new = remember  # type: ignore[method-assign]

    done = scene.worker("w", store=faulty, kernels=counting)()

    (made,) = done.snapshots
    assert tried == [made.id, made.id]
    assert counting.rounds == 1
    check(scene)


@ONE_DATABASE
def test_commit_on_a_version_that_is_taken_is_refused_and_not_rebased(scene: Scene):
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
def test_files_manifests_and_log_entries_are_never_changed_once_they_are_there(scene: Scene, step: str):
    def everything() -> dict[str, bytes]:
        shown = ("/snapshots/HEAD", "/.LOCK", "/tags/")
        entries = scene.store.list(scene.dataset.layout.root)
        return {each.path: scene.store.get(each.path) for each in entries if not any(x in each.path for x in shown)}

    scene.with_history(1)
    before = everything()
    with pytest.raises(Killed):
        scene.worker("dies", kill_at(step))()
    halfway = everything()
    check(scene)
    after = everything()

    assert before.items() <= halfway.items() <= after.items()
    assert len([path for path in after if "/snapshots/" in path]) == 3


# Builds


@pytest.mark.parametrize("change", [SnapshotOperation.OPTIMIZE, SnapshotOperation.COMPACT])
@pytest.mark.contract("H4")
def test_build_holds_across_what_keeps_rows_and_is_not_made_again(
    scene: Scene, counting: Counting, change: SnapshotOperation
):
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("w", pause_at("built", gate), kernels=counting)) as flushing:
        gate.wait_arrived()
        between = scene.publisher().publish(by_hand(scene, change))
        gate.release()
        done: FlushOutcome = flushing()

    (made,) = done.snapshots
    assert counting.rounds == 1
    assert (made.parent, made.content) == (between.id, made.seq)
    assert between.content == between.seq - 1
    check(scene)


@pytest.mark.parametrize("change", [SnapshotOperation.REVERT, SnapshotOperation.VACUUM, SnapshotOperation.PURGE])
def test_build_does_not_hold_across_what_takes_rows_or_files_and_is_made_again(
    scene: Scene, counting: Counting, change: SnapshotOperation
):
    scene.with_history(1)
    gate = Gate()
    with in_background(scene.worker("w", pause_at("built", gate), kernels=counting)) as flushing:
        gate.wait_arrived()
        between = scene.publisher().publish(by_hand(scene, change))
        gate.release()
        done: FlushOutcome = flushing()

    (made,) = done.snapshots
    assert counting.rounds == 2
    assert made.parent == between.id
    check(scene)


@pytest.mark.parametrize("change", [SnapshotOperation.REVERT, SnapshotOperation.VACUUM, SnapshotOperation.PURGE])
def test_build_on_a_head_that_another_flush_moved_is_told_so(scene: Scene, change: SnapshotOperation):
    scene.with_history(1)
    stale = by_hand(scene, change)
    scene.flush()

    with pytest.raises(HeadMoved):
        scene.publisher().publish(stale)

    check(scene)


def test_segment_that_another_flushes_before_it_is_read_is_left_to_it(scene: Scene, kernels: DirectKernels):
    class Late(DirectKernels):
        def run(self, slots: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
            scene.flush()
            return super().run(slots)

    scene.with_history(1)
    done = scene.worker("w", kernels=Late(kernels._settings, kernels._pool))()

    assert (done.snapshots, done.error) == ([], None)
    assert len(history_of(scene)) == 2
    check(scene)


def test_segment_of_which_not_every_row_was_read_is_not_marked_done(scene: Scene, kernels: DirectKernels):
    class Forgetful(DirectKernels):
        def run(self, slots: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
            for number, output in super().run(slots):
                assert isinstance(output, TableFiles)
                yield number, output._replace(tally=output.tally._replace(added=output.tally.added - 1))

    scene.with_history(1)
    done = scene.worker("w", kernels=Forgetful(kernels._settings, kernels._pool))()

    assert (done.snapshots, error_slug(done.error)) == ([], "internal")
    check(scene)


def test_task_that_ran_twice_leaves_files_that_nothing_names_and_no_row_twice(scene: Scene, kernels: DirectKernels):
    class Twice(DirectKernels):
        def run(self, slots: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
            first = [*super().run(slots)]
            assert first
            return super().run(slots)

    scene.write(*(scene.new_statement(name) for name in ("a", "b", "c")))
    done = scene.worker("w", kernels=Twice(kernels._settings, kernels._pool))()

    (made,) = done.snapshots
    folder = scene.dataset.layout.statements
    there = [entry.path for entry in scene.store.list(folder) if entry.path.endswith(".parquet")]
    assert len(there) == 2 * len(made.statements.files)
    assert made.rows.live == 3
    check(scene)


# A dataset made again


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
def test_worker_paused_while_its_dataset_is_deleted_and_made_again_loses_and_touches_nothing(
    scene: Scene, kernels: DirectKernels, step: str, earlier: int
):
    scene.with_history(earlier)
    gate = Gate()
    with in_background(scene.worker("paused", pause_at(step, gate))) as paused:
        gate.wait_arrived()
        last = head_of(scene).seq
        delete(scene)
        again = Scene.make(scene.settings, scene.database, scene.store, kernels, seed=7)
        again.with_history(1)
        before = {entry.path: scene.store.get(entry.path) for entry in scene.store.list(again.dataset.layout.root)}
        gate.release()
        resumed: FlushOutcome = paused()
        after = {entry.path: scene.store.get(entry.path) for entry in scene.store.list(again.dataset.layout.root)}

    assert resumed.snapshots == []
    assert error_slug(resumed.error) == "dataset-not-found"
    assert before.items() <= after.items()
    # A manifest under a number that the next dataset left free for it; and of the two tables, which it asked for its
    # lease once, the second may be ahead, which the next flush puts back.
    layout = again.dataset.layout
    ahead = layout.delta_log(layout.translog, history_of(again)[0].translog.version + 1)
    strays = {layout.snapshot(last + 1), *([ahead] if step == "statements committed" else [])}
    assert after.keys() - before.keys() <= strays
    assert seq_of(scene) == last
    assert history_of(again)[0].seq == last + 2
    check(again)


@ONE_DATABASE
def test_dataset_that_is_being_deleted_is_not_flushed_any_more(scene: Scene):
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


# Rows that cannot be written

POISON: list[tuple[dict[str, Any], str]] = [
    ({"schema": "NoSuchSchema"}, "schema"),
    ({"value": None}, "value"),
    ({"kind": 9}, "kind"),
    ({"id": b"short"}, "id"),
]


def poison(scene: Scene, commit: int, position: int, **values: Any) -> None:
    with scene.database.write() as connection:
        batch = connection.execute(select(journal_batches.c.id).where(journal_batches.c.commit == commit)).scalar_one()
        changed = connection.execute(
            update(journal).where(journal.c.batch == batch, journal.c.position == position).values(**values)
        )
        assert changed.rowcount == 1


@pytest.mark.contract("W2")
@pytest.mark.parametrize(("values", "reason"), POISON, ids=[reason for _, reason in POISON])
def test_row_that_cannot_be_written_is_set_aside_with_its_reason_and_the_rest_goes_on(
    scene: Scene, values: dict[str, Any], reason: str
):
    good, bad, better = (scene.new_statement(name) for name in ("a", "b", "c"))
    scene.with_history(1)
    commit = scene.write(good, bad, better)
    poison(scene, commit, 1, **values)
    scene.acknowledged[commit] = [good, better]
    consumed = sum(len(scene.acknowledged[each]) for each in unflushed_commits(scene)) + 1

    (made,) = scene.flush()

    with scene.database.read() as connection:
        (kept,) = connection.execute(select(journal_rejected)).all()
    counts = made.rows
    assert (counts.set_aside, len(made.set_aside)) == (1, 1)
    assert counts.added + counts.seen + counts.deleted + counts.set_aside == consumed
    assert reason in kept.reason
    assert (kept.reason, kept.batch, kept.position) == (
        made.set_aside[0].reason,
        made.set_aside[0].batch,
        1,
    )
    check(scene)


def test_row_set_aside_that_is_put_back_and_can_be_written_by_now_is_there(scene: Scene):
    bad = scene.new_statement("b")
    commit = scene.write(scene.new_statement("a"), bad)
    poison(scene, commit, 1, schema="NotYetKnown")
    scene.acknowledged[commit] = scene.acknowledged[commit][:1]
    scene.flush()
    with scene.database.write() as connection:
        kept = connection.execute(select(journal_rejected.c.event)).scalar_one()
        connection.execute(update(journal_rejected).values(event=kept | {"schema": bad["schema"]}))
        retried = rejected.retry(connection, scene.settings, scene.dataset, ADMIN, None)

    assert (retried.retried, retried.commit) == (1, commit + 1)
    scene.acknowledged[commit + 1] = [bad]
    check_now(scene)
    scene.flush()
    check(scene)


def test_row_set_aside_that_still_cannot_be_written_is_set_aside_again(scene: Scene):
    commit = scene.write(scene.new_statement("a"), scene.new_statement("b"))
    poison(scene, commit, 1, value=None)
    scene.acknowledged[commit] = scene.acknowledged[commit][:1]
    scene.flush()
    with scene.database.write() as connection:
        rejected.retry(connection, scene.settings, scene.dataset, ADMIN, None)
    scene.acknowledged[commit + 1] = []

    (made,) = scene.flush()

    assert (made.rows.set_aside, made.rows.added, made.content) == (1, 0, made.seq - 1)
    with scene.database.read() as connection:
        assert len(connection.execute(select(journal_rejected)).all()) == 1
    check(scene)


@pytest.mark.parametrize("step", ["manifest put", "recorded"])
def test_row_is_set_aside_once_whoever_records_the_snapshot(scene: Scene, step: str):
    commit = scene.write(scene.new_statement("a"), scene.new_statement("b"))
    poison(scene, commit, 1, value=None)
    scene.acknowledged[commit] = scene.acknowledged[commit][:1]
    with pytest.raises(Killed):
        scene.worker("dies", kill_at(step))()
    scene.expire_leases()

    scene.flush()

    with scene.database.read() as connection:
        assert len(connection.execute(select(journal_rejected)).all()) == 1
    check(scene)


# What the journal's head says


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_batch_that_commits_while_a_snapshot_is_being_recorded_is_known_to_wait(scene: Scene):
    scene.with_history(0)
    gate = Gate()
    with in_background(scene.worker("w", pause_at("manifest put", gate))) as flushing:
        gate.wait_arrived()
        with scene.database.write() as connection:
            late = scene.write_in(connection)
            gate.release()
            wait_for_a_lock(scene)
        flushing()

    assert [*unflushed_commits(scene)] == [late]
    check(scene)


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_write_that_waited_while_a_snapshot_was_recorded_is_newer_than_what_that_says_is_flushed(scene: Scene):
    scene.with_history(0)
    scene.flush()
    with ThreadPoolExecutor(1) as pool, scene.database.write() as connection:
        connection.execute(select(journal_head).with_for_update())
        pool.submit(scene.write)
        wait_for_a_lock(scene)
        segments.mark_done(connection, scene.dataset, 0, [], moved=False)

    with scene.database.read() as connection:
        at = {row.key: row.at for row in connection.execute(select(tags))}
    assert at[heads.LAST_UPDATED] > at[segments.LAST_FLUSHED]


def wait_for_a_lock(scene: Scene) -> None:
    """Return once a transaction waits for another."""

    def waits() -> int:
        with scene.database.read() as connection:
            return connection.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one()

    wait_until(waits, TIMEOUT_SECONDS)
