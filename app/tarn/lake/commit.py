"""How a dataset changes: the commit protocol, the same for every mutation.

The manifest is the truth and the tables follow it. Each rule answers a counterexample (docs/decisions/010);
`tests/faults` has them as cases.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import orjson
import structlog
from sqlalchemy import Connection, select

from tarn.datasets.registry import Dataset
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.db.tables import snapshots as history
from tarn.db.tables import tags
from tarn.errors import Locked, LockLost, PathExists, SnapshotConflict, TarnError
from tarn.journal import batch_contents as contents
from tarn.journal import head as heads
from tarn.journal import rejected, segments
from tarn.journal.rejected import Rejected
from tarn.lake import delta_tables as tables
from tarn.lake import snapshots
from tarn.lake.delta_tables import NONE, CommitRefused, DeltaStore
from tarn.lake.leases import Lease, Leases
from tarn.model.backoff import delays
from tarn.model.event import EventKind
from tarn.model.ids import now
from tarn.model.names import LAKEHOUSE, TagKey
from tarn.model.snapshot import (
    Change,
    Components,
    Counts,
    File,
    Head,
    HeldBatch,
    SetAside,
    Snapshot,
    Table,
    TableName,
    Tally,
)
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry

log = structlog.get_logger(__name__)

TABLES: tuple[TableName, TableName] = ("statements", "translog")

OPTIMIZED = "statements/store_optimized"

HINT_TAGS = (segments.LAST_FLUSHED, segments.LAST_MOVED, OPTIMIZED)
"""Tags of the core's own that a snapshot moves."""

LEASE_ATTEMPTS = 6
"""With the usual back-off a third of a second in all, more or less: a holder that is dead is not waited for."""

INTEGER_COLUMNS = ("kind", "shard_key", "external", "first_seen", "last_seen")

Reached = Callable[[str], None]
"""Told of every step of the protocol as it is reached. Tests stop a process there."""


class HeadMoved(Exception):
    """The head is another one, and what was built on the former does not hold on it: build again."""


NO_ROWS = Tally()


@dataclass(frozen=True, slots=True)
class Build:
    """A change that is ready to be published: files that are written and durable, and what is to be said of them."""

    dataset: Dataset
    operation: Change
    id: str
    """The snapshot's, the same however often it is tried."""
    base: Head
    segment: int | None
    """The last one that is in it; None: whichever the head has."""
    added: Mapping[TableName, tuple[File, ...]]
    removed: Mapping[TableName, tuple[File, ...]] = field(default_factory=dict)
    tally: Tally = NO_ROWS
    batches: tuple[HeldBatch, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    checksum: str | None = None
    author: str = LAKEHOUSE
    message: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    retained_from: int | None = None
    """The oldest snapshot that is to be kept, if that changes."""

    @property
    def moves(self) -> bool:
        """Whether it changes what is visible."""
        shows = self.operation not in (Change.COMPACT, Change.OPTIMIZE, Change.VACUUM)
        return shows and (any(self.added.values()) or any(self.removed.values()))


class SnapshotPublisher:
    """Publishes builds, one owner's."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        owner: str,
        reached: Reached = lambda _: None,
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

        Every step asks whether it still holds, so running it twice is the same as once:
        3. lease     take it; finish what the last holder left; the build must hold on the head; a Delta log ahead of
                     what the head pins is a dead holder's: restore it
        4. tables    commit on statements, then on translog, exactly the next versions
        5. manifest  put-if-absent: this is the commit; losing means that somebody else was first: back to 3
        6. record    swap the recorded head, its batches done, its tags written: one SQL transaction
        7. release   the lease; and show hints and tags in the layout

        (1 and 2, closing the segment and building, are the caller's.) Raises HeadMoved; SnapshotConflict when every try
        was lost; Locked while another holder works; and whatever storage or database raise.
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
                return self._try(build)
            except (CommitRefused, LockLost) as lost:
                log.info("a try to publish was lost", dataset=build.dataset.name, why=type(lost).__name__)
                self._watch.retries.labels(type(lost).__name__).inc()
                time.sleep(pause)
        with self._database.read() as connection:
            head = snapshots.recorded(connection, build.dataset)
        raise SnapshotConflict(
            f"{tries} tries to publish on {build.dataset.name!r} lost to other writers",
            expected=build.base.id,
            head=head.id,
        )

    def recover(self, dataset: Dataset) -> None:
        """Finish what a dead holder left half done. Raises Locked while another holder works."""
        lease = self._leases.take(dataset)
        try:
            self._base(dataset)
        except Exception:
            self._leases.release(lease)
            raise
        self._leases.release(lease)

    def _try(self, build: Build) -> Snapshot:
        lease = self._taken(build.dataset)
        self._reached("leased")
        # Not `finally`: what is no Exception (a test's sudden death) leaves the lease as a dead process would.
        try:
            snapshot = self._under_lease(build, lease)
        except Exception:
            self._leases.release(lease)
            raise
        self._leases.release(lease)
        self._reached("released")
        self._show(build.dataset, snapshot)
        return snapshot

    def _taken(self, dataset: Dataset) -> Lease:
        """The dataset's lease. Another holder is done in milliseconds, as a rule: it is worth a few short waits, before
        what was built here is thrown away. Raises Locked."""
        pauses = delays(self._settings.commit_backoff_base, self._settings.commit_backoff_cap)
        for _, pause in zip(range(LEASE_ATTEMPTS), pauses, strict=False):
            try:
                return self._leases.take(dataset)
            except Locked:
                time.sleep(pause)
        return self._leases.take(dataset)

    def _under_lease(self, build: Build, lease: Lease) -> Snapshot:
        head, parent = self._base(build.dataset)
        self._require_holds(build, head, parent)
        versions = {table: self._level(lease, table, parent) for table in TABLES}
        self._reached("leveled")
        # Whoever stood still since it took the lease finds out before it writes.
        self._leases.renew(lease)
        note = {"snapshot": build.id, "operation": str(build.operation), "seq": str(head.seq + 1)}
        made: dict[TableName, Table] = {}
        changed: dict[TableName, int] = {}
        for table in TABLES:
            added, removed = build.added.get(table, ()), build.removed.get(table, ())
            version = versions[table]
            if added or removed or version == NONE:
                version = self._tables.commit(build.dataset, table, version, added, removed, note)
                changed[table] = version
            pinned = None if parent is None else parent.table(table)
            made[table] = tables.after(pinned, version, added, [file.path for file in removed])
            self._reached(f"{table} committed")
        self._tables.sync(build.dataset, changed)
        snapshot = _manifest(build, head, parent, made)
        self._put(build.dataset, snapshot)
        self._reached("manifest put")
        if not self._record(build.dataset, snapshot):
            raise CommitRefused
        self._reached("recorded")
        return snapshot

    # Step 3

    def _base(self, dataset: Dataset) -> tuple[Head, Snapshot | None]:
        """The head and its manifest, after doing step 6 for every manifest right after the recorded head."""
        while True:
            with self._database.read() as connection:
                head = snapshots.recorded(connection, dataset)
            waiting = snapshots.read_if_exists(self._store, dataset, head.seq + 1)
            if waiting is None:
                parent = None if head.id is None else snapshots.read(self._store, dataset, head.seq)
                return head, parent
            if waiting.dataset_id != dataset.id or waiting.parent != head.id:
                # Numbers of a dataset made again begin above all that a forgotten writer can reach, so this is
                # somebody's hand in the lake, and no state to go on from.
                raise SnapshotConflict(
                    f"{dataset.layout.snapshot(waiting.seq)} does not follow the recorded head",
                    expected=waiting.parent,
                    head=head.id,
                )
            log.info("finishing what another holder left", dataset=dataset.name, seq=waiting.seq)
            self._record(dataset, waiting)

    def _require_holds(self, build: Build, head: Head, parent: Snapshot | None) -> None:
        """Raise HeadMoved unless what was built on one head is right on another too.

        A flush is, across what only moves rows from file to file; and what moves them is, across flushes, while all
        that it removes is still there. Nothing else, and nothing across anything else.
        """
        if head == build.base:
            return
        if build.operation is Change.FLUSH and head.segment == build.base.segment:
            passed: tuple[Change, ...] = (Change.COMPACT, Change.OPTIMIZE)
        elif (
            build.operation in (Change.COMPACT, Change.OPTIMIZE)
            and parent is not None
            and _lists_removed_files(parent, build)
        ):
            passed = (Change.FLUSH,)
        else:
            raise HeadMoved
        if parent is not None and (parent.retained_from or 0) > build.base.seq + 1:
            # A vacuum was there meanwhile, and manifests since then may be gone.
            raise HeadMoved
        since = snapshots.since(self._store, build.dataset, build.base.seq, head.seq)
        if any(made.operation not in passed for made in since):
            raise HeadMoved

    def _level(self, lease: Lease, table: TableName, parent: Snapshot | None) -> int:
        """The version to commit on: the one that the head pins, or a restoration of it if the log went on after it.

        Whoever stood still since it took the lease finds out before it writes: a log that is ahead of the head it read
        may be the next holder's right commit, or another dataset's of the same name.
        """
        dataset = lease.dataset
        pinned = NONE if parent is None else parent.table(table).version
        if not self._tables.is_ahead(dataset, table, pinned):
            return pinned
        self._leases.renew(lease)
        log.warning("a table is ahead of its head, and is put back", dataset=dataset.name, table=table, version=pinned)
        return self._tables.restore(dataset, table, pinned, {"operation": "restore", "version": str(pinned)})

    # Steps 5 and 6

    def _put(self, dataset: Dataset, snapshot: Snapshot) -> None:
        try:
            self._store.put_new(dataset.layout.snapshot(snapshot.seq), snapshot.to_json())
        except PathExists:
            # The answer to our own put may have been lost, and the put repeated.
            there = snapshots.read_if_exists(self._store, dataset, snapshot.seq)
            if there is None or there.id != snapshot.id:
                raise CommitRefused from None

    def _record(self, dataset: Dataset, snapshot: Snapshot) -> bool:
        """Step 6. True if the snapshot is part of history now, whoever recorded it."""
        with self._database.write() as connection:
            if not snapshots.advance_head(connection, snapshot):
                return _is_recorded(connection, dataset, snapshot)
            uids = [batch.id for batch in snapshot.batches]
            if snapshot.set_aside:
                rejected.store_rejected(connection, dataset.id, [*_rejected(connection, snapshot)])
            if snapshot.operation is Change.FLUSH:
                segments.mark_done(connection, dataset, snapshot.segment, uids, moved=snapshot.content == snapshot.seq)
            elif snapshot.content == snapshot.seq:
                heads.touch(connection, dataset.id, segments.LAST_MOVED, now())
            if snapshot.operation is Change.OPTIMIZE:
                heads.touch(connection, dataset.id, OPTIMIZED, now())
            if snapshot.operation in (Change.VACUUM, Change.PURGE) and snapshot.retained_from is not None:
                snapshots.expire(connection, dataset, snapshot.retained_from)
            _record_event(connection, snapshot)
        return True

    # Step 7

    def _show(self, dataset: Dataset, snapshot: Snapshot) -> None:
        """Hints for people and offline tools, after the fact: whether they are there changes nothing."""
        shown = {dataset.layout.snapshot_head: orjson.dumps({"seq": snapshot.seq, "id": snapshot.id})}
        try:
            with self._database.read() as connection:
                told = connection.execute(
                    select(tags.c.key, tags.c.at).where(
                        tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_(HINT_TAGS)
                    )
                ).all()
            for row in told:
                shown[dataset.layout.tag(LAKEHOUSE, TagKey(row.key))] = row.at.isoformat().encode()
            for path, text in shown.items():
                self._store.put_hint(path, text)
        except TarnError as error:
            log.warning("a snapshot's hints are not shown", dataset=dataset.name, problem=error.slug)


def _record_event(connection: Connection, snapshot: Snapshot) -> None:
    events.record(
        connection,
        snapshot.dataset_id,
        EventKind.SNAPSHOT_PUBLISHED,
        snapshot=snapshot.id,
        seq=snapshot.seq,
        content=snapshot.content,
        operation=snapshot.operation,
    )


def _manifest(build: Build, head: Head, parent: Snapshot | None, made: Mapping[TableName, Table]) -> Snapshot:
    seq = head.seq + 1
    tally = build.tally
    live = (0 if parent is None else parent.rows.live) + tally.added - tally.ended
    earliest, latest = _seen_bounds(made)
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
        statements=made["statements"],
        translog=made["translog"],
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
    """Whether all that the build removes is in a snapshot."""
    return all(
        {file.path for file in build.removed.get(table, ())} <= {file.path for file in parent.table(table).files}
        for table in TABLES
    )


def _creation_time(parent: Snapshot | None) -> datetime:
    """Now, or just after the parent: creation times rise strictly, whatever clocks do."""
    return now() if parent is None else max(now(), parent.created + timedelta(microseconds=1))


def _seen_bounds(made: Mapping[TableName, Table]) -> tuple[datetime | None, datetime | None]:
    """The bounds that the writers saw, over all files."""
    columns = [file.columns for table in made.values() for file in table.files]
    first = [column["first_seen"].min for column in columns if "first_seen" in column]
    last = [column["last_seen"].max for column in columns if "last_seen" in column]
    earliest = min((datetime.fromisoformat(str(bound)) for bound in first if bound is not None), default=None)
    latest = max((datetime.fromisoformat(str(bound)) for bound in last if bound is not None), default=None)
    return earliest, latest


def _is_recorded(connection: Connection, dataset: Dataset, snapshot: Snapshot) -> bool:
    found: str | None = connection.execute(
        select(history.c.id).where(history.c.dataset_id == dataset.id, history.c.seq == snapshot.seq)
    ).scalar()
    return found == snapshot.id


def _rejected(connection: Connection, snapshot: Snapshot) -> Iterator[Rejected]:
    """The rows that are set aside, as they stand in the journal."""
    batches = {batch.id: batch for batch in snapshot.batches}
    of_batch: dict[str, list[SetAside]] = {}
    for aside in snapshot.set_aside:
        of_batch.setdefault(aside.batch, []).append(aside)
    for uid, asides in of_batch.items():
        batch = batches[uid]
        for start in range(0, len(asides), segments.AT_ONCE):
            some = asides[start : start + segments.AT_ONCE]
            found = contents.events_at(connection, uid, [aside.position for aside in some], rejected.COLUMNS)
            # A database that was restored from before the batch was sent has none of its rows.
            for aside in (one for one in some if one.position in found):
                pairs = zip(rejected.COLUMNS, found[aside.position], strict=True)
                event = {name: _json_value(name, value) for name, value in pairs}
                yield Rejected(uid, batch.tenant, batch.commit, aside.position, event, aside.reason)


def _json_value(name: str, value: object) -> object:
    if not isinstance(value, bytes):
        return value
    if name == "id":
        return value.hex()
    text = value.decode(errors="replace")
    return int(text) if name in INTEGER_COLUMNS and text.lstrip("-").isdecimal() else text
