"""Flush rounds: flush many datasets in one Spark job without letting one failing dataset block the others."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from tarn.errors import Internal, Locked, TarnError, Unavailable
from tarn.model.datasets.flush import Flusher, FlushOutcome, FlushProgress
from tarn.model.work.backoff import delays
from tarn.model.work.job import RETRY_BASE, RETRY_CAP, JobStopped, upper_half

log = structlog.get_logger(__name__)

DUE_POLL = 0.5
"""Seconds between two queries for due datasets while rows wait for a flush."""

FAILED = "the job failed; see the worker's log for the cause"


@dataclass(slots=True)
class _Backoff:
    """The back-off of a dataset whose last flush failed, and whether it is flushed separately from other datasets."""

    delays: Iterator[float] = field(default_factory=lambda: delays(RETRY_BASE, RETRY_CAP, draw=upper_half))
    until: float = 0
    separate: bool = False


class FlushRounds:
    """Flush rounds with back-off for each dataset; used by the worker's loop."""

    def __init__(self, flusher: Flusher, clock: Callable[[], float] = time.monotonic) -> None:
        self._flusher = flusher
        self._clock = clock
        self._backoffs: dict[str, _Backoff] = {}

    def due(self) -> list[str]:
        """Return the datasets that are due for a flush without a job. One that failed is skipped for a while, longer
        each time."""
        try:
            dataset_ids = self._flusher.due()
        except Exception:  # flush jobs can run although the due datasets are unknown
            log.exception("cannot query the datasets that are due for a flush")
            return []
        return [dataset for dataset in dataset_ids if self._backoff(dataset).until <= self._clock()]

    def seconds_until_due(self) -> float:
        """Return the seconds after which to query for due datasets again.

        While rows wait for a flush, this is `DUE_POLL` at most: datasets reach the limits of rows and size without a
        notification.
        """
        try:
            seconds = self._flusher.seconds_until_due()
        except Exception:  # the worker polls
            log.exception("cannot query when the next dataset is due for a flush")
            return DUE_POLL
        # One that is overdue failed, and is skipped for a while.
        return seconds if seconds == math.inf else min(max(seconds, 0.0) or DUE_POLL, DUE_POLL)

    def flush(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: FlushProgress
    ) -> dict[str, FlushOutcome]:
        """Flush these datasets. Returns the outcome of each.

        1. All datasets that are not marked as separate are flushed in one Spark job.
        2. If that fails, each is flushed separately, so that none fails because of another; but not if storage,
           database or Spark are unavailable, as that would fail, too.
        3. A dataset that failed when flushed alone stays separate until it succeeds.

        Raises what `hold` raises.
        """
        separate = [dataset for dataset in dataset_ids if self._backoff(dataset).separate]
        together = [dataset for dataset in dataset_ids if dataset not in separate]
        outcomes = self._flush_round(together, hold, moved) if together else {}
        if outcomes is None:
            outcomes, separate = {}, [*together, *separate]
        for dataset in separate:
            outcomes |= self._flush_round([dataset], hold, moved) or {}
        return outcomes

    def _flush_round(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: FlushProgress
    ) -> dict[str, FlushOutcome] | None:
        """Flush these datasets in one Spark job. Returns None if it failed and each must be flushed separately."""
        try:
            flushed = self._flusher.flush(dataset_ids, hold, moved)
        except JobStopped:
            raise
        except Exception as error:
            log.exception("a flush round failed", datasets=len(dataset_ids))
            is_unavailable = isinstance(error, Unavailable)
            if len(dataset_ids) > 1 and not is_unavailable:
                return None
            for dataset in dataset_ids:
                self._back_off(dataset, separate=not is_unavailable)
            problem = error if isinstance(error, TarnError) else Internal(FAILED)
            return {dataset: FlushOutcome(error=problem) for dataset in dataset_ids}
        outcomes = {dataset: flushed.get(dataset) or FlushOutcome() for dataset in dataset_ids}
        for dataset, outcome in outcomes.items():
            if outcome.error is None:
                self._backoffs.pop(dataset, None)
                continue
            self._back_off(dataset)
            if isinstance(outcome.error, Locked):
                log.info("the lease of a dataset is held by another worker; the flush is retried", dataset_id=dataset)
            else:
                log.error("a dataset could not be flushed", dataset_id=dataset, exc_info=outcome.error)
        return outcomes

    def _back_off(self, dataset: str, separate: bool = False) -> None:
        backoff = self._backoffs.setdefault(dataset, _Backoff())
        backoff.until = self._clock() + next(backoff.delays)
        backoff.separate = separate

    def _backoff(self, dataset: str) -> _Backoff:
        return self._backoffs.get(dataset) or _Backoff()
