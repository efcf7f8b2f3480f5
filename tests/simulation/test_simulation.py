"""The protocol under many schedules: nothing acknowledged is lost or twice, whoever dies or stands still where."""

import pytest

from tests.simulation.play import Stage


@pytest.mark.contract("H1", "H7")
def test_play_of_workers_clients_and_readers_ends_with_everything_once(stage: Stage, seed: int):
    stage.play(seed)


def test_play_of_one_seed_is_the_same_every_time(stage: Stage):
    assert stage.play(5) == stage.play(5)
