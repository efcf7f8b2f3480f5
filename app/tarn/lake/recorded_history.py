"""What SQL says of a dataset's history, taken in one moment."""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, select

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.engine import Database
from tarn.db.tables import datasets, leases, refs, snapshot_heads, snapshots
from tarn.errors import DatasetNotFound
from tarn.model.ids import now
from tarn.model.snapshot import Head


class SnapshotRecord(NamedTuple):
    """A snapshot, as its row says."""

    seq: int
    id: str
    content: int
    segment: int
    created: datetime


class Pin(NamedTuple):
    """A ref, as its row says."""

    name: str
    seq: int
    id: str
    updated: datetime


class ExpiredRange(NamedTuple):
    """Snapshots that were given up."""

    first: int
    last: int
    rows: int


class WriterState(NamedTuple):
    """Who may be at work: the head that is there, the lease's token, and whether it is held."""

    head: Head | None
    token: int | None
    held: bool


class RecordedHistory(NamedTuple):
    """All of it. Rows of snapshots that were given up are many, and only counted where they belong."""

    holder: WriterState
    kept: dict[int, SnapshotRecord]
    gone: ExpiredRange | None
    last_gone: SnapshotRecord | None
    misplaced: dict[int, SnapshotRecord]
    """Given up, though older ones are kept."""
    pins: list[Pin]

    @property
    def head(self) -> Head | None:
        return self.holder.head

    @property
    def records(self) -> dict[int, SnapshotRecord]:
        """Every row from the oldest one on that is kept."""
        return self.kept | self.misplaced

    def id_of(self, seq: int) -> str | None:
        """The id of a snapshot, if it is known."""
        record = self.records.get(seq)
        if record is None and self.last_gone is not None and self.last_gone.seq == seq:
            record = self.last_gone
        return None if record is None else record.id


def recorded(connection: Connection, dataset: Dataset) -> RecordedHistory:
    """What is recorded now, in the caller's transaction. Raises DatasetNotFound for one that is being deleted."""
    found = holder(connection, dataset)
    own = snapshots.c.dataset_id == dataset.id
    present = connection.execute(select(snapshots).where(own, snapshots.c.expired.is_(None)).order_by(snapshots.c.seq))
    kept = {row.seq: _record(row) for row in present}
    oldest = min(kept, default=None)
    expired = [own, snapshots.c.expired.is_not(None)]
    misplaced: dict[int, SnapshotRecord] = {}
    if oldest is not None:
        above = connection.execute(select(snapshots).where(*expired, snapshots.c.seq > oldest))
        misplaced = {row.seq: _record(row) for row in above}
        expired.append(snapshots.c.seq < oldest)
    low, high, rows = connection.execute(
        select(func.min(snapshots.c.seq), func.max(snapshots.c.seq), func.count()).where(*expired)
    ).one()
    last = connection.execute(select(snapshots).where(own, snapshots.c.seq == high)).first()
    pins = connection.execute(select(refs).where(refs.c.dataset_id == dataset.id).order_by(refs.c.name))
    return RecordedHistory(
        holder=found,
        kept=kept,
        gone=ExpiredRange(low, high, rows) if rows else None,
        last_gone=None if last is None else _record(last),
        misplaced=misplaced,
        pins=[Pin(row.name, row.seq, row.snapshot, row.updated) for row in pins],
    )


def holder(connection: Connection, dataset: Dataset) -> WriterState:
    """Who may be at work now. Raises DatasetNotFound."""
    active = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    if connection.execute(active).first() is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    row = connection.execute(select(snapshot_heads).where(snapshot_heads.c.dataset_id == dataset.id)).first()
    lease = connection.execute(select(leases).where(leases.c.dataset_id == dataset.id)).first()
    return WriterState(
        head=None if row is None else Head(seq=row.seq, id=row.snapshot, content=row.content, segment=row.segment),
        token=None if lease is None else lease.token,
        held=lease is not None and lease.expires > now(),
    )


def is_kept(database: Database, dataset: Dataset, seq: int) -> bool:
    """Whether a snapshot is still kept: a vacuum may have given it up since."""
    with database.read() as connection:
        expired = select(snapshots.c.seq).where(
            snapshots.c.dataset_id == dataset.id, snapshots.c.seq == seq, snapshots.c.expired.is_not(None)
        )
        return connection.execute(expired).first() is None


def lease_free_since(database: Database, dataset: Dataset, before: WriterState) -> bool:
    """Whether nobody held the lease, from a former look until now: then what is half done stays so."""
    if before.held:
        return False
    with database.read() as connection:
        return holder(connection, dataset) == before


def _record(row: Row[Any]) -> SnapshotRecord:
    return SnapshotRecord(row.seq, row.id, row.content, row.segment, row.created)
