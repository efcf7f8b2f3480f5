"""Snapshots: the recorded head in SQL, and the manifests in storage.

SQL names the head, so finding it costs no storage call. The table `snapshots` repeats fields of the manifests, so that
a snapshot can be found by its id; a manifest that SQL does not name is not part of history (a stray).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection, Row, Select, func, insert, select, update

from tarn.datasets.head import recorded_head
from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.engine import Database
from tarn.db.tables import datasets, refs, snapshot_heads, snapshots
from tarn.errors import ManifestInvalid, NoSnapshots, RefNotFound, SnapshotGone, SnapshotNotFound
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
from tarn.model.names import SNAPSHOT_ID
from tarn.storage.store import ObjectMissing, Store


class SnapshotKey(NamedTuple):
    """The number and id of a snapshot recorded in SQL."""

    seq: int
    id: str


class SnapshotService:
    """Reads the snapshots of datasets: which exist, from SQL, and their manifests, from the store."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def page(self, dataset: Dataset, before: int | None, limit: int) -> list[SnapshotKey]:
        """Return the kept snapshots below a number, newest first."""
        with self._database.read() as connection:
            return kept_page(connection, dataset, before, limit)

    def get(self, dataset: Dataset, name: str) -> Snapshot:
        """Return the manifest of a snapshot, given its id, its number or `latest`.

        Raises SnapshotNotFound, NoSnapshots, SnapshotGone, ManifestInvalid.
        """
        with self._database.read() as connection:
            named = find(connection, dataset, name)
        return self.read(dataset, named)

    def read(self, dataset: Dataset, named: SnapshotKey) -> Snapshot:
        """Read the manifest of a snapshot that SQL named a moment ago. Raises ManifestInvalid, SnapshotGone."""
        return read_kept(self._database, self._store, dataset, named)

    def containing(self, dataset: Dataset, segment: int | None) -> SnapshotKey | None:
        """Return the first snapshot that contains a segment of the journal, or None.

        Without a segment, return the head: a batch that is no longer recorded is in it.
        """
        with self._database.read() as connection:
            if segment is not None:
                return first_containing(connection, dataset, segment)
            head = recorded_head(connection, dataset)
            return None if head.id is None else SnapshotKey(head.seq, head.id)


def find(connection: Connection, dataset: Dataset, name: str) -> SnapshotKey:
    """Find a snapshot by id, by number or as `latest`.

    Raises SnapshotNotFound, NoSnapshots, and SnapshotGone for an expired one.
    """
    if name == "latest":
        head = recorded_head(connection, dataset)
        if head.id is None:
            raise NoSnapshots(f"{dataset.name!r} has no snapshots yet")
        return SnapshotKey(head.seq, head.id)
    by = snapshots.c.seq == int(name) if name.isdecimal() and len(name) < 19 else snapshots.c.id == name
    row = connection.execute(_select_keys().where(snapshots.c.dataset_id == dataset.id, by)).first()
    return _require_kept(dataset, name, row)


def find_state(connection: Connection, dataset: Dataset, at: str) -> SnapshotKey:
    """Find a snapshot by id, number, `latest`, time or ref; for a time, the one that was the head then.

    Raises as `find` does, and RefNotFound.
    """
    if at == "latest" or at.isdecimal() or SNAPSHOT_ID.fullmatch(at):
        return find(connection, dataset, at)
    if (moment := _parse_time(at)) is not None:
        row = connection.execute(
            _select_keys()
            .where(snapshots.c.dataset_id == dataset.id, snapshots.c.created <= moment)
            .order_by(snapshots.c.seq.desc())
            .limit(1)
        ).first()
        return _require_kept(dataset, at, row)
    ref = connection.execute(
        select(refs.c.seq, refs.c.snapshot).where(refs.c.dataset_id == dataset.id, refs.c.name == at)
    ).first()
    if ref is None:
        raise RefNotFound(f"{dataset.name!r} has no ref {at!r}")
    return SnapshotKey(ref.seq, ref.snapshot)


def _select_keys() -> Select[tuple[int, str, datetime | None]]:
    return select(snapshots.c.seq, snapshots.c.id, snapshots.c.expired)


def _require_kept(dataset: Dataset, name: str, row: Row[tuple[int, str, datetime | None]] | None) -> SnapshotKey:
    if row is None:
        raise SnapshotNotFound(f"{dataset.name!r} has no snapshot {name!r}")
    if row.expired is not None:
        raise SnapshotGone(f"the snapshot {row.id} of {dataset.name!r} expired on {row.expired:%Y-%m-%d}")
    return SnapshotKey(row.seq, row.id)


def _parse_time(text: str) -> datetime | None:
    """Parse a date or time in ISO 8601, or return None. Without an offset it is UTC; years 1 to 9999 in UTC."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def first_containing(connection: Connection, dataset: Dataset, segment: int) -> SnapshotKey | None:
    """Return the first snapshot that contains a segment, or None."""
    row = connection.execute(
        select(snapshots.c.seq, snapshots.c.id)
        .where(snapshots.c.dataset_id == dataset.id, snapshots.c.segment >= segment)
        .order_by(snapshots.c.seq)
        .limit(1)
    ).first()
    return None if row is None else SnapshotKey(row.seq, row.id)


def kept_page(connection: Connection, dataset: Dataset, before: int | None, limit: int) -> list[SnapshotKey]:
    """Return the kept snapshots, newest first."""
    query = (
        select(snapshots.c.seq, snapshots.c.id)
        .where(snapshots.c.dataset_id == dataset.id, snapshots.c.expired.is_(None))
        .order_by(snapshots.c.seq.desc())
    )
    if before is not None:
        query = query.where(snapshots.c.seq < before)
    return [SnapshotKey(row.seq, row.id) for row in connection.execute(query.limit(limit))]


def read_named(store: Store, dataset: Dataset, named: SnapshotKey) -> Snapshot:
    """Read the manifest of a snapshot. Raises ManifestInvalid, also if a stray manifest has its path."""
    manifest = read(store, dataset, named.seq)
    if manifest.id != named.id:
        raise ManifestInvalid(f"{dataset.layout.snapshot(named.seq)} is not of the snapshot {named.id}", field="id")
    return manifest


def read_kept(database: Database, store: Store, dataset: Dataset, named: SnapshotKey) -> Snapshot:
    """Read the manifest of a snapshot that SQL named a moment ago.

    Raises ManifestInvalid, and SnapshotGone if the snapshot expired since.
    """
    try:
        return read_named(store, dataset, named)
    except ManifestInvalid:
        with database.read() as connection:
            find(connection, dataset, named.id)
        raise


def read(store: Store, dataset: Dataset, seq: int) -> Snapshot:
    """Read the manifest with a recorded number. Raises ManifestInvalid, also if it is missing or another dataset's."""
    manifest = read_if_exists(store, dataset, seq)
    if manifest is None:
        raise ManifestInvalid(f"{dataset.layout.snapshot(seq)} is missing", field="document")
    if manifest.dataset_id != dataset.id or manifest.seq != seq:
        raise ManifestInvalid(f"{dataset.layout.snapshot(seq)} is of another dataset", field="dataset_id")
    return manifest


def read_if_exists(store: Store, dataset: Dataset, seq: int) -> Snapshot | None:
    """Read the manifest with a number, recorded or not, or return None. Raises ManifestInvalid."""
    path = dataset.layout.snapshot(seq)
    try:
        return Snapshot.from_json(path, store.get(path))
    except ObjectMissing:
        return None


def since(store: Store, dataset: Dataset, base: int, head: int) -> Iterator[Snapshot]:
    """Yield the manifests after `base` up to and including `head`."""
    for seq in range(base + 1, head + 1):
        yield read(store, dataset, seq)


def advance_head(connection: Connection, snapshot: Snapshot) -> bool:
    """Move the recorded head to a snapshot if its parent is still the head. Return False if another writer moved it."""
    before = snapshot_heads.c.snapshot.is_(None) if snapshot.parent is None else None
    moved = connection.execute(
        update(snapshot_heads)
        .where(
            snapshot_heads.c.dataset_id == snapshot.dataset_id,
            snapshot_heads.c.seq == snapshot.seq - 1,
            snapshot_heads.c.snapshot == snapshot.parent if before is None else before,
            select(datasets.c.id).where(datasets.c.id == snapshot.dataset_id, datasets.c.state == ACTIVE).exists(),
        )
        .values(seq=snapshot.seq, snapshot=snapshot.id, content=snapshot.content, segment=snapshot.segment)
    )
    if moved.rowcount != 1:
        return False
    connection.execute(
        insert(snapshots).values(
            dataset_id=snapshot.dataset_id,
            seq=snapshot.seq,
            id=snapshot.id,
            content=snapshot.content,
            segment=snapshot.segment,
            created=snapshot.created,
        )
    )
    return True


def expire(connection: Connection, dataset: Dataset, below: int) -> int:
    """Expire the snapshots below a number, but none from the oldest one that a ref names on. Return the oldest kept.

    Setting a ref locks the snapshot's row: it either comes first and is respected, or finds the snapshot expired.
    """
    rows = [snapshots.c.dataset_id == dataset.id, snapshots.c.seq < below, snapshots.c.expired.is_(None)]
    connection.execute(select(snapshots.c.seq).where(*rows).with_for_update())
    pinned: int | None = connection.execute(
        select(func.min(refs.c.seq)).where(refs.c.dataset_id == dataset.id)
    ).scalar()
    oldest = below if pinned is None else min(below, pinned)
    connection.execute(update(snapshots).where(*rows, snapshots.c.seq < oldest).values(expired=now()))
    return oldest
