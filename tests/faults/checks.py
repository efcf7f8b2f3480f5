"""Invariants after a fault: no acknowledged write is lost or duplicated, history is linear, recovery is automatic."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from deltalake import DeltaTable
from sqlalchemy import Connection, func, select
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import journal, journal_batches, journal_head, leases
from tarn.db.tables import snapshots as recorded_snapshots
from tarn.lake import snapshots
from tarn.lake.commit import TABLES
from tarn.lake.snapshots import SnapshotKey
from tarn.model.datasets.snapshot import Head, Snapshot, TableName
from tarn.model.ids import now
from tarn.storage.store import Store

from tests.faults.scene import Event, Scene
from tests.pipeline.history import Expected, Identity, rows_of, shown, stored


def check(scene: Scene) -> None:
    """Check the invariants now, and again after one more write and one more flush, without manual recovery."""
    check_now(scene)
    scene.write()
    scene.expire_leases()
    scene.flush("the next worker")
    check_now(scene)
    assert [*unflushed_commits(scene)] == [], "the flush left committed batches in the journal"
    assert_no_lease(scene)


def check_now(scene: Scene) -> None:
    """Check what holds at any time, also during a flush."""
    assert shown(visible_rows(scene)) == shown(scene.expected().live), (
        "the visible rows differ from the acknowledged writes"
    )
    history = history_of(scene)
    assert_linear(scene, history)
    assert_every_batch_once(scene, history)
    for snapshot in history:
        assert_tables_match_manifest(scene, snapshot)


# Visible rows


def read_recorded_state(connection: Connection, dataset: Dataset) -> tuple[Head, list[list[Event]]]:
    """Return what a read takes from SQL: the recorded head, and the committed batches that no snapshot holds."""
    head = recorded_head(connection, dataset)
    rows = connection.execute(
        select(journal, journal_batches.c.commit)
        .join(journal_batches, journal_batches.c.id == journal.c.batch)
        .where(*_unflushed(dataset))
        .order_by(journal_batches.c.commit, journal.c.position)
    )
    events: dict[int, list[Event]] = {}
    for row in rows:
        events.setdefault(row.commit, []).append(dict(row._mapping))
    return head, [events[commit] for commit in sorted(events)]


def fold_unflushed(store: Store, dataset: Dataset, head: Head, unflushed: list[list[Event]]) -> dict[Identity, Event]:
    """Return the live rows: those of the head's files, with the unflushed batches folded over them."""
    live = {} if head.id is None else stored(store, dataset, snapshots.read(store, dataset, head.seq))
    view = Expected(live)
    for batch in unflushed:
        view.commit(batch)
    return view.live


def visible_rows(scene: Scene) -> dict[Identity, Event]:
    """Return the rows that a read sees now."""
    with scene.database.read() as connection:
        head, unflushed = read_recorded_state(connection, scene.dataset)
    return fold_unflushed(scene.store, scene.dataset, head, unflushed)


def unflushed_commits(scene: Scene) -> Iterator[int]:
    """Yield the commit numbers that no snapshot holds."""
    with scene.database.read() as connection:
        yield from connection.execute(select(journal_batches.c.commit).where(*_unflushed(scene.dataset))).scalars()


# History


def history_of(scene: Scene) -> list[Snapshot]:
    """Return the recorded snapshots that are kept, oldest first. Raises if a manifest is missing or has another id."""
    return read_history(scene.database, scene.store, scene.dataset)


def read_history(database: Database, store: Store, dataset: Dataset) -> list[Snapshot]:
    table = recorded_snapshots
    with database.read() as connection:
        rows = connection.execute(
            select(table.c.seq, table.c.id)
            .where(table.c.dataset_id == dataset.id, table.c.expired.is_(None))
            .order_by(table.c.seq)
        ).all()
    return [snapshots.read_named(store, dataset, SnapshotKey(row.seq, row.id)) for row in rows]


def assert_linear(scene: Scene, history: list[Snapshot]) -> None:
    """Assert that every snapshot but the head has one child, with the next number and a later creation time."""
    with scene.database.read() as connection:
        head = recorded_head(connection, scene.dataset)
    if not history:
        assert head.id is None
        return
    last = history[-1]
    assert (head.seq, head.id, head.content, head.segment) == (last.seq, last.id, last.content, last.segment)
    assert history[0].parent == last_expired_snapshot(scene)
    for parent, child in pairwise(history):
        assert (child.seq, child.parent) == (parent.seq + 1, parent.id)
        assert child.created > parent.created
        assert child.segment >= parent.segment
        assert child.content == child.seq or child.content == parent.content
        assert child.rows.live == parent.rows.live + child.rows.added - child.rows.ended
        for table in TABLES:
            assert_files_follow_parent(parent, child, table)


def last_expired_snapshot(scene: Scene) -> str | None:
    """Return the id of the newest expired snapshot, if any. All snapshots before it must be expired too."""
    table = recorded_snapshots
    with scene.database.read() as connection:
        rows = connection.execute(
            select(table.c.id, table.c.expired).where(table.c.dataset_id == scene.dataset.id).order_by(table.c.seq)
        ).all()
    expired = [row.expired is not None for row in rows]
    assert expired == sorted(expired, reverse=True), "an expired snapshot follows one that is kept"
    return rows[expired.count(True) - 1].id if any(expired) else None


def assert_files_follow_parent(parent: Snapshot, child: Snapshot, table: TableName) -> None:
    """Assert that the files are those of the parent, without the removed and with the added ones."""
    before, after = _paths(parent, table), _paths(child, table)
    changed = child.table(table)
    assert after == (before - set(changed.removed)) | set(changed.added)
    assert changed.version >= parent.table(table).version


def assert_every_batch_once(scene: Scene, history: list[Snapshot]) -> None:
    """Assert that every acknowledged batch, and every row of it, is either in one snapshot or in the journal."""
    flushed = [batch.commit for snapshot in history for batch in snapshot.batches]
    unflushed = [*unflushed_commits(scene)]
    assert sorted(flushed + unflushed) == expected_commits(scene, history, flushed + unflushed), (
        "a batch is lost or duplicated"
    )
    with scene.database.read() as connection:
        head = recorded_head(connection, scene.dataset)
        late = select(func.count()).where(*_unflushed(scene.dataset), journal_batches.c.segment <= head.segment)
        assert connection.execute(late).scalar() == 0, "a committed batch is left in a flushed segment"
        counted = connection.execute(
            select(journal_head.c.rows, journal_head.c.oldest).where(journal_head.c.dataset_id == scene.dataset.id)
        ).one()
        rows = connection.execute(
            select(func.coalesce(func.sum(journal_batches.c.rows), 0)).where(*_unflushed(scene.dataset))
        ).scalar_one()
    assert counted.rows == rows, "the journal's head miscounts the unflushed rows"
    assert (counted.oldest is None) == (not unflushed), "the journal's head does not tell whether rows are unflushed"
    if history:
        assert_no_duplicate_rows(scene.store, scene.dataset, history[-1])
        live = stored(scene.store, scene.dataset, history[-1])
        assert history[-1].rows.live == len(live)


def expected_commits(scene: Scene, history: list[Snapshot], known: list[int]) -> list[int]:
    """Return the batches that must be known: all, or those since the oldest that a kept snapshot lists."""
    is_complete = not history or history[0].parent is None
    return sorted(commit for commit in scene.acknowledged if is_complete or commit >= min(known, default=commit + 1))


def assert_no_duplicate_rows(store: Store, dataset: Dataset, snapshot: Snapshot) -> None:
    rows = rows_of(store, dataset, snapshot, "statements")
    events = rows_of(store, dataset, snapshot, "translog")
    counts: Counter[tuple[Any, ...]] = Counter((row["id"], row["origin"], row["ord"]) for row in rows)
    counts.update(
        (event["id"], event["origin"], event["ord"], event["kind"], event["canonical_id"]) for event in events
    )
    assert [row for row, count in counts.items() if count > 1] == [], "an event was written twice"


# Tables and files


def assert_tables_match_manifest(scene: Scene, snapshot: Snapshot) -> None:
    """Assert that both tables open at their pinned versions with exactly the manifest's files, and that these exist."""
    for table in TABLES:
        folder = scene.dataset.layout.table(table)
        address = scene.store.connection.table_uri(folder)
        options = scene.store.connection.delta_options()
        opened = DeltaTable(address, version=snapshot.table(table).version, storage_options=options)
        listed = {uri.removeprefix(f"{address}/") for uri in opened.file_uris()}
        assert listed == _paths(snapshot, table), f"{table} of {snapshot.seq} differs from its manifest"
        for file in snapshot.table(table).files:
            entry = scene.store.head(f"{folder}/{file.path}")
            assert entry is not None, f"{file.path} is missing"
            assert entry.size == file.size


def assert_no_lease(scene: Scene) -> None:
    with scene.database.read() as connection:
        held = connection.execute(
            select(leases.c.owner).where(leases.c.dataset_id == scene.dataset.id, leases.c.expires > now())
        )
        assert held.scalars().all() == [], "a lease was not released"


def _unflushed(dataset: Dataset) -> tuple[Any, ...]:
    return (
        journal_batches.c.dataset_id == dataset.id,
        journal_batches.c.state == "committed",
        ~journal_batches.c.is_stage,
    )


def _paths(snapshot: Snapshot, table: TableName) -> set[str]:
    return {file.path for file in snapshot.table(table).files}
