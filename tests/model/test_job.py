"""Retries of jobs."""

from datetime import UTC, datetime, timedelta

import pytest
from tarn.model.work.job import LONG_WAIT, MOST_ATTEMPTS, RETRY_BASE, RETRY_CAP, Operation

T0 = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("attempts", "bound"), [(1, RETRY_BASE), (3, 4 * RETRY_BASE), (MOST_ATTEMPTS - 1, RETRY_CAP)])
def test_delay_after_a_retryable_error_grows_up_to_a_bound(attempts: int, bound: float):
    again = Operation.DELETE.next_try(attempts, retryable=True, moment=T0)

    assert again is not None
    assert timedelta(seconds=bound / 2) <= again - T0 <= timedelta(seconds=bound)


@pytest.mark.parametrize(("attempts", "retryable"), [(1, False), (MOST_ATTEMPTS, True), (1000, True)])
def test_job_without_attempts_left_fails_unless_its_operation_must_complete(
    attempts: int, retryable: bool, monkeypatch
):
    must = Operation.DELETE.next_try(attempts, retryable, T0)
    monkeypatch.setattr(Operation, "never_given_up", property(lambda _: False))
    may = Operation.DELETE.next_try(attempts, retryable, T0)

    assert (must, may) == (T0 + LONG_WAIT, None)
