"""The commit protocol: publish a mutation of a dataset as a new snapshot. Every kind of mutation uses it.

The manifest is authoritative and the Delta tables follow it. Each rule prevents a specific failure, described in
docs/decisions/010 and tested in `tests/faults`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import orjson
import structlog
from sqlalchemy import Connection, select

from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db import outbox
from tarn.db.engine import Database
from tarn.db.tables import snapshots as history
from tarn.db.tables import tags
from tarn.errors import Locked, LockLost, PathExists, SnapshotConflict, TarnError
from tarn.journal import batch_contents, rejected, segments
from tarn.journal import head as heads
from tarn.journal.rejected import Rejected
from tarn.lake import delta_tables, snapshots
from tarn.lake.delta_tables import NONE, CommitRefused, DeltaStore
from tarn.lake.leases import Lease, Leases
from tarn.model.datasets.snapshot import (
    Components,
    Counts,
    File,
    Head,
    IncludedBatch,
    RejectedEventRef,
    Snapshot,
    SnapshotOperation,
    Table,
    TableName,
    Tally,
)
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, TagKey
from tarn.model.work.backoff import delays
from tarn.model.work.event import EventKind
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry

log = structlog.get_logger(__name__)

TABLES: tuple[TableName, TableName] = ("statements", "translog")

OPTIMIZED = "statements/store_optimized"

HINT_TAGS = (segments.LAST_FLUSHED, segments.LAST_MOVED, OPTIMIZED)
"""Tags that publishing a snapshot sets, mirrored in the layout."""

LEASE_ATTEMPTS = 6
"""Attempts to take a lease before failing: about a third of a second with the default back-off. That covers a live
holder; a dead holder's lease takes longer to expire and is not waited for."""

INTEGER_COLUMNS = ("kind", "shard_key", "external", "first_seen", "last_seen")

StepCallback = Callable[[str], None]
"""Callback that is called at each step of the protocol. Tests use it to stop a process there."""


class HeadMoved(Exception):
    """The head changed, and the build does not apply to the new head: build again."""


NO_ROWS = Tally()


@dataclass(frozen=True, slots=True)
class Build:
    """A mutation that is ready to be published: files that are written and durable, and the fields of its manifest."""

    dataset: Dataset
    operation: SnapshotOperation
    id: str
    """The snapshot's id, the same on every attempt."""
    base: Head
    segment: int | None
    """The last journal segment that it contains; None: the same as the head's."""
    added: Mapping[TableName, tuple[File, ...]]
    removed: Mapping[TableName, tuple[File, ...]] = field(default_factory=dict)
    tally: Tally = NO_ROWS
    batches: tuple[IncludedBatch, ...] = ()
    set_aside: tuple[RejectedEventRef, ...] = ()
    checksum: str | None = None
    author: str = LAKEHOUSE
    message: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    retained_from: int | None = None
    """The new oldest kept snapshot, if this mutation expires any."""

    @property
    def moves(self) -> bool:
        """Return whether it changes which statements are visible."""
        changes_rows = self.operation not in (
            SnapshotOperation.COMPACT,
            SnapshotOperation.OPTIMIZE,
            SnapshotOperation.VACUUM,
        )
        return changes_rows and (any(self.added.values()) or any(self.removed.values()))


class SnapshotPublisher:
    """Publishes builds under leases of one owner."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        owner: str,
        reached: StepCallback = lambda _: None,
        watch: Telemetry | None = None,
    ) -> None:
        self._database = database
        self._store = store
        self._settings = settings
        self._tables = DeltaStore(store)
        self._leases = Leases(database, store, owner, settings.lease_seconds)
        self._reached = reached
        self._watch = watch or Telemetry()

    def publish(self, build: Build) -> Snapshot:
        """Make one mutation of a dataset visible, or leave everything as it was.

        Every step checks its precondition, so that repeating it is harmless (steps 1 and 2, closing the segment and
        building, are done by the caller):
        3. lease     take it; finish what the previous holder left; the build must apply to the head; a Delta log ahead
                     of the version that the head pins was left by a dead holder: restore it
        4. tables    commit to statements, then to translog, each exactly as the next version
        5. manifest  put-if-absent: this is the commit; if another writer was first, go back to 3
        6. record    compare-and-swap the recorded head, mark batches done, write tags: one SQL transaction
        7. release   release the lease; write mirrors to the layout

        Raises HeadMoved; SnapshotConflict if every attempt lost; Locked while another owner holds the lease; and any
        error of the storage or the database.
        """
        operation, watch = str(build.operation), self._watch
        with watch.timed(
            watch.publishing.labels(operation), "publish", operation=operation, dataset=build.dataset.name
        ):
            snapshot = self._publish(build)
        watch.snapshots.labels(operation).inc()
        return snapshot

    def _publish(self, build: Build) -> Snapshot:
        tries = 1 + self._settings.commit_retries
        pauses = delays(self._settings.commit_backoff_base, self._settings.commit_backoff_cap)
        for _, pause in zip(range(tries), pauses, strict=False):
            try:
                return self._attempt(build)
            except (CommitRefused, LockLost) as error:
                # Dashboards and alerts use these values, so they do not depend on names of classes.
                why = "LockLost" if isinstance(error, LockLost) else "Refused"
                log.info("attempt to publish lost to another writer", dataset=build.dataset.name, reason=why)
                self._watch.retries.labels(why).inc()
                time.sleep(pause)
        with self._database.read() as connection:
            head = recorded_head(connection, build.dataset)
        raise SnapshotConflict(
            f"all {tries} attempts to publish a snapshot of {build.dataset.name!r} lost to other writers; retry",
            expected=build.base.id,
            head=head.id,
        )

    def recover(self, dataset: Dataset) -> None:
        """Finish the commit that a dead lease holder left incomplete. Raises Locked while the lease is held."""
        lease = self._leases.take(dataset)
        try:
            self._base(dataset)
        except Exception:
            self._leases.release(lease)
            raise
        self._leases.release(lease)

    def _attempt(self, build: Build) -> Snapshot:
        lease = self._take_lease(build.dataset)
        self._reached("leased")
        # Not `finally`: a BaseException (the sudden death a test simulates) keeps the lease as a dead process would.
        try:
            snapshot = self._under_lease(build, lease)
        except Exception:
            self._leases.release(lease)
            raise
        self._leases.release(lease)
        self._reached("released")
        self._write_hints(build.dataset, snapshot)
        return snapshot

    def _take_lease(self, dataset: Dataset) -> Lease:
        """Take the dataset's lease, with a few short waits. Raises Locked.

        Another holder usually finishes within milliseconds, and a failure would discard everything that was built.
        """
        pauses = delays(self._settings.commit_backoff_base, self._settings.commit_backoff_cap)
        for _, pause in zip(range(LEASE_ATTEMPTS), pauses, strict=False):
            try:
                return self._leases.take(dataset)
            except Locked:
                time.sleep(pause)
        return self._leases.take(dataset)

    def _under_lease(self, build: Build, lease: Lease) -> Snapshot:
        head, parent = self._base(build.dataset)
        self._require_applies(build, head, parent)
        versions = {table: self._pinned_or_restored(lease, table, parent) for table in TABLES}
        self._reached("leveled")
        # A process that was paused since it took the lease must notice that before it writes.
        self._leases.renew(lease)
        note = {"snapshot": build.id, "operation": str(build.operation), "seq": str(head.seq + 1)}
        tables: dict[TableName, Table] = {}
        changed: dict[TableName, int] = {}
        for table in TABLES:
            added, removed = build.added.get(table, ()), build.removed.get(table, ())
            version = versions[table]
            if added or removed or version == NONE:
                version = self._tables.commit(build.dataset, table, version, added, removed, note)
                changed[table] = version
            pinned = None if parent is None else parent.table(table)
            tables[table] = delta_tables.after(pinned, version, added, [file.path for file in removed])
            self._reached(f"{table} committed")
        self._tables.sync(build.dataset, changed)
        snapshot = _manifest(build, head, parent, tables)
        self._put(build.dataset, snapshot)
        self._reached("manifest put")
        if not self._record(build.dataset, snapshot):
            raise CommitRefused
        self._reached("recorded")
        return snapshot

    # Step 3

    def _base(self, dataset: Dataset) -> tuple[Head, Snapshot | None]:
        """Return the head and its manifest, after doing step 6 for every manifest that follows the recorded head."""
        while True:
            with self._database.read() as connection:
                head = recorded_head(connection, dataset)
            following = snapshots.read_if_exists(self._store, dataset, head.seq + 1)
            if following is None:
                parent = None if head.id is None else snapshots.read(self._store, dataset, head.seq)
                return head, parent
            if following.dataset_id != dataset.id or following.parent != head.id:
                # The numbers of a re-created dataset begin above all that a stale writer of the former one can reach.
                # So the lake was modified from outside, and this is no state to continue from.
                raise SnapshotConflict(
                    f"the manifest {dataset.layout.snapshot(following.seq)} does not follow the recorded head",
                    expected=following.parent,
                    head=head.id,
                )
            log.info(
                "recording a snapshot that another lease holder left unrecorded",
                dataset=dataset.name,
                seq=following.seq,
            )
            self._record(dataset, following)

    def _require_applies(self, build: Build, head: Head, parent: Snapshot | None) -> None:
        """Raise HeadMoved unless a build applies to the current head as well as to the one it was built on.

        A flush applies after snapshots that only rewrite files (compact, optimize); a rewrite applies after flushes, as
        long as every file that it removes is still listed. No other combination is allowed.
        """
        if head == build.base:
            return
        if build.operation is SnapshotOperation.FLUSH and head.segment == build.base.segment:
            allowed: tuple[SnapshotOperation, ...] = (SnapshotOperation.COMPACT, SnapshotOperation.OPTIMIZE)
        elif (
            build.operation in (SnapshotOperation.COMPACT, SnapshotOperation.OPTIMIZE)
            and parent is not None
            and _lists_removed_files(parent, build)
        ):
            allowed = (SnapshotOperation.FLUSH,)
        else:
            raise HeadMoved
        if parent is not None and (parent.retained_from or 0) > build.base.seq + 1:
            # A vacuum ran in between, and manifests that would have to be checked may be deleted.
            raise HeadMoved
        since = snapshots.since(self._store, build.dataset, build.base.seq, head.seq)
        if any(snapshot.operation not in allowed for snapshot in since):
            raise HeadMoved

    def _pinned_or_restored(self, lease: Lease, table: TableName, parent: Snapshot | None) -> int:
        """Return the version to commit on: the one that the head pins, or a restored copy of it if the log is ahead.

        The lease is renewed before a restore, so that a process that was paused since it took the lease fails here: a
        log ahead of the head it read may be the next holder's valid commit, or that of a new dataset of the same name.
        """
        dataset = lease.dataset
        pinned = NONE if parent is None else parent.table(table).version
        if not self._tables.is_ahead(dataset, table, pinned):
            return pinned
        self._leases.renew(lease)
        log.warning(
            "restoring a Delta table that is ahead of the head", dataset=dataset.name, table=table, version=pinned
        )
        return self._tables.restore(dataset, table, pinned, {"operation": "restore", "version": str(pinned)})

    # Steps 5 and 6

    def _put(self, dataset: Dataset, snapshot: Snapshot) -> None:
        try:
            self._store.put_new(dataset.layout.snapshot(snapshot.seq), snapshot.to_json())
        except PathExists:
            # The response to our own put may have been lost, and the put retried.
            existing = snapshots.read_if_exists(self._store, dataset, snapshot.seq)
            if existing is None or existing.id != snapshot.id:
                raise CommitRefused from None

    def _record(self, dataset: Dataset, snapshot: Snapshot) -> bool:
        """Do step 6. Return whether the snapshot is recorded now, by this or another process."""
        with self._database.write() as connection:
            if not snapshots.advance_head(connection, snapshot):
                return _is_recorded(connection, dataset, snapshot)
            uids = [batch.id for batch in snapshot.batches]
            if snapshot.set_aside:
                rejected.store_rejected(connection, dataset.id, [*_rejected(connection, snapshot)])
            if snapshot.operation is SnapshotOperation.FLUSH:
                segments.mark_done(connection, dataset, snapshot.segment, uids, moved=snapshot.content == snapshot.seq)
            elif snapshot.content == snapshot.seq:
                heads.touch(connection, dataset.id, segments.LAST_MOVED, now())
            if snapshot.operation is SnapshotOperation.OPTIMIZE:
                heads.touch(connection, dataset.id, OPTIMIZED, now())
            if (
                snapshot.operation in (SnapshotOperation.VACUUM, SnapshotOperation.PURGE)
                and snapshot.retained_from is not None
            ):
                snapshots.expire(connection, dataset, snapshot.retained_from)
            _record_event(connection, snapshot)
        return True

    # Step 7

    def _write_hints(self, dataset: Dataset, snapshot: Snapshot) -> None:
        """Write mirrors for people and offline tools, after the commit. Nothing depends on them."""
        hints = {dataset.layout.snapshot_head: orjson.dumps({"seq": snapshot.seq, "id": snapshot.id})}
        try:
            with self._database.read() as connection:
                rows = connection.execute(
                    select(tags.c.key, tags.c.at).where(
                        tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_(HINT_TAGS)
                    )
                ).all()
            for row in rows:
                hints[dataset.layout.tag(LAKEHOUSE, TagKey(row.key))] = row.at.isoformat().encode()
            for path, text in hints.items():
                self._store.put_hint(path, text)
        except TarnError as error:
            log.warning("cannot write the mirrors of a snapshot", dataset=dataset.name, problem=error.slug)


def _record_event(connection: Connection, snapshot: Snapshot) -> None:
    outbox.record(
        connection,
        snapshot.dataset_id,
        EventKind.SNAPSHOT_PUBLISHED,
        snapshot=snapshot.id,
        seq=snapshot.seq,
        content=snapshot.content,
        operation=snapshot.operation,
    )


def _manifest(build: Build, head: Head, parent: Snapshot | None, tables: Mapping[TableName, Table]) -> Snapshot:
    seq = head.seq + 1
    tally = build.tally
    live = (0 if parent is None else parent.rows.live) + tally.added - tally.ended
    earliest, latest = _seen_bounds(tables)
    return Snapshot(
        components=Components(checksum=build.checksum),
        dataset=build.dataset.name,
        dataset_id=build.dataset.id,
        id=build.id,
        seq=seq,
        content=seq if build.moves else head.content,
        parent=head.id,
        created=_creation_time(parent),
        operation=build.operation,
        author=build.author,
        message=build.message,
        metadata=dict(build.metadata),
        batches=build.batches,
        set_aside=build.set_aside,
        segment=head.segment if build.segment is None else build.segment,
        statements=tables["statements"],
        translog=tables["translog"],
        retained_from=build.retained_from or (None if parent is None else parent.retained_from),
        rows=Counts(
            live=live,
            added=tally.added,
            seen=tally.seen,
            deleted=tally.deleted,
            set_aside=tally.set_aside,
            ended=tally.ended,
        ),
        first_seen=earliest,
        last_seen=latest,
    )


def _lists_removed_files(parent: Snapshot, build: Build) -> bool:
    """Return whether a snapshot lists every file that the build removes."""
    return all(
        {file.path for file in build.removed.get(table, ())} <= {file.path for file in parent.table(table).files}
        for table in TABLES
    )


def _creation_time(parent: Snapshot | None) -> datetime:
    """Return the current time, or just after the parent's: creation times increase strictly even if clocks do not."""
    return now() if parent is None else max(now(), parent.created + timedelta(microseconds=1))


def _seen_bounds(tables: Mapping[TableName, Table]) -> tuple[datetime | None, datetime | None]:
    """Return the smallest `first_seen` and the largest `last_seen` over all files, from their column bounds."""
    columns = [file.columns for table in tables.values() for file in table.files]
    first = [column["first_seen"].min for column in columns if "first_seen" in column]
    last = [column["last_seen"].max for column in columns if "last_seen" in column]
    earliest = min((datetime.fromisoformat(str(bound)) for bound in first if bound is not None), default=None)
    latest = max((datetime.fromisoformat(str(bound)) for bound in last if bound is not None), default=None)
    return earliest, latest


def _is_recorded(connection: Connection, dataset: Dataset, snapshot: Snapshot) -> bool:
    recorded_id: str | None = connection.execute(
        select(history.c.id).where(history.c.dataset_id == dataset.id, history.c.seq == snapshot.seq)
    ).scalar()
    return recorded_id == snapshot.id


def _rejected(connection: Connection, snapshot: Snapshot) -> Iterator[Rejected]:
    """Yield the events that the snapshot rejected, as the journal has them."""
    batches = {batch.id: batch for batch in snapshot.batches}
    of_batch: dict[str, list[RejectedEventRef]] = {}
    for ref in snapshot.set_aside:
        of_batch.setdefault(ref.batch, []).append(ref)
    for uid, refs in of_batch.items():
        batch = batches[uid]
        for start in range(0, len(refs), segments.IDS_PER_QUERY):
            chunk = refs[start : start + segments.IDS_PER_QUERY]
            rows = batch_contents.events_at(connection, uid, [ref.position for ref in chunk], rejected.COLUMNS)
            # A database restored from a backup older than the batch has none of its rows.
            for ref in (ref for ref in chunk if ref.position in rows):
                pairs = zip(rejected.COLUMNS, rows[ref.position], strict=True)
                event = {name: _json_value(name, value) for name, value in pairs}
                yield Rejected(uid, batch.tenant, batch.commit, ref.position, event, ref.reason)


def _json_value(name: str, value: object) -> object:
    if not isinstance(value, bytes):
        return value
    if name == "id":
        return value.hex()
    text = value.decode(errors="replace")
    return int(text) if name in INTEGER_COLUMNS and text.lstrip("-").isdecimal() else text
