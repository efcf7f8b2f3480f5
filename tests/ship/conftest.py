"""Fixtures with the rendered chart, for every value set and component."""

import pytest

from tests.ship import chart
from tests.ship.chart import COMPONENTS, VALUE_SETS, Release


@pytest.fixture(params=VALUE_SETS, ids=lambda path: path.stem)
def release(request) -> Release:
    return chart.release(request.param)


@pytest.fixture(params=COMPONENTS)
def component(request) -> str:
    return request.param
