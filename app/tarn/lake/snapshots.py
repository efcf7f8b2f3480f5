"""Snapshots: the recorded head in SQL, the manifests in storage.

SQL names the head, so finding it costs no storage call. The table `snapshots` repeats what manifests say of themselves,
so that one can be found by its id; a manifest that SQL does not name is no part of history (a stray).
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection, Row, Select, func, insert, select, update

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.engine import Database
from tarn.db.tables import datasets, refs, snapshot_heads, snapshots
from tarn.errors import DatasetNotFound, ManifestInvalid, NoSnapshots, RefNotFound, SnapshotGone, SnapshotNotFound
from tarn.model.ids import now
from tarn.model.names import SNAPSHOT_ID
from tarn.model.snapshot import Head, Snapshot
from tarn.storage.store import Missing, Store


class Named(NamedTuple):
    """A snapshot as SQL names it."""

    seq: int
    id: str


def recorded(connection: Connection, dataset: Dataset) -> Head:
    """The head that readers see. Raises DatasetNotFound, also for one that is being deleted: its head moves no more."""
    row = connection.execute(
        select(snapshot_heads)
        .join(datasets, datasets.c.id == snapshot_heads.c.dataset_id)
        .where(snapshot_heads.c.dataset_id == dataset.id, datasets.c.state == ACTIVE)
    ).first()
    if row is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    return Head(seq=row.seq, id=row.snapshot, content=row.content, segment=row.segment)


def find(connection: Connection, dataset: Dataset, name: str) -> Named:
    """A snapshot that is given by id, by number or as `latest`.

    Raises SnapshotNotFound, NoSnapshots, and SnapshotGone for one that was given up.
    """
    if name == "latest":
        head = recorded(connection, dataset)
        if head.id is None:
            raise NoSnapshots(f"{dataset.name!r} has no snapshots yet")
        return Named(head.seq, head.id)
    by = snapshots.c.seq == int(name) if name.isdecimal() and len(name) < 19 else snapshots.c.id == name
    row = connection.execute(_select_keys().where(snapshots.c.dataset_id == dataset.id, by)).first()
    return _require_kept(dataset, name, row)


def find_state(connection: Connection, dataset: Dataset, at: str) -> Named:
    """A snapshot that is given by id, number, `latest`, moment or ref; of a moment, the one that was the head then.

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
    return Named(ref.seq, ref.snapshot)


def _select_keys() -> Select[tuple[int, str, datetime | None]]:
    return select(snapshots.c.seq, snapshots.c.id, snapshots.c.expired)


def _require_kept(dataset: Dataset, name: str, row: Row[tuple[int, str, datetime | None]] | None) -> Named:
    if row is None:
        raise SnapshotNotFound(f"{dataset.name!r} has no snapshot {name!r}")
    if row.expired is not None:
        raise SnapshotGone(f"the snapshot {row.id} of {dataset.name!r} was given up on {row.expired:%Y-%m-%d}")
    return Named(row.seq, row.id)


def _parse_time(text: str) -> datetime | None:
    """A date or time in ISO 8601; without an offset it is UTC, where it must be in the years 1 to 9999."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def first_containing(connection: Connection, dataset: Dataset, segment: int) -> Named | None:
    """The first snapshot that holds a segment, if there is one."""
    row = connection.execute(
        select(snapshots.c.seq, snapshots.c.id)
        .where(snapshots.c.dataset_id == dataset.id, snapshots.c.segment >= segment)
        .order_by(snapshots.c.seq)
        .limit(1)
    ).first()
    return None if row is None else Named(row.seq, row.id)


def kept_page(connection: Connection, dataset: Dataset, before: int | None, limit: int) -> list[Named]:
    """The snapshots there are, newest first."""
    query = (
        select(snapshots.c.seq, snapshots.c.id)
        .where(snapshots.c.dataset_id == dataset.id, snapshots.c.expired.is_(None))
        .order_by(snapshots.c.seq.desc())
    )
    if before is not None:
        query = query.where(snapshots.c.seq < before)
    return [Named(row.seq, row.id) for row in connection.execute(query.limit(limit))]


def read_named(store: Store, dataset: Dataset, named: Named) -> Snapshot:
    """The manifest of a snapshot. Raises ManifestInvalid, also where a stray lies in its place."""
    found = read(store, dataset, named.seq)
    if found.id != named.id:
        raise ManifestInvalid(f"{dataset.layout.snapshot(named.seq)} is not of the snapshot {named.id}", field="id")
    return found


def read_kept(database: Database, store: Store, dataset: Dataset, named: Named) -> Snapshot:
    """The manifest of a snapshot that SQL named a moment ago.

    Raises ManifestInvalid, and SnapshotGone if it was given up since.
    """
    try:
        return read_named(store, dataset, named)
    except ManifestInvalid:
        with database.read() as connection:
            find(connection, dataset, named.id)
        raise


def read(store: Store, dataset: Dataset, seq: int) -> Snapshot:
    """One manifest that SQL names. Raises ManifestInvalid, also where it is gone or is another dataset's."""
    found = read_if_exists(store, dataset, seq)
    if found is None:
        raise ManifestInvalid(f"{dataset.layout.snapshot(seq)} is not there", field="document")
    if found.dataset_id != dataset.id or found.seq != seq:
        raise ManifestInvalid(f"{dataset.layout.snapshot(seq)} is of another dataset", field="dataset_id")
    return found


def read_if_exists(store: Store, dataset: Dataset, seq: int) -> Snapshot | None:
    """The manifest with a number, whoever wrote it, or None. Raises ManifestInvalid."""
    path = dataset.layout.snapshot(seq)
    try:
        return Snapshot.from_json(path, store.get(path))
    except Missing:
        return None


def since(store: Store, dataset: Dataset, base: int, head: int) -> Iterator[Snapshot]:
    """The manifests after one number up to another."""
    for seq in range(base + 1, head + 1):
        yield read(store, dataset, seq)


def advance_head(connection: Connection, snapshot: Snapshot) -> bool:
    """Move the recorded head to a snapshot, if its parent is the head still. False if somebody else moved it."""
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
    """Give up the snapshots below a number, except from the oldest one on that a ref names. Returns where they begin
    that are kept.

    Whoever sets a ref at the same time holds the snapshot's row, and was first, or finds it given up.
    """
    rows = [snapshots.c.dataset_id == dataset.id, snapshots.c.seq < below, snapshots.c.expired.is_(None)]
    connection.execute(select(snapshots.c.seq).where(*rows).with_for_update())
    pinned: int | None = connection.execute(
        select(func.min(refs.c.seq)).where(refs.c.dataset_id == dataset.id)
    ).scalar()
    oldest = below if pinned is None else min(below, pinned)
    connection.execute(update(snapshots).where(*rows, snapshots.c.seq < oldest).values(expired=now()))
    return oldest
