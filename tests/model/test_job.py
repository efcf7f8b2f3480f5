"""When a job is tried again."""

from datetime import UTC, datetime, timedelta

import pytest
from tarn.model.job import LONG_WAIT, MOST_ATTEMPTS, RETRY_BASE, RETRY_CAP, Operation

T0 = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("attempts", "bound"), [(1, RETRY_BASE), (3, 4 * RETRY_BASE), (MOST_ATTEMPTS - 1, RETRY_CAP)])
def test_error_that_passes_is_waited_for_longer_and_longer(attempts: int, bound: float):
    again = Operation.DELETE.next_try(attempts, retryable=True, moment=T0)

    assert again is not None
    assert timedelta(seconds=bound / 2) <= again - T0 <= timedelta(seconds=bound)


@pytest.mark.parametrize(("attempts", "retryable"), [(1, False), (MOST_ATTEMPTS, True), (1000, True)])
def test_what_cannot_be_done_soon_is_given_up_or_if_it_must_be_done_waits_long(
    attempts: int, retryable: bool, monkeypatch
):
    must = Operation.DELETE.next_try(attempts, retryable, T0)
    monkeypatch.setattr(Operation, "never_given_up", property(lambda _: False))
    may = Operation.DELETE.next_try(attempts, retryable, T0)

    assert (must, may) == (T0 + LONG_WAIT, None)
