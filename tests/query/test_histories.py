"""Random histories, read in every way at every step and compared with a model that applies one event at a time.

`HISTORIES=500` plays as many on each database.
"""

import os
from datetime import timedelta
from itertools import pairwise

from hypothesis import HealthCheck, Phase, given, settings
from tarn.model.datasets.ranges import EVERYTHING, Range
from tarn.model.ftm.statistics import Statistics
from tarn.query import diff
from tarn.query.incremental_statistics import count_changed
from tarn.query.reader import Reading, RequestedState
from tarn.query.statistics import count_entities

from tests.in_process_api import InProcessApi
from tests.pipeline.history import stored
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import HistoryPlayer
from tests.query.model import Step, histories, line
from tests.query.reads import Reads

# Not a setting's name: unknown settings make every start fail.
EXAMPLES = int(os.environ.get("HISTORIES", "4"))

# A history takes seconds, so shrinking a failing one would take minutes.
history_settings = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
fewer_histories = settings(history_settings, max_examples=-(-EXAMPLES // 3))


@history_settings
@given(history=histories)
def test_every_read_after_any_history_equals_the_model_and_every_snapshot_its_former_state(
    api: InProcessApi,
    kernels: DirectKernels,
    history: list[Step],
):
    check_history(api, kernels, history)


def check_history(api: InProcessApi, kernels: DirectKernels, history: list[Step]) -> None:
    """Play a history, and compare every read after every step, and every snapshot at the end, with the model."""
    player = HistoryPlayer.begin(api, kernels)
    reads = Reads(api.services.reader, player.dataset)
    for _ in player.play(history):
        reads.check_basic_reads(player.model)
    reads.check(player.model)
    reads.check_counts(player.model)
    reads.check_basic_reads(player.head, RequestedState(fresh="snapshot"))
    player.flush()
    reads.check(player.model)
    check_past(player, reads)
    check_differences(player, reads)


def check_past(player: HistoryPlayer, reads: Reads) -> None:
    """Check every snapshot by each of its names."""
    for snapshot, model in player.past:
        at = RequestedState(at=str(snapshot.seq))
        reads.check_basic_reads(model, at)
        live = stored(player.api.services.store, player.dataset, snapshot)
        assert reads.read(_counted, player, at) == len(live) == len(model.rows) == snapshot.rows.live
        a_little_later = snapshot.created + timedelta(microseconds=1)
        for name in (snapshot.id, snapshot.created.isoformat(), a_little_later.isoformat()):
            assert reads.read(_resolved, player, RequestedState(at=name)) == snapshot.id


def check_differences(player: HistoryPlayer, reads: Reads) -> None:
    """Check the diff of each snapshot, and the diff over all of them."""
    pairs = [*pairwise(player.past), *([(player.past[0], player.past[-1])] if player.past else [])]
    for (one, former), (other, latter) in pairs:
        differences = reads.read(_differences, player, one.id, other.id)
        before, after = former.entities, latter.entities
        expected = [("ADD", name, line(after[name])) for name in after if name not in before]
        expected += [("DEL", name, line(before[name])) for name in before if name not in after]
        expected += [("MOD", name, line(after[name])) for name in after if before.get(name, after[name]) != after[name]]
        assert differences == expected
        names = sorted(before.keys() | after.keys())
        for cut in names[len(names) // 2 : len(names) // 2 + 1]:
            parts = [
                reads.read(_differences, player, one.id, other.id, keys) for keys in (Range("", cut), Range(cut, None))
            ]
            assert sorted(parts[0] + parts[1]) == sorted(expected)
            assert all((name < cut) == (part is parts[0]) for part in parts for _, name, _ in part)
        incremental, counted_anew = reads.read(_recounted, player, one.id, other.id)
        assert incremental in (None, counted_anew)


def _recounted(reading: Reading, player: HistoryPlayer, one: str, other: str) -> tuple[Statistics | None, Statistics]:
    """Return the statistics of the latter derived incrementally from the former, if possible, and those
    counted anew.
    """
    states = diff.resolve_pair(reading, player.dataset, one, other)
    statistics = []
    for view in states:
        reading.show(view)
        statistics.append(count_entities(reading.duck))
    change = count_changed(reading.duck, reading.store, states)
    assert change is not None
    return statistics[0].replaced(change.former, change.present), statistics[1]


def _differences(
    reading: Reading, player: HistoryPlayer, one: str, other: str, within: Range = EVERYTHING
) -> list[diff.Difference]:
    states = diff.resolve_pair(reading, player.dataset, one, other)
    batches = diff.differences(reading.duck, reading.store, states, within=within)
    return [difference for batch in batches for difference in batch]


def _counted(reading: Reading, player: HistoryPlayer, state: RequestedState) -> int:
    reading.everything(player.dataset, state)
    ((rows,),) = reading.duck.execute("SELECT count(*) FROM live").fetchall()
    return rows


def _resolved(reading: Reading, player: HistoryPlayer, state: RequestedState) -> str | None:
    return reading.view(player.dataset, state).snapshot_id
