"""Rebuild a lost manifest from its record in SQL, its parent and child, and the Delta log.

Nothing is guessed. The files and the live statements are those of the tables; what is not known any more is left
empty, and listed in the manifest (`rebuilt`). If the files cannot be determined, the manifest stays lost.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson

from tarn.datasets.registry import Dataset
from tarn.integrity.delta_checks import UnreadableTable, sizes_at
from tarn.integrity.history_checks import parent_problems
from tarn.integrity.row_checks import SnapshotRows
from tarn.lake import delta_tables
from tarn.lake.commit import TABLES
from tarn.lake.delta_tables import NONE
from tarn.lake.recorded_history import SnapshotRecord
from tarn.model.datasets.snapshot import Column, Components, Counts, File, Snapshot, SnapshotOperation, Table, TableName
from tarn.model.names import LAKEHOUSE
from tarn.storage.store import ObjectMissing, Store

UNKNOWN = ("author", "message", "metadata")
UNKNOWN_OF_FLUSH = ("batches", "set_aside", "rows.seen", "rows.deleted", "rows.set_aside")
UNKNOWN_CHECKSUM = "files.checksum"

SHORT = 64
"""A bound in a Delta log is certainly not truncated if both bounds are shorter than this many characters."""


class CannotRebuild(Exception):
    """A manifest cannot be rebuilt from what is left."""


class LostManifest(NamedTuple):
    """A snapshot without its manifest, and the manifests of its parent and child if they exist."""

    record: SnapshotRecord
    parent: Snapshot | None
    """None: it was the first."""
    child: Snapshot | None


class _Entry(NamedTuple):
    """The commit that a snapshot made in a Delta log."""

    version: int
    operation: str
    added: dict[str, File]


def rebuild(store: Store, rows: SnapshotRows, dataset: Dataset, lost: LostManifest) -> Snapshot:
    """Return the manifest, as far as it is known. Raises CannotRebuild, and Unavailable if rows cannot be read."""
    parent, child, record = lost.parent, lost.child, lost.record
    entries = {table: _entry(store, dataset, table, lost) for table in TABLES}
    operation = _operation(entries.values())
    made = {table: _table(store, dataset, table, entries[table], lost) for table in TABLES}
    moved = rows.change(parent, made["statements"].files, made["translog"].files)
    first, last = _seen(made.values())
    snapshot = Snapshot(
        components=_components(made.values(), lost),
        dataset=dataset.name,
        dataset_id=dataset.id,
        id=record.id,
        seq=record.seq,
        content=record.content,
        parent=None if parent is None else parent.id,
        created=record.created,
        operation=operation,
        author=LAKEHOUSE,
        metadata={},
        batches=(),
        segment=record.segment,
        retained_from=_retained(operation, lost),
        statements=made["statements"],
        translog=made["translog"],
        rows=Counts(live=moved.live, added=moved.added, seen=0, deleted=0, set_aside=0, ended=moved.ended),
        first_seen=first,
        last_seen=last,
        rebuilt=tuple(_unknown(operation, made.values(), lost)),
    )
    wrong = [*parent_problems(parent, snapshot), *(parent_problems(snapshot, child) if child is not None else ())]
    if wrong:
        raise CannotRebuild(f"the rebuilt manifest is inconsistent with its parent or child: {wrong[0][1]}")
    return snapshot


def _entry(store: Store, dataset: Dataset, table: TableName, lost: LostManifest) -> _Entry | None:
    """Return the last commit that the snapshot made on a table: a lost attempt may have made an earlier one."""
    found: _Entry | None = None
    after = NONE if lost.parent is None else lost.parent.table(table).version
    for version in count(after + 1):
        if lost.child is not None and version > lost.child.table(table).version:
            break
        try:
            text = store.get(dataset.layout.delta_log(dataset.layout.table(table), version))
        except ObjectMissing:
            break
        try:
            actions = [orjson.loads(line) for line in text.splitlines()]
            note = next(action["commitInfo"] for action in actions if "commitInfo" in action).get("tarn", {})
            if note.get("snapshot") == lost.record.id:
                files = (_file(action["add"]) for action in actions if "add" in action)
                found = _Entry(version, note["operation"], {file.path: file for file in files})
        except (ValueError, KeyError, StopIteration, TypeError) as error:
            raise CannotRebuild(f"version {version} of {table} cannot be read") from error
    return found


def _operation(entries: Iterable[_Entry | None]) -> SnapshotOperation:
    for entry in entries:
        if entry is not None:
            return SnapshotOperation(entry.operation)
    raise CannotRebuild("the snapshot changed no table, so its operation cannot be determined")


def _table(store: Store, dataset: Dataset, table: TableName, entry: _Entry | None, lost: LostManifest) -> Table:
    former = None if lost.parent is None else lost.parent.table(table)
    if entry is None:
        if former is None:
            raise CannotRebuild(f"the Delta log of {table} has no commit of this snapshot")
        return delta_tables.after(former, former.version, (), ())
    if former is None and lost.record.seq > 1 and entry.version > 0:
        raise CannotRebuild("the files of the previous snapshot are not known")
    try:
        sizes = sizes_at(store, dataset, table, entry.version)
    except UnreadableTable as error:
        raise CannotRebuild(f"cannot open {table} at version {entry.version}") from error
    before = set() if former is None else {file.path for file in former.files}
    # As the child lists them, which may be more complete than the log.
    by_child = {} if lost.child is None else {file.path: file for file in lost.child.table(table).files}
    added = [by_child.get(path, file) for path, file in entry.added.items() if path not in before]
    if unknown := sizes.keys() - before - {file.path for file in added}:
        raise CannotRebuild(f"{table} has {len(unknown)} files without known statistics")
    return delta_tables.after(former, entry.version, added, sorted(before - sizes.keys()))


def _file(add: dict[str, Any]) -> File:
    """Return a file as the Delta log describes it. Bounds that may be truncated are left out."""
    stats = orjson.loads(add["stats"])
    least, most, nulls = stats["minValues"], stats["maxValues"], stats["nullCount"]
    columns: dict[str, Column] = {}
    for name in dict.fromkeys([*nulls, *least, *most]):
        known: dict[str, Any] = {"nulls": nulls[name]} if name in nulls else {}
        bounds = {"min": least.get(name), "max": most.get(name)}
        if all(not isinstance(bound, str) or len(bound) < SHORT for bound in bounds.values()):
            known |= {side: bound for side, bound in bounds.items() if bound is not None}
        columns[name] = Column.model_validate(known)
    return File(
        path=unquote(add["path"]),
        size=add["size"],
        partition=add["partitionValues"],
        rows=stats["numRecords"],
        columns=columns,
    )


def _added(made: Iterable[Table]) -> Iterator[File]:
    for table in made:
        new = set(table.added)
        yield from (file for file in table.files if file.path in new)


def _components(made: Iterable[Table], lost: LostManifest) -> Components:
    near = lost.child or lost.parent
    is_checked = any(file.checksum is not None for file in _added(made))
    return Components(checksum="sha256" if is_checked else None if near is None else near.components.checksum)


def _unknown(operation: SnapshotOperation, made: Iterable[Table], lost: LostManifest) -> Iterator[str]:
    yield from UNKNOWN
    if operation is SnapshotOperation.FLUSH:
        yield from UNKNOWN_OF_FLUSH
    near = lost.child or lost.parent
    may_have_had = near is None or near.components.checksum is not None
    if may_have_had and any(file.checksum is None for file in _added(made)):
        yield UNKNOWN_CHECKSUM


def _retained(operation: SnapshotOperation, lost: LostManifest) -> int | None:
    expiring = (SnapshotOperation.VACUUM, SnapshotOperation.PURGE)
    if operation not in expiring:
        return None if lost.parent is None else lost.parent.retained_from
    if lost.child is None or lost.child.operation in expiring:
        raise CannotRebuild("the manifest does not show which snapshots it expired")
    return lost.child.retained_from


def _seen(made: Iterable[Table]) -> tuple[datetime | None, datetime | None]:
    """Return the smallest `first_seen` and the largest `last_seen` over all files, from their column bounds."""
    columns = [file.columns for table in made for file in table.files]
    first = [column["first_seen"].min for column in columns if "first_seen" in column]
    last = [column["last_seen"].max for column in columns if "last_seen" in column]
    return (
        min((datetime.fromisoformat(str(bound)) for bound in first if bound is not None), default=None),
        max((datetime.fromisoformat(str(bound)) for bound in last if bound is not None), default=None),
    )
