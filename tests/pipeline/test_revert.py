"""Revert: restore an earlier state, or undo the changes of one snapshot."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tarn.datasets.registry import Dataset
from tarn.errors import SnapshotNotFound
from tarn.lake import snapshots
from tarn.lake.commit import SnapshotPublisher
from tarn.model.datasets.snapshot import Snapshot, SnapshotOperation
from tarn.model.work.job import CompactOptions, RevertOptions
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.revert import Revert
from tarn.pipeline.jobs.rewrite import Rewriter

from tests.in_process_api import InProcessApi
from tests.pipeline.history import HISTORIES, Expected, Identity, head, shown, stored
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_fold import drawn
from tests.pipeline.test_rewrite import ignore, write_batch

Flushing = Callable[[], list[Snapshot]]
VisibleFields = dict[Identity, tuple[Any, ...]]


@pytest.fixture
def rewriting(api: InProcessApi, kernels: DirectKernels) -> Rewriter:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    return Rewriter(services.database, services.store, publisher, lambda: kernels)


@pytest.fixture
def revert(api: InProcessApi, rewriting: Rewriter, kernels: DirectKernels) -> Revert:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    return Revert(services.database, rewriting, flush)


def live(api: InProcessApi, dataset: Dataset, seq: int) -> VisibleFields:
    store = api.services.store
    return shown(stored(store, dataset, snapshots.read(store, dataset, seq)))


def random_events(draw: random.Random) -> list[dict[str, Any]]:
    return [drawn(draw) for _ in range(draw.randrange(1, 8))]


@pytest.mark.parametrize("seed", HISTORIES)
def test_revert_restores_a_state_and_later_writes_apply_to_it(
    api: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert, rewriting: Rewriter, seed: int
):
    draw = random.Random(seed)
    states: dict[int, Expected] = {}
    expected = Expected()
    for _ in range(4):
        batch = random_events(draw)
        write_batch(api, dataset, batch)
        expected.commit(batch)
        flush()
        states[head(api, dataset).seq] = Expected(dict(expected.live))
        if draw.random() < 0.3:
            Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)
    target = draw.choice(sorted(states))
    later = random_events(draw)
    write_batch(api, dataset, later)
    expected.commit(later)

    result = revert.run(dataset, RevertOptions(to=str(target), message="a bad crawl"), ignore)

    after = head(api, dataset)
    target_state = states[target]
    assert live(api, dataset, after.seq) == shown(target_state.live)
    assert after.rows.live == len(target_state.live)
    if result.snapshot is not None:
        assert (after.operation, after.message, after.content) == (SnapshotOperation.REVERT, "a bad crawl", after.seq)
        assert result.added == len(target_state.live.keys() - expected.live.keys())
        assert result.ended == len(expected.live.keys() - target_state.live.keys())
        assert revert.run(dataset, RevertOptions(to=str(target)), ignore).snapshot is None
    further = random_events(draw)
    write_batch(api, dataset, further)
    target_state.commit(further)
    flush()
    assert live(api, dataset, head(api, dataset).seq) == shown(target_state.live)


def undone(before: VisibleFields, done: VisibleFields, present: VisibleFields) -> VisibleFields:
    """Return the present without the changes of one snapshot, except where later snapshots changed it."""
    reverted = {
        identity
        for identity in before.keys() | done.keys()
        if before.get(identity) != done.get(identity) and done.get(identity) == present.get(identity)
    }
    remaining = {identity: row for identity, row in present.items() if identity not in reverted}
    bases = {(row[0], identity[1]) for identity, row in remaining.items() if row[3] == "id"}
    restored = {
        identity: before[identity]
        for identity in reverted & before.keys()
        if before[identity][3] != "id" or (before[identity][0], identity[1]) not in bases
    }
    unchanged = {
        identity: present[identity]
        for identity in reverted & before.keys()
        if identity not in restored and identity in present
    }
    return remaining | restored | unchanged


@pytest.mark.parametrize("seed", HISTORIES)
def test_undo_reverts_the_changes_of_one_snapshot_except_where_later_ones_changed_them(
    api: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert, rewriting: Rewriter, seed: int
):
    draw = random.Random(seed)
    for _ in range(3):
        write_batch(api, dataset, random_events(draw))
        flush()
    done = draw.randrange(1, 4)
    if draw.random() < 0.3:
        Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)
    present = head(api, dataset)
    before = {} if done == 1 else live(api, dataset, done - 1)
    expected = undone(before, live(api, dataset, done), live(api, dataset, present.seq))

    result = revert.run(dataset, RevertOptions(undo=str(done)), ignore)

    after = head(api, dataset)
    actual = live(api, dataset, after.seq)
    assert actual == expected
    assert after.rows.live == len(actual) == present.rows.live + result.added - result.ended
    further = random_events(draw)
    expected_later = Expected(stored(api.services.store, dataset, after))
    write_batch(api, dataset, further)
    expected_later.commit(further)
    flush()
    assert live(api, dataset, head(api, dataset).seq) == shown(expected_later.live)


@pytest.mark.both_databases
def test_write_not_flushed_when_an_undo_began_is_not_lost(
    api: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert
):
    event = drawn(random.Random(0)) | {"kind": 1}
    write_batch(api, dataset, [event])
    flush()
    write_batch(api, dataset, [event | {"last_seen": event["last_seen"] + 50}])

    revert.run(dataset, RevertOptions(undo="1"), ignore)

    assert set(live(api, dataset, head(api, dataset).seq)) == {(event["id"], event["origin"])}


def test_revert_to_a_missing_snapshot_changes_nothing(
    api: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert
):
    write_batch(api, dataset, [drawn(random.Random(0)) | {"kind": 1}])
    flush()

    with pytest.raises(SnapshotNotFound):
        revert.run(dataset, RevertOptions(to="7"), ignore)

    assert head(api, dataset).seq == 1
