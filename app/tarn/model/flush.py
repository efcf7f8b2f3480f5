"""Flushing as the worker's loop sees it: what it asks of whoever does it, and what comes back."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tarn.errors import TarnError

Moved = Callable[[str, int, int], None]
"""Told of a dataset's id how many of the rows that waited are in snapshots by now, and how many there were."""


class Flushed(NamedTuple):
    """A snapshot that a flush made: of which dataset, under which number and id, with how many new statements."""

    dataset: str
    seq: int
    id: str
    statements: int


class Flusher(Protocol):
    """Moves what waits in the journal into snapshots."""

    def recover(self) -> None:
        """Finish what a dead process left halfway; called once, before anything is flushed."""

    def due(self) -> list[str]:
        """Ids of the datasets of which so much waits, or so long, that they are to be flushed unasked."""

    def flush(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: Moved
    ) -> Mapping[str, Sequence[Flushed] | TarnError]:
        """Flush these datasets in one round: by dataset id, the snapshots that were made, oldest first, or why not.

        A dataset of which nothing waits, or that is gone, makes none. `hold` is to be called between steps: it raises
        when the round is to be given up, and what it raises is to be let through. What fails for all of them is raised.
        Called again after any error it does what is left to do.
        """

    def tidy(self) -> None:
        """Clear away what flushes left, once nobody waits for them any more."""

    def close(self) -> None:
        """Let go of whatever it holds."""
