"""Random histories, read in every way at every step and compared with a model that applies one event at a time.

`HISTORIES=500` plays as many on each database.
"""

import os
from datetime import timedelta
from itertools import pairwise

from hypothesis import HealthCheck, Phase, given, settings
from tarn.model.ranges import EVERYTHING, Range
from tarn.model.statistics import Statistics
from tarn.query import diff
from tarn.query.incremental_statistics import count_changed
from tarn.query.reader import Reading, RequestedState
from tarn.query.statistics import count_entities

from tests.in_process_api import InProcessApi
from tests.pipeline.history import stored
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import Story
from tests.query.model import Step, histories, line
from tests.query.reads import Reads

# Not a setting's name: unknown settings make every start fail.
EXAMPLES = int(os.environ.get("HISTORIES", "6"))

# A history takes seconds, so shrinking a failing one would take minutes.
played = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
few = settings(played, max_examples=-(-EXAMPLES // 3))


@played
@given(history=histories)
def test_every_read_after_any_history_equals_the_model_and_every_snapshot_its_former_state(
    api: InProcessApi,
    kernels: DirectKernels,
    history: list[Step],
):
    check_history(api, kernels, history)


def check_history(api: InProcessApi, kernels: DirectKernels, history: list[Step]) -> None:
    """Play a history, and compare every read after every step, and every snapshot at the end, with the model."""
    story = Story.begin(api, kernels)
    reads = Reads(api.services.reader, story.dataset)
    for _ in story.play(history):
        reads.check_whole(story.model)
    reads.check(story.model)
    reads.check_counts(story.model)
    reads.check_whole(story.head, RequestedState(fresh="snapshot"))
    story.flush()
    reads.check(story.model)
    check_past(story, reads)
    check_differences(story, reads)


def check_past(story: Story, reads: Reads) -> None:
    """Check every snapshot by each of its names."""
    for snapshot, model in story.past:
        at = RequestedState(at=str(snapshot.seq))
        reads.check_whole(model, at)
        live = stored(story.api.services.store, story.dataset, snapshot)
        assert reads.read(_counted, story, at) == len(live) == len(model.rows) == snapshot.rows.live
        a_little_later = snapshot.created + timedelta(microseconds=1)
        for name in (snapshot.id, snapshot.created.isoformat(), a_little_later.isoformat()):
            assert reads.read(_resolved, story, RequestedState(at=name)) == snapshot.id


def check_differences(story: Story, reads: Reads) -> None:
    """Check the diff of each snapshot, and the diff over all of them."""
    pairs = [*pairwise(story.past), *([(story.past[0], story.past[-1])] if story.past else [])]
    for (one, former), (other, latter) in pairs:
        found = reads.read(_differences, story, one.id, other.id)
        before, after = former.entities, latter.entities
        expected = [("ADD", name, line(after[name])) for name in after if name not in before]
        expected += [("DEL", name, line(before[name])) for name in before if name not in after]
        expected += [("MOD", name, line(after[name])) for name in after if before.get(name, after[name]) != after[name]]
        assert found == expected
        names = sorted(before.keys() | after.keys())
        for cut in names[len(names) // 2 : len(names) // 2 + 1]:
            parts = [
                reads.read(_differences, story, one.id, other.id, keys) for keys in (Range("", cut), Range(cut, None))
            ]
            assert sorted(parts[0] + parts[1]) == sorted(expected)
            assert all((name < cut) == (part is parts[0]) for part in parts for _, name, _ in part)
        told, counted_anew = reads.read(_recounted, story, one.id, other.id)
        assert told in (None, counted_anew)


def _recounted(reading: Reading, story: Story, one: str, other: str) -> tuple[Statistics | None, Statistics]:
    """Return the statistics of the latter derived incrementally from the former, if possible, and those
    counted anew.
    """
    states = diff.between(reading, story.dataset, one, other)
    whole = []
    for view in states:
        reading.show(view)
        whole.append(count_entities(reading.duck))
    change = count_changed(reading.duck, reading.store, states)
    assert change is not None
    return whole[0].replaced(change.former, change.present), whole[1]


def _differences(
    reading: Reading, story: Story, one: str, other: str, within: Range = EVERYTHING
) -> list[diff.Difference]:
    states = diff.between(reading, story.dataset, one, other)
    found = diff.differences(reading.duck, reading.store, states, within=within)
    return [difference for some in found for difference in some]


def _counted(reading: Reading, story: Story, state: RequestedState) -> int:
    reading.everything(story.dataset, state)
    ((rows,),) = reading.duck.execute("SELECT count(*) FROM live").fetchall()
    return rows


def _resolved(reading: Reading, story: Story, state: RequestedState) -> str | None:
    return reading.view(story.dataset, state).snapshot_id
