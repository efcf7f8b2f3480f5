"""Fixtures of the simulation. `SIM_SEEDS=500` runs as many seeds, `SIM_SEED=17` only that one."""

import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.simulation import Simulation

# Without the prefix of Tarn's settings: no process starts with an unknown setting.
ONLY_SEED = os.environ.get("SIM_SEED")
SEEDS = range(int(os.environ.get("SIM_SEEDS", "200"))) if ONLY_SEED is None else [int(ONLY_SEED)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", SEEDS)


@pytest.fixture(scope="session")
def simulation(tmp_path_factory: pytest.TempPathFactory, kernel_process: ProcessPoolExecutor) -> Simulation:
    return Simulation.build(tmp_path_factory.mktemp("simulation"), kernel_process)
