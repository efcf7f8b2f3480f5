"""Retention: which snapshots a vacuum keeps, by the dataset's policy or by the options of the request."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Self

from sqlalchemy import Connection, func, select

from tarn.datasets.registry import Dataset
from tarn.db.tables import refs, snapshots
from tarn.model.datasets.dataset import Retention
from tarn.model.work.job import FLOOR_HOURS, VacuumOptions

MAX_COUNT = 1 << 31
"""The limit for a count of snapshots: more than there can be."""


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """A retention rule: keep the newest `count` snapshots, and all that are younger than `hours`."""

    count: int
    hours: float
    unnamed_hours: float
    """Hours for which a file that no snapshot names is kept: a build may be about to publish it."""
    erases: bool = False
    """Whether every trace of expired data must be deleted, and not only what takes space."""

    @classmethod
    def of(cls, policy: Retention, options: VacuumOptions) -> Self:
        """Return the rule of the dataset's policy, or one by age alone if the options set `retention_hours`."""
        if options.retention_hours is not None:
            return cls(1, options.retention_hours, options.retention_hours)
        return cls(min(policy.count, MAX_COUNT), policy.days * 24, 0 if options.override_floor else FLOOR_HOURS)

    def expired_count(self, moments: Sequence[datetime], moment: datetime) -> int:
        """Return how many of these creation times, oldest first, expire."""
        past = before(moment, self.hours)
        return sum(created <= past for created in moments[: -self.count])


PRESENT = RetentionRule(1, 0, 0, erases=True)
"""Keep only the head, and delete every trace of earlier data."""


def before(moment: datetime, hours: float) -> datetime:
    """Return the moment so many hours earlier, or the minimum of `datetime`."""
    try:
        return moment - timedelta(hours=hours)
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC)


class HistoryStart(NamedTuple):
    """The number of the oldest kept snapshot: now, and after the next vacuum."""

    now: int
    then: int


def first_kept(connection: Connection, dataset: Dataset) -> int | None:
    """Return the oldest snapshot that is not expired, or None if there are no snapshots."""
    return connection.execute(
        select(func.min(snapshots.c.seq)).where(snapshots.c.dataset_id == dataset.id, snapshots.c.expired.is_(None))
    ).scalar()


def history_start(
    connection: Connection, dataset: Dataset, keep: RetentionRule, moment: datetime
) -> HistoryStart | None:
    """Return where history begins now and after a vacuum, or None if there are no snapshots.

    Kept are the snapshots that `keep` selects, and everything from the oldest snapshot that a ref names, so
    that history has no gaps. The snapshot that the vacuum itself makes counts among the newest, but does not cause a
    vacuum.
    """
    first = first_kept(connection, dataset)
    if first is None:
        return None
    then = _first_within(connection, dataset, keep.count, before(moment, keep.hours), first)
    if then > first:
        then = _first_within(connection, dataset, keep.count - 1, before(moment, keep.hours), first)
    return HistoryStart(first, max(first, latest_start(connection, dataset, then)))


def latest_start(connection: Connection, dataset: Dataset, then: int) -> int:
    """Return the latest possible beginning of history up to `then`: not after the oldest snapshot that a ref names."""
    oldest: int | None = connection.execute(
        select(func.min(refs.c.seq)).where(refs.c.dataset_id == dataset.id)
    ).scalar()
    return then if oldest is None else min(then, oldest)


def _first_within(connection: Connection, dataset: Dataset, count: int, past: datetime, first: int) -> int:
    """Return the oldest snapshot that is among the newest `count`, or younger than `past`."""
    kept = snapshots.c.dataset_id == dataset.id, snapshots.c.expired.is_(None)
    uncounted: int | None = connection.execute(
        select(snapshots.c.seq).where(*kept).order_by(snapshots.c.seq.desc()).offset(count).limit(1)
    ).scalar()
    # Numbers and creation times increase together.
    old: int | None = connection.execute(
        select(func.max(snapshots.c.seq)).where(*kept, snapshots.c.created <= past)
    ).scalar()
    return first if uncounted is None or old is None else max(first, min(uncounted, old) + 1)
