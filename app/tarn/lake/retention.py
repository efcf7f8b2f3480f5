"""What is kept of the past: by a dataset's policy, or as somebody asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Self

from sqlalchemy import Connection, func, select

from tarn.datasets.registry import Dataset
from tarn.db.tables import refs, snapshots
from tarn.model.dataset import Retention
from tarn.model.job import FLOOR_HOURS, VacuumOptions

MAX_COUNT = 1 << 31
"""Snapshots that a count is taken for at most: more than there are."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept: the newest `count`, and all that is younger than `hours`."""

    count: int
    hours: float
    unnamed_hours: float
    """How long a file stays that no snapshot names: a build may be about to publish it."""
    erases: bool = False
    """Whether nothing of what is given up may be left anywhere, and not only what takes room."""

    @classmethod
    def of(cls, policy: Retention, options: VacuumOptions) -> Self:
        """As the dataset's policy says, or by age alone where that is asked for."""
        if options.retention_hours is not None:
            return cls(1, options.retention_hours, options.retention_hours)
        return cls(min(policy.count, MAX_COUNT), policy.days * 24, 0 if options.override_floor else FLOOR_HOURS)

    def given_up(self, moments: Sequence[datetime], moment: datetime) -> int:
        """How many of these are given up, which come oldest first."""
        past = before(moment, self.hours)
        return sum(one <= past for one in moments[: -self.count])


PRESENT = Keep(1, 0, 0, erases=True)
"""Nothing but the present, and no trace of the past."""


def before(moment: datetime, hours: float) -> datetime:
    """So many hours earlier, or the beginning of time."""
    try:
        return moment - timedelta(hours=hours)
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


class HistoryStart(NamedTuple):
    """Where history begins: now, and from the next vacuum's snapshot on."""

    now: int
    then: int


def first_kept(connection: Connection, dataset: Dataset) -> int | None:
    """The oldest snapshot that is not given up; None: there is none at all."""
    return connection.execute(
        select(func.min(snapshots.c.seq)).where(snapshots.c.dataset_id == dataset.id, snapshots.c.expired.is_(None))
    ).scalar()


def history_start(connection: Connection, dataset: Dataset, keep: Keep, moment: datetime) -> HistoryStart | None:
    """What a vacuum would give up; None: there are no snapshots.

    Kept are those that `keep` says and everything from the oldest one on that a ref names, so that history has no
    holes. The snapshot that the vacuum itself makes counts among the newest, but is no reason to make one.
    """
    first = first_kept(connection, dataset)
    if first is None:
        return None
    then = _first_within(connection, dataset, keep.count, before(moment, keep.hours), first)
    if then > first:
        then = _first_within(connection, dataset, keep.count - 1, before(moment, keep.hours), first)
    return HistoryStart(first, max(first, latest_start(connection, dataset, then)))


def latest_start(connection: Connection, dataset: Dataset, then: int) -> int:
    """Where history can begin at most, if it is to begin with a number: with the oldest one that a ref names."""
    oldest: int | None = connection.execute(
        select(func.min(refs.c.seq)).where(refs.c.dataset_id == dataset.id)
    ).scalar()
    return then if oldest is None else min(then, oldest)


def _first_within(connection: Connection, dataset: Dataset, count: int, past: datetime, first: int) -> int:
    """The oldest one that is among the newest so many, or younger than a moment."""
    kept = snapshots.c.dataset_id == dataset.id, snapshots.c.expired.is_(None)
    uncounted: int | None = connection.execute(
        select(snapshots.c.seq).where(*kept).order_by(snapshots.c.seq.desc()).offset(count).limit(1)
    ).scalar()
    # Numbers and moments rise together.
    old: int | None = connection.execute(
        select(func.max(snapshots.c.seq)).where(*kept, snapshots.c.created <= past)
    ).scalar()
    return first if uncounted is None or old is None else max(first, min(uncounted, old) + 1)
