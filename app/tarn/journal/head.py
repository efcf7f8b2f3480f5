"""Journal head: one row per dataset that assigns commit numbers and records the open segment.

A batch takes its number by updating that row in the transaction that makes it visible. So numbers increase in the order
in which batches become visible, and a batch is in the segment that was open then: rotation updates the same row.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy import BigInteger, Connection, bindparam, case, exists, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.notifications import JOURNAL, publish
from tarn.db.tables import Moment, datasets, journal_head, tags
from tarn.errors import Backpressure, DatasetNotFound
from tarn.journal.parsing.event_buffer import Chunk
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE
from tarn.settings import Settings

LAST_UPDATED = "journal/last_updated"
RETRY_SECONDS = 10


class CommitNumbers(NamedTuple):
    """Commit numbers from `first` on, and the segment they are in."""

    first: int
    segment: int


class AddedSize(NamedTuple):
    """Size of what is added to the journal: rows, and characters of their values."""

    rows: int
    size: int

    @classmethod
    def of(cls, added: Iterable[Chunk]) -> "AddedSize":
        counted = [(len(events), events.size) for events in added]
        return cls(sum(rows for rows, _ in counted), sum(size for _, size in counted))


def take(
    connection: Connection,
    dataset: Dataset,
    batches: int,
    more: AddedSize,
    moment: datetime,
    within: Settings | None = None,
) -> CommitNumbers:
    """Assign the next commit numbers. Call it late in the transaction, as it locks the head's row until the commit.

    Updates the tag `journal/last_updated` in the same transaction. Raises DatasetNotFound if the dataset is being
    deleted, and, if `within` is given, Backpressure if its limits for unflushed rows or their age are exceeded.
    """
    row = connection.execute(
        _TAKE,
        {
            "dataset": dataset.id,
            "batches": batches,
            "more": more.rows,
            "larger": more.size,
            "moment": moment,
            "most": NO_LIMIT if within is None else within.journal_max_rows,
            "horizon": LONG_AGO if within is None else _horizon(within),
        },
    ).first()
    if row is None:
        if within is not None:
            check_pressure(connection, dataset, within)
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    # Not the caller's `moment`: this transaction may have waited for the row while a flush set `last_flushed` to a
    # later time.
    touch(connection, dataset.id, LAST_UPDATED, now())
    if row.rows == more.rows > 0:
        publish(connection, JOURNAL)  # nothing waited for a flush before
    return CommitNumbers(row.commit - batches + 1, row.segment)


def rotate(connection: Connection, dataset_id: str) -> int:
    """Close the open segment and return its number; later commits are in the next segment."""
    opened: int = connection.execute(
        update(journal_head)
        .where(journal_head.c.dataset_id == dataset_id)
        .values(segment=journal_head.c.segment + 1)
        .returning(journal_head.c.segment)
    ).scalar_one()
    return opened - 1


def rotate_and_take(connection: Connection, dataset: Dataset) -> int:
    """Close the open segment and assign a commit number to a change that is not in the journal.

    Every earlier commit is then in a closed segment, and every later one has a greater number. Raises DatasetNotFound.
    """
    number: int | None = connection.execute(
        update(journal_head)
        .where(journal_head.c.dataset_id == dataset.id)
        .values(commit=journal_head.c.commit + 1, segment=journal_head.c.segment + 1)
        .returning(journal_head.c.commit)
    ).scalar()
    if number is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    return number


def check_pressure(connection: Connection, dataset: Dataset, settings: Settings) -> None:
    """Raise Backpressure if more rows wait to be flushed, or have waited longer, than the settings allow."""
    head = connection.execute(select(journal_head).where(journal_head.c.dataset_id == dataset.id)).first()
    if head is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    if head.rows >= settings.journal_max_rows or (head.oldest is not None and head.oldest < _horizon(settings)):
        raise Backpressure(
            f"{head.rows} statements of {dataset.name!r} wait to be flushed, the oldest since {head.oldest}",
            retry_after=RETRY_SECONDS,
        )


def touch(connection: Connection, dataset_id: str, key: str, moment: datetime) -> None:
    """Set the time of a system tag, unless it has a later one already."""
    connection.execute(
        _TOUCH[connection.dialect.name], {"dataset_id": dataset_id, "tenant": LAKEHOUSE, "key": key, "at": moment}
    )


def _horizon(settings: Settings) -> datetime:
    return now() - timedelta(seconds=settings.journal_max_age)


# Every batch runs these statements, so they are built once.

NO_LIMIT, LONG_AGO = 2**63 - 1, datetime(1, 1, 2, tzinfo=UTC)

_TAKE = (
    update(journal_head)
    .where(
        journal_head.c.dataset_id == bindparam("dataset"),
        exists().where(datasets.c.id == journal_head.c.dataset_id, datasets.c.state == ACTIVE),
        journal_head.c.rows < bindparam("most"),
        or_(journal_head.c.oldest.is_(None), journal_head.c.oldest >= bindparam("horizon")),
    )
    .values(
        commit=journal_head.c.commit + bindparam("batches"),
        rows=journal_head.c.rows + bindparam("more"),
        size=journal_head.c.size + bindparam("larger"),
        # A commit without rows must not set `oldest`: it is never flushed, so no flush would reset it.
        oldest=case(
            (
                bindparam("more", type_=BigInteger) > 0,
                func.coalesce(journal_head.c.oldest, bindparam("moment", type_=Moment)),
            ),
            else_=journal_head.c.oldest,
        ),
    )
    .returning(journal_head.c.commit, journal_head.c.segment, journal_head.c.rows)
)


def _touching(insert: postgresql.Insert | sqlite.Insert) -> postgresql.Insert | sqlite.Insert:
    return insert.on_conflict_do_update(
        index_elements=["dataset_id", "tenant", "key"],
        set_={"at": insert.excluded.at},
        where=tags.c.at < insert.excluded.at,
    )


_TOUCH = {"postgresql": _touching(postgresql.insert(tags)), "sqlite": _touching(sqlite.insert(tags))}
