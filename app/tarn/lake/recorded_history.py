"""The history of a dataset as SQL records it, read in one transaction."""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, select

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import datasets, leases, refs, snapshot_heads, snapshots
from tarn.errors import DatasetNotFound
from tarn.lake.leases import DATASET_LEASE
from tarn.model.datasets.snapshot import Head


class SnapshotRecord(NamedTuple):
    """The row of a snapshot."""

    seq: int
    id: str
    content: int
    segment: int
    created: datetime


class RefRecord(NamedTuple):
    """The row of a ref."""

    name: str
    seq: int
    id: str
    updated: datetime


class ExpiredRange(NamedTuple):
    """The range and the number of expired snapshots."""

    first: int
    last: int
    rows: int


class WriterState(NamedTuple):
    """Whether a writer may be active: the recorded head, the lease's token, and whether the lease is held."""

    head: Head | None
    token: int | None
    is_held: bool


class RecordedHistory(NamedTuple):
    """The recorded history. Expired snapshots are many, so those below the oldest kept one are only counted."""

    writer_state: WriterState
    kept: dict[int, SnapshotRecord]
    expired_range: ExpiredRange | None
    last_expired: SnapshotRecord | None
    misplaced: dict[int, SnapshotRecord]
    """Expired, although older ones are kept."""
    refs: list[RefRecord]

    @property
    def head(self) -> Head | None:
        return self.writer_state.head

    @property
    def records(self) -> dict[int, SnapshotRecord]:
        """Return every row from the oldest kept snapshot on."""
        return self.kept | self.misplaced

    def id_of(self, seq: int) -> str | None:
        """Return the id of a snapshot, or None if it is not recorded."""
        record = self.records.get(seq)
        if record is None and self.last_expired is not None and self.last_expired.seq == seq:
            record = self.last_expired
        return None if record is None else record.id


def recorded(connection: Connection, dataset: Dataset) -> RecordedHistory:
    """Return the recorded history, in the caller's transaction. Raises DatasetNotFound while it is being deleted."""
    current = writer_state(connection, dataset)
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
    ref_rows = connection.execute(select(refs).where(refs.c.dataset_id == dataset.id).order_by(refs.c.name))
    return RecordedHistory(
        writer_state=current,
        kept=kept,
        expired_range=ExpiredRange(low, high, rows) if rows else None,
        last_expired=None if last is None else _record(last),
        misplaced=misplaced,
        refs=[RefRecord(row.name, row.seq, row.snapshot, row.updated) for row in ref_rows],
    )


def writer_state(connection: Connection, dataset: Dataset) -> WriterState:
    """Return the recorded head and the state of the lease. Raises DatasetNotFound."""
    active = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    if connection.execute(active).first() is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    row = connection.execute(select(snapshot_heads).where(snapshot_heads.c.dataset_id == dataset.id)).first()
    same = leases.c.dataset_id == dataset.id
    is_free = DATASET_LEASE.is_free(database_time(connection)).label("free")
    lease = connection.execute(select(leases.c.token, is_free).where(same)).first()
    return WriterState(
        head=None if row is None else Head(seq=row.seq, id=row.snapshot, content=row.content, segment=row.segment),
        token=None if lease is None else lease.token,
        is_held=lease is not None and not lease.free,
    )


def is_kept(database: Database, dataset: Dataset, seq: int) -> bool:
    """Return whether a snapshot is still kept: a vacuum may have expired it in the meantime."""
    with database.read() as connection:
        expired = select(snapshots.c.seq).where(
            snapshots.c.dataset_id == dataset.id, snapshots.c.seq == seq, snapshots.c.expired.is_not(None)
        )
        return connection.execute(expired).first() is None


def lease_free_since(database: Database, dataset: Dataset, before: WriterState) -> bool:
    """Return whether the lease was free since `before` was read: then no writer is busy with an incomplete commit."""
    if before.is_held:
        return False
    with database.read() as connection:
        return writer_state(connection, dataset) == before


def _record(row: Row[Any]) -> SnapshotRecord:
    return SnapshotRecord(row.seq, row.id, row.content, row.segment, row.created)
