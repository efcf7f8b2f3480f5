"""Views: a consistent state of a dataset (a snapshot and unflushed events), resolved once for a read."""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from threading import Lock

from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.journal import overlay
from tarn.journal.overlay import Overlay, Spool, Unflushed
from tarn.lake import snapshots
from tarn.lake.snapshots import SnapshotKey
from tarn.model.datasets.snapshot import Snapshot
from tarn.storage.store import Store

MAX_FILES = 10_000
"""Size limit of the manifest cache, as the total number of files listed; each takes some kilobytes of memory."""

NONE = Unflushed()


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot, and the events that were committed to the journal after it."""

    dataset: Dataset
    snapshot: Snapshot | None
    events: Unflushed = NONE

    @property
    def snapshot_id(self) -> str | None:
        return None if self.snapshot is None else self.snapshot.id


class Views:
    """A resolver of views, with a cache of manifests, which never change."""

    def __init__(self, database: Database, store: Store, overlay_rows: int) -> None:
        self._database = database
        self._store = store
        self._overlay = Overlay(overlay_rows)
        self._manifests: OrderedDict[str, Snapshot] = OrderedDict()
        self._lock = Lock()

    def now(self, dataset: Dataset, spool: Spool, entities: Set[str] | None = None) -> View:
        """Return the head and the unflushed events, read in one transaction. Raises DatasetNotFound, ManifestInvalid.

        With `entities`, the view has at least the events on these.
        """
        with self._database.read() as connection:
            present = overlay.present(connection, dataset)
            events = self._overlay.events(connection, dataset, present, entities, spool)
        head = present.head
        return View(
            dataset, None if head.id is None else self._manifest(dataset, SnapshotKey(head.seq, head.id)), events
        )

    def head(self, dataset: Dataset) -> View:
        """Return the head without unflushed events. Raises DatasetNotFound, ManifestInvalid."""
        with self._database.read() as connection:
            head = recorded_head(connection, dataset)
        return View(dataset, None if head.id is None else self._manifest(dataset, SnapshotKey(head.seq, head.id)))

    def at(self, dataset: Dataset, name: str) -> View:
        """Return a snapshot by id, number, timestamp or ref. Raises as `snapshots.find_state`, and ManifestInvalid."""
        with self._database.read() as connection:
            named = snapshots.find_state(connection, dataset, name)
        return View(dataset, self._manifest(dataset, named))

    def _manifest(self, dataset: Dataset, named: SnapshotKey) -> Snapshot:
        with self._lock:
            if (cached := self._manifests.get(named.id)) is not None:
                self._manifests.move_to_end(named.id)
                return cached
        manifest = snapshots.read_named(self._store, dataset, named)
        with self._lock:
            self._manifests[named.id] = manifest
            files = sum(map(_files, self._manifests.values()))
            while files > MAX_FILES and len(self._manifests) > 1:
                files -= _files(self._manifests.popitem(last=False)[1])
        return manifest


def _files(snapshot: Snapshot) -> int:
    return len(snapshot.statements.files) + len(snapshot.translog.files)
