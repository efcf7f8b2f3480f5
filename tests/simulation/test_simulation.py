"""The commit protocol under random schedules and faults: no acknowledged write is lost or duplicated."""

import pytest

from tests.simulation.simulation import Simulation


@pytest.mark.contract("H1", "H7")
def test_simulation_of_a_random_schedule_keeps_all_invariants(simulation: Simulation, seed: int):
    simulation.run(seed)


def test_simulation_of_one_seed_is_repeatable(simulation: Simulation):
    assert simulation.run(5) == simulation.run(5)
