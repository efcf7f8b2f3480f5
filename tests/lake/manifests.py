"""Hand-made manifests and histories of them, for tests that need snapshots without a flush."""

from datetime import UTC, datetime, timedelta
from typing import Any

from tarn.datasets.registry import Dataset, find
from tarn.db.engine import Database
from tarn.lake import snapshots
from tarn.model.datasets.snapshot import (
    Column,
    Components,
    Counts,
    File,
    IncludedBatch,
    Snapshot,
    SnapshotOperation,
    Table,
    TableName,
)
from tarn.model.ids import new_id
from tarn.model.names import DatasetName
from tarn.storage.store import Store

T0 = datetime(2030, 1, 1, tzinfo=UTC)


def dataset_of(database: Database, name: str) -> Dataset:
    """Return an existing dataset by its name."""
    with database.read() as connection:
        dataset = find(connection, DatasetName(name))
    assert dataset is not None
    return dataset


def file(table: TableName, number: int) -> File:
    """Return a data file with ten rows, as a writer would report it."""
    folder, partition = {
        "statements": ("origin=crawl", {"origin": "crawl"}),
        "translog": ("kind=insert", {"kind": "insert"}),
    }[table]
    columns = {
        "canonical_id": Column(min=f"e{number:03d}0", max=f"e{number:03d}9", nulls=0),
        "first_seen": Column(min=T0.isoformat(), max=T0.isoformat(), nulls=0),
    }
    return File(
        path=f"{folder}/{number:03d}.parquet", size=1000 + number, partition=partition, rows=10, columns=columns
    )


def table(name: TableName, parent: Table | None, added: int) -> Table:
    """Return a table with the parent's files and so many more."""
    former = () if parent is None else parent.files
    new = tuple(file(name, len(former) + number) for number in range(added))
    version = 0 if parent is None else parent.version + 1
    return Table(version=version, files=(*former, *new), added=tuple(one.path for one in new), removed=())


def build(dataset: Dataset, parent: Snapshot | None = None, *, after: int = 0, **changes: Any) -> Snapshot:
    """Build a manifest as a flush of ten statements in one file would, on top of another or after a number.

    Any field can be given. An `operation` that adds no content keeps the parent's.
    """
    seq = after + 1 if parent is None else parent.seq + 1
    operation = changes.get("operation", SnapshotOperation.FLUSH)
    same_content = parent is not None and operation in (SnapshotOperation.COMPACT, SnapshotOperation.OPTIMIZE)
    live = 10 if parent is None else parent.rows.live + 10
    batch = IncludedBatch(id=new_id(), tenant="admin", commit=seq, message=None, metadata={}, entities=5, rows=10)
    fields: dict[str, Any] = {
        "components": Components(),
        "dataset": dataset.name,
        "dataset_id": dataset.id,
        "id": new_id(),
        "seq": seq,
        "content": parent.content if parent is not None and same_content else seq,
        "parent": None if parent is None else parent.id,
        "created": T0 + timedelta(seconds=seq),
        "operation": operation,
        "author": "admin",
        "metadata": {},
        "batches": (batch,),
        "segment": 1 if parent is None else parent.segment + 1,
        "statements": table("statements", None if parent is None else parent.statements, 1),
        "translog": table("translog", None if parent is None else parent.translog, 1),
        "rows": Counts(live=live, added=10, seen=0, deleted=0, set_aside=0, ended=0),
        "first_seen": T0,
        "last_seen": T0 + timedelta(seconds=seq),
    }
    return Snapshot(**fields | changes)


def publish(database: Database, store: Store, dataset: Dataset, snapshot: Snapshot) -> Snapshot:
    """Store a manifest and record it as the head."""
    store.put_new(dataset.layout.snapshot(snapshot.seq), snapshot.to_json())
    with database.write() as connection:
        assert snapshots.advance_head(connection, snapshot)
    return snapshot


def history(database: Database, store: Store, dataset: Dataset, length: int) -> list[Snapshot]:
    """Publish so many snapshots of a dataset that has none yet; return them oldest first."""
    published: list[Snapshot] = []
    for _ in range(length):
        published.append(publish(database, store, dataset, build(dataset, published[-1] if published else None)))
    return published
