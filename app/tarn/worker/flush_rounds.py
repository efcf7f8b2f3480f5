"""Rounds of flushing: many datasets at once, and none of them held up by another that cannot be flushed."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from tarn.errors import Locked, TarnError, Unavailable
from tarn.model.backoff import delays
from tarn.model.flush import Flushed, Flusher, Moved
from tarn.model.job import RETRY_BASE, RETRY_CAP, Stopped, upper_half

log = structlog.get_logger(__name__)

Outcome = Sequence[Flushed] | Exception


@dataclass(slots=True)
class _Backoff:
    """A dataset that could not be flushed: how long it is left alone, and whether it is kept apart from others."""

    waits: Iterator[float] = field(default_factory=lambda: delays(RETRY_BASE, RETRY_CAP, draw=upper_half))
    until: float = 0
    apart: bool = False


class Rounds:
    """What the worker's loop flushes with."""

    def __init__(self, flusher: Flusher, clock: Callable[[], float] = time.monotonic) -> None:
        self._flusher = flusher
        self._clock = clock
        self._troubles: dict[str, _Backoff] = {}

    def due(self) -> list[str]:
        """Datasets to be flushed unasked. One that failed is left alone for a while, longer each time."""
        try:
            found = self._flusher.due()
        except Exception:  # jobs that ask for a flush need not know what is due
            log.exception("cannot tell what is due to be flushed")
            return []
        return [dataset for dataset in found if self._trouble(dataset).until <= self._clock()]

    def flush(self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: Moved) -> dict[str, Outcome]:
        """Flush these datasets, each with its snapshots or the error that kept it from having them.

        All at once; if that fails, each by itself, so that nobody fails for another's sake, except where nothing
        answers: then there is no point. One that failed by itself stays apart until it succeeds. Raises what `hold`
        raises.
        """
        apart = [dataset for dataset in dataset_ids if self._trouble(dataset).apart]
        together = [dataset for dataset in dataset_ids if dataset not in apart]
        outcomes: dict[str, Outcome] = {}
        if together:
            try:
                outcomes |= self._settled(together, self._flusher.flush(together, hold, moved))
            except Stopped:
                raise
            except Exception as error:
                log.exception("a round of flushing failed", datasets=len(together))
                if len(together) == 1 or isinstance(error, Unavailable):
                    self._leave_alone(together, apart=not isinstance(error, Unavailable))
                    outcomes |= dict.fromkeys(together, error)
                else:
                    apart = [*together, *apart]
        for dataset in apart:
            outcomes |= self._flush_apart(dataset, hold, moved)
        return outcomes

    def _flush_apart(self, dataset: str, hold: Callable[[], None], moved: Moved) -> dict[str, Outcome]:
        try:
            return self._settled([dataset], self._flusher.flush([dataset], hold, moved))
        except Stopped:
            raise
        except Exception as error:
            log.exception("a dataset could not be flushed", dataset_id=dataset)
            self._leave_alone([dataset], apart=not isinstance(error, Unavailable))
            return {dataset: error}

    def _settled(
        self, dataset_ids: Sequence[str], flushed: Mapping[str, Sequence[Flushed] | TarnError]
    ) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for dataset in dataset_ids:
            outcomes[dataset] = outcome = flushed.get(dataset, ())
            if isinstance(outcome, Locked):
                log.info("a dataset is taken, and is flushed later", dataset_id=dataset)
                self._leave_alone([dataset])
            elif isinstance(outcome, Exception):
                log.error("a dataset could not be flushed", dataset_id=dataset, exc_info=outcome)
                self._leave_alone([dataset])
            else:
                self._troubles.pop(dataset, None)
        return outcomes

    def _leave_alone(self, dataset_ids: Sequence[str], apart: bool = False) -> None:
        for dataset in dataset_ids:
            trouble = self._troubles.setdefault(dataset, _Backoff())
            trouble.until = self._clock() + next(trouble.waits)
            trouble.apart = apart

    def _trouble(self, dataset: str) -> _Backoff:
        return self._troubles.get(dataset) or _Backoff()
