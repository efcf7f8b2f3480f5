"""A stage for plays, and which of them are given: `SIM_SEEDS=500` of them, or `SIM_SEED=17` alone."""

import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.play import Stage

# No names of settings: an unknown one of those refuses every start.
ONE = os.environ.get("SIM_SEED")
SEEDS = range(int(os.environ.get("SIM_SEEDS", "200"))) if ONE is None else [int(ONE)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", SEEDS)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory, kernel_process: ProcessPoolExecutor) -> Stage:
    return Stage.build(tmp_path_factory.mktemp("stage"), kernel_process)
