"""Exponential backoff."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st
from tarn.model.work.backoff import delays


def test_bounds_double_up_to_the_cap():
    bounds = list(islice(delays(0.01, 2.0, draw=max), 10))

    assert bounds == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0]


@given(st.floats(0.001, 1), st.floats(1, 60))
def test_every_delay_is_between_zero_and_the_cap(base: float, cap: float):
    assert all(0 <= delay <= cap for delay in islice(delays(base, cap), 50))
