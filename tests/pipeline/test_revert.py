"""Revert: an older state again, or what one snapshot did taken back."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tarn.datasets.registry import Dataset
from tarn.errors import SnapshotNotFound
from tarn.lake import snapshots
from tarn.lake.commit import SnapshotPublisher
from tarn.model.job import CompactOptions, RevertOptions
from tarn.model.snapshot import Change, Snapshot
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.revert import Revert
from tarn.pipeline.jobs.rewrite import Rewriter

from tests.in_process_api import InProcessApi
from tests.pipeline.history import HISTORIES, Expected, Identity, head, shown, stored
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_fold import drawn
from tests.pipeline.test_rewrite import ignore, say

Flushing = Callable[[], list[Snapshot]]
Shown = dict[Identity, tuple[Any, ...]]


@pytest.fixture
def rewriting(house: InProcessApi, kernels: DirectKernels) -> Rewriter:
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    return Rewriter(services.database, services.store, publisher, lambda: kernels)


@pytest.fixture
def revert(house: InProcessApi, rewriting: Rewriter, kernels: DirectKernels) -> Revert:
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    return Revert(services.database, rewriting, flush)


def live(house: InProcessApi, dataset: Dataset, seq: int) -> Shown:
    store = house.services.store
    return shown(stored(store, dataset, snapshots.read(store, dataset, seq)))


def some(draw: random.Random) -> list[dict[str, Any]]:
    return [drawn(draw) for _ in range(draw.randrange(1, 8))]


@pytest.mark.parametrize("seed", HISTORIES)
def test_state_that_is_reverted_to_is_the_present_one_and_goes_on_from_there(
    house: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert, rewriting: Rewriter, seed: int
):
    draw = random.Random(seed)
    states: dict[int, Expected] = {}
    expected = Expected()
    for _ in range(4):
        batch = some(draw)
        say(house, dataset, batch)
        expected.commit(batch)
        flush()
        states[head(house, dataset).seq] = Expected(dict(expected.live))
        if draw.random() < 0.3:
            Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)
    target = draw.choice(sorted(states))
    late = some(draw)
    say(house, dataset, late)
    expected.commit(late)

    result = revert.run(dataset, RevertOptions(to=str(target), message="a bad crawl"), ignore)

    after = head(house, dataset)
    wanted = states[target]
    assert live(house, dataset, after.seq) == shown(wanted.live)
    assert after.rows.live == len(wanted.live)
    if result.snapshot is not None:
        assert (after.operation, after.message, after.content) == (Change.REVERT, "a bad crawl", after.seq)
        assert result.added == len(wanted.live.keys() - expected.live.keys())
        assert result.ended == len(expected.live.keys() - wanted.live.keys())
        assert revert.run(dataset, RevertOptions(to=str(target)), ignore).snapshot is None
    further = some(draw)
    say(house, dataset, further)
    wanted.commit(further)
    flush()
    assert live(house, dataset, head(house, dataset).seq) == shown(wanted.live)


def undone(before: Shown, done: Shown, present: Shown) -> Shown:
    """The present without what one snapshot did, where nothing changed it since."""
    back = {
        place
        for place in before.keys() | done.keys()
        if before.get(place) != done.get(place) and done.get(place) == present.get(place)
    }
    left = {place: row for place, row in present.items() if place not in back}
    bases = {(row[0], place[1]) for place, row in left.items() if row[3] == "id"}
    again = {
        place: before[place]
        for place in back & before.keys()
        if before[place][3] != "id" or (before[place][0], place[1]) not in bases
    }
    kept = {place: present[place] for place in back & before.keys() if place not in again and place in present}
    return left | again | kept


@pytest.mark.parametrize("seed", HISTORIES)
def test_undo_takes_back_what_one_snapshot_did_and_nothing_that_came_after(
    house: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert, rewriting: Rewriter, seed: int
):
    draw = random.Random(seed)
    for _ in range(3):
        say(house, dataset, some(draw))
        flush()
    done = draw.randrange(1, 4)
    if draw.random() < 0.3:
        Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)
    present = head(house, dataset)
    before = {} if done == 1 else live(house, dataset, done - 1)
    expected = undone(before, live(house, dataset, done), live(house, dataset, present.seq))

    result = revert.run(dataset, RevertOptions(undo=str(done)), ignore)

    after = head(house, dataset)
    found = live(house, dataset, after.seq)
    assert found == expected
    assert after.rows.live == len(found) == present.rows.live + result.added - result.ended
    further = some(draw)
    expected_later = Expected(stored(house.services.store, dataset, after))
    say(house, dataset, further)
    expected_later.commit(further)
    flush()
    assert live(house, dataset, head(house, dataset).seq) == shown(expected_later.live)


def test_write_that_was_not_flushed_when_an_undo_began_is_not_lost(
    house: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert
):
    said = drawn(random.Random(0)) | {"kind": 1}
    say(house, dataset, [said])
    flush()
    say(house, dataset, [said | {"last_seen": said["last_seen"] + 50}])

    revert.run(dataset, RevertOptions(undo="1"), ignore)

    assert set(live(house, dataset, head(house, dataset).seq)) == {(said["id"], said["origin"])}


def test_revert_to_a_snapshot_that_is_not_there_changes_nothing(
    house: InProcessApi, dataset: Dataset, flush: Flushing, revert: Revert
):
    say(house, dataset, [drawn(random.Random(0)) | {"kind": 1}])
    flush()

    with pytest.raises(SnapshotNotFound):
        revert.run(dataset, RevertOptions(to="7"), ignore)

    assert head(house, dataset).seq == 1
