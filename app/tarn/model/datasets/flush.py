"""Interface between the worker loop and the flusher, and the result of a flush."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tarn.errors import TarnError
from tarn.model.datasets.snapshot import Snapshot

FlushProgress = Callable[[str, int, int], None]
"""Progress callback: a dataset's id, how many of its unflushed rows are in snapshots now, and their total."""


@dataclass(slots=True)
class FlushOutcome:
    """Outcome of the flush of one dataset: its new snapshots, oldest first, and the error that stopped it, if any."""

    snapshots: list[Snapshot] = field(default_factory=list)
    error: TarnError | None = None


class Flusher(Protocol):
    """Flushes committed events from the journal to snapshots."""

    def recover(self) -> None:
        """Complete what a dead process left unfinished; called once, before the first flush."""

    def due(self) -> list[str]:
        """Return the ids of the datasets whose unflushed rows exceed a limit of number, size or age."""

    def seconds_until_due(self) -> float:
        """Return the seconds until the oldest unflushed row reaches the limit of age: negative if it has, infinite
        if there is none."""

    def flush(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: FlushProgress
    ) -> Mapping[str, FlushOutcome]:
        """Flush these datasets in one round; return the outcomes by dataset id.

        A dataset that has nothing to flush gets no snapshot; one that was deleted may be missing in the result. Call
        `hold` between steps: it raises if the round must be aborted, and its exception must be propagated. An error
        that concerns all datasets is raised. Idempotent: called again after any error, it does the remaining work.
        """

    def warm_up(self) -> None:
        """Prepare for the first flush, in a thread of its own."""

    def tidy(self) -> None:
        """Clean up after flushes, when no caller waits for one."""

    def close(self) -> None:
        """Release all resources."""
