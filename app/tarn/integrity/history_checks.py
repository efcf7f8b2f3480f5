"""Checks of a dataset's history: the rows in SQL against the manifests, and each manifest against its parent."""

from collections.abc import Callable, Iterator

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import ManifestInvalid
from tarn.integrity.findings import Findings, some
from tarn.lake import snapshots
from tarn.lake.commit import TABLES
from tarn.lake.recorded_history import RecordedHistory, SnapshotRecord, is_kept, lease_free_since
from tarn.model.datasets.finding import FindingKind
from tarn.model.datasets.snapshot import Snapshot, SnapshotOperation, TableName
from tarn.model.work.cancellation import check, checked
from tarn.storage.store import Store

HELD = 4
"""Manifests that are kept in memory: each may name thousands of files."""

OnManifest = Callable[[Snapshot], None]
"""Callback that gets every manifest of the history, oldest first."""


class History:
    """Checks the history of one dataset, while others may add snapshots or expire the oldest."""

    def __init__(
        self,
        database: Database,
        store: Store,
        dataset: Dataset,
        state: RecordedHistory,
        findings: Findings,
        on_manifest: OnManifest = lambda _: None,
    ) -> None:
        self._database = database
        self._store = store
        self._dataset = dataset
        self._state = state
        self._findings = findings
        self._on_manifest = on_manifest
        self._read: dict[int, Snapshot | ManifestInvalid | None] = {}

    def check(self) -> Snapshot | None:
        """Add a finding for every problem, and return the head's manifest if it is there."""
        state = self._state
        self._check_head()
        first, last = self.bounds()
        parent: Snapshot | None = None
        head: Snapshot | None = None
        for seq in range(first, last + 1):
            manifest = self._check_one(seq)
            if manifest is not None:
                self._check_parent(seq, first, parent, manifest)
                if state.head is not None and seq == state.head.seq:
                    head = manifest
                self._on_manifest(manifest)
            parent = manifest
        self._check_expiry(head)
        self._check_refs()
        self._check_strays(first, last)
        return head

    # Checks of SQL alone

    def _check_head(self) -> None:
        head, kept = self._state.head, self._state.kept
        if head is None:
            self._add(FindingKind.HEAD_WRONG, "no head is recorded")
        elif head.id is None and kept:
            self._add(FindingKind.HEAD_WRONG, f"no head is recorded, but snapshot {max(kept)} is")
        elif kept and head.seq < max(kept):
            self._add(FindingKind.HEAD_WRONG, f"snapshot {head.seq} is the recorded head, but {max(kept)} is newer")
        expired = self._state.expired_range
        if expired is not None and expired.rows != expired.last - expired.first + 1:
            missing = expired.last - expired.first + 1 - expired.rows
            self._add(FindingKind.RECORD_MISSING, f"{missing} expired snapshots are not recorded")

    def _check_expiry(self, head: Snapshot | None) -> None:
        for seq in sorted(self._state.misplaced):
            self._add(FindingKind.EXPIRY_WRONG, f"snapshot {seq} is marked expired, but older ones are kept")
        expired = self._state.expired_range
        if head is not None and expired is not None and expired.last >= (head.retained_from or 0):
            detail = f"snapshot {expired.last} is marked expired, but no snapshot expired it"
            self._add(FindingKind.EXPIRY_WRONG, detail)

    def _check_refs(self) -> None:
        for ref in self._state.refs:
            record = self._state.kept.get(ref.seq)
            if record is None or record.id != ref.id:
                self._add(
                    FindingKind.REF_DANGLING,
                    f"the ref {ref.name!r} names snapshot {ref.seq}, {ref.id}, which is not kept",
                )

    # Manifests

    def bounds(self) -> tuple[int, int]:
        """Return the first and last number that must have a record and a manifest."""
        records, head = self._state.records, self._state.head
        if not records and (head is None or head.id is None):
            return 1, 0
        last = max([*records, *([] if head is None or head.id is None else [head.seq])])
        if self._state.expired_range is not None:
            return self._state.expired_range.last + 1, last
        first = min([*records, last])
        # The first snapshot has no parent. If the oldest recorded one has a parent, older records are lost.
        while first > 1 and isinstance(oldest := self.manifest(first), Snapshot) and oldest.parent is not None:
            first -= 1
        return first, last

    def readable_manifest(self, seq: int) -> Snapshot | None:
        """Return the manifest with a number if it can be read and belongs to this dataset, else None."""
        found = self.manifest(seq)
        is_own = isinstance(found, Snapshot) and found.dataset_id == self._dataset.id and found.seq == seq
        return found if is_own and isinstance(found, Snapshot) else None

    def manifest(self, seq: int) -> Snapshot | ManifestInvalid | None:
        check()
        if seq not in self._read:
            try:
                found: Snapshot | ManifestInvalid | None = snapshots.read_if_exists(self._store, self._dataset, seq)
            except ManifestInvalid as error:
                found = error
            while len(self._read) >= HELD:
                del self._read[next(iter(self._read))]
            self._read[seq] = found
        return self._read[seq]

    def _check_one(self, seq: int) -> Snapshot | None:
        """Check the manifest with a number, and return it if it is the one that belongs there."""
        record, found = self._state.records.get(seq), self.manifest(seq)
        path = self._dataset.layout.snapshot(seq)
        if record is None:
            self._add(FindingKind.RECORD_MISSING, f"snapshot {seq} is not recorded")
        if isinstance(found, ManifestInvalid):
            self._add(FindingKind.MANIFEST_INVALID, found.detail, path)
            return None
        if found is None:
            if seq in self._state.kept and is_kept(self._database, self._dataset, seq):
                self._add(FindingKind.MANIFEST_MISSING, f"the manifest of snapshot {seq} is missing", path)
            return None
        if found.dataset_id != self._dataset.id or found.seq != seq:
            self._add(FindingKind.MANIFEST_FOREIGN, f"it belongs to another dataset or number: {found.id}", path)
            return None
        if record is not None and not self._agrees(record, found):
            return None
        head = self._state.head
        if head is not None and head.seq == seq and (head.id, head.content, head.segment) != _identity(found):
            self._add(FindingKind.HEAD_WRONG, f"the recorded head differs from the manifest of snapshot {seq}", path)
        return found

    def _agrees(self, record: SnapshotRecord, found: Snapshot) -> bool:
        """Return whether a manifest is the one of its record, or the one that the record should have."""
        path = self._dataset.layout.snapshot(found.seq)
        if record.id != found.id and self.expected_id(found.seq) != found.id:
            self._add(FindingKind.MANIFEST_FOREIGN, f"it is the manifest of {found.id} instead of {record.id}", path)
            return False
        if (record.id, record.content, record.segment) != _identity(found) or record.created != found.created:
            self._add(FindingKind.RECORD_WRONG, f"the record of snapshot {found.seq} differs from its manifest", path)
        return True

    def expected_id(self, seq: int) -> str | None:
        """Return the id that a snapshot should have, by its child's `parent` or the recorded head. None: unknown."""
        head = self._state.head
        if head is not None and head.seq == seq:
            return head.id
        after = self.manifest(seq + 1)
        return after.parent if isinstance(after, Snapshot) else None

    def _check_parent(self, seq: int, first: int, parent: Snapshot | None, manifest: Snapshot) -> None:
        path = self._dataset.layout.snapshot(seq)
        is_first = seq == first and self._state.expired_range is None
        expected = parent.id if parent is not None else self._state.id_of(seq - 1)
        if (expected is not None or is_first) and manifest.parent != expected:
            self._add(FindingKind.PARENT_WRONG, f"its parent is {manifest.parent} instead of {expected}", path)
        elif parent is not None or is_first:
            for kind, detail in parent_problems(parent, manifest):
                self._add(kind, detail, path)

    def _check_strays(self, first: int, last: int) -> None:
        """Check the manifests that are not part of history."""
        head, expired_range = self._state.head, self._state.expired_range
        recorded = last if last >= first else 0 if head is None else head.seq
        expired = range(0) if expired_range is None else range(expired_range.first, expired_range.last + 1)
        after: list[int] = []
        for seq in self._listed():
            if seq > recorded:
                after.append(seq)
            elif not first <= seq <= last and seq not in expired:
                path = self._dataset.layout.snapshot(seq)
                self._add(FindingKind.MANIFEST_STRAY, "it is not part of history", path)
        if after:
            self._check_unrecorded(recorded, after)

    def _listed(self) -> Iterator[int]:
        folder = self._dataset.layout.snapshots
        for entry in checked(self._store.list(folder)):
            name = entry.path.removeprefix(f"{folder}/").removesuffix(".json")
            if name.isdecimal() and entry.path == self._dataset.layout.snapshot(int(name)):
                yield int(name)

    def _check_unrecorded(self, recorded: int, after: list[int]) -> None:
        """Check manifests above the recorded head: those that follow it wait to be recorded; others block publishing.

        Nothing is reported if a writer held the lease since: it may be publishing them.
        """
        found: list[tuple[FindingKind, str, str]] = []
        parent = None if self._state.head is None else self._state.head.id
        expected = recorded + 1
        for seq in after:
            path, manifest = self._dataset.layout.snapshot(seq), self.manifest(seq)
            if isinstance(manifest, ManifestInvalid):
                found.append((FindingKind.MANIFEST_INVALID, manifest.detail, path))
                continue
            if manifest is None:
                continue
            own = manifest.dataset_id == self._dataset.id and manifest.seq == seq
            if own and seq == expected and manifest.parent == parent:
                found.append((FindingKind.SNAPSHOT_UNRECORDED, f"snapshot {seq} waits to be recorded", path))
                parent, expected = manifest.id, seq + 1
            else:
                detail = f"it does not follow the recorded head, and blocks publishing snapshot {seq}"
                found.append((FindingKind.MANIFEST_FOREIGN, detail, path))
        if lease_free_since(self._database, self._dataset, self._state.writer_state):
            for kind, detail, path in found:
                self._add(kind, detail, path)

    def _add(self, kind: FindingKind, detail: str, path: str | None = None) -> None:
        self._findings.add(kind, detail, path)


def _identity(manifest: Snapshot) -> tuple[str, int, int]:
    return manifest.id, manifest.content, manifest.segment


def parent_problems(parent: Snapshot | None, child: Snapshot) -> Iterator[tuple[FindingKind, str]]:
    """Yield the problems of a manifest as the child of its parent, which is None for the first one."""
    yield from _order(parent, child)
    yield from _counts(parent, child)
    for table in TABLES:
        yield from _files(parent, child, table)


def _order(parent: Snapshot | None, child: Snapshot) -> Iterator[tuple[FindingKind, str]]:
    changed = any(child.table(table).added or child.table(table).removed for table in TABLES)
    shows = child.operation not in (SnapshotOperation.COMPACT, SnapshotOperation.OPTIMIZE, SnapshotOperation.VACUUM)
    before = 0 if parent is None else parent.content
    if child.content != (child.seq if changed and shows else before):
        yield FindingKind.ORDER_WRONG, f"its content is {child.content}"
    if (child.retained_from or 0) > child.seq:
        yield FindingKind.ORDER_WRONG, f"it is retained from {child.retained_from}"
    if parent is None:
        return
    if child.created <= parent.created:
        yield FindingKind.ORDER_WRONG, f"it was created {child.created}, its parent {parent.created}"
    if child.segment < parent.segment:
        yield FindingKind.ORDER_WRONG, f"its segment is {child.segment}, its parent's {parent.segment}"
    if (child.retained_from or 0) < (parent.retained_from or 0):
        yield FindingKind.ORDER_WRONG, f"it is retained from {child.retained_from}, its parent {parent.retained_from}"
    for table in TABLES:
        version, former = child.table(table).version, parent.table(table).version
        if version < former:
            yield FindingKind.ORDER_WRONG, f"it pins version {version} of {table}, its parent {former}"


def _counts(parent: Snapshot | None, child: Snapshot) -> Iterator[tuple[FindingKind, str]]:
    rows = child.rows
    before = 0 if parent is None else parent.rows.live
    if min(rows.live, rows.added, rows.seen, rows.deleted, rows.set_aside, rows.ended) < 0:
        yield FindingKind.COUNTS_WRONG, "a count is negative"
    if rows.live != before + rows.added - rows.ended:
        yield FindingKind.COUNTS_WRONG, f"{rows.live} live statements instead of {before} + {rows.added} - {rows.ended}"
    if child.rebuilt is not None:
        return
    if rows.set_aside != len(child.set_aside):
        yield (
            FindingKind.COUNTS_WRONG,
            f"{rows.set_aside} events counted as rejected, but {len(child.set_aside)} named",
        )
    consumed, held = rows.added + rows.seen + rows.deleted + rows.set_aside, sum(batch.rows for batch in child.batches)
    if child.operation is SnapshotOperation.FLUSH and consumed != held:
        yield FindingKind.COUNTS_WRONG, f"{consumed} events counted, but {held} in its batches"


def _files(parent: Snapshot | None, child: Snapshot, table: TableName) -> Iterator[tuple[FindingKind, str]]:
    made = child.table(table)
    before = {} if parent is None else {file.path: file for file in parent.table(table).files}
    after = {file.path: file for file in made.files}
    added, removed = set(made.added), set(made.removed)
    if len(after) != len(made.files) or len(added) != len(made.added) or len(removed) != len(made.removed):
        yield FindingKind.FILE_LIST_WRONG, f"{table}: a file is named twice"
    if differing := after.keys() ^ ((before.keys() - removed) | added):
        yield FindingKind.FILE_LIST_WRONG, f"{table}: files do not match the added and removed ones: {some(differing)}"
    if differing := (removed - before.keys()) | (added & before.keys()):
        yield (
            FindingKind.FILE_LIST_WRONG,
            f"{table}: added although present, or removed although missing: {some(differing)}",
        )
    if differing := {path for path in before.keys() & after.keys() if before[path] != after[path]}:
        yield FindingKind.FILE_LIST_WRONG, f"{table}: differs from the parent's entry: {some(differing)}"
    if any(file.rows < 0 or file.size < 0 for file in made.files):
        yield FindingKind.FILE_LIST_WRONG, f"{table}: a file has a negative size or number of rows"
