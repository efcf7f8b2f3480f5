"""Views: one state of a dataset, resolved once and read from then on, whatever happens meanwhile."""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from threading import Lock

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.journal import overlay
from tarn.journal.overlay import Overlay, Spool, Unflushed
from tarn.lake import snapshots
from tarn.lake.snapshots import Named
from tarn.model.snapshot import Snapshot
from tarn.storage.store import Store

MAX_FILES = 10_000
"""Files that the manifests kept in memory name between them; one takes some kilobytes."""

NONE = Unflushed()


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot and what was committed after it."""

    dataset: Dataset
    snapshot: Snapshot | None
    events: Unflushed = NONE

    @property
    def snapshot_id(self) -> str | None:
        return None if self.snapshot is None else self.snapshot.id


class Views:
    """Resolves views, and remembers manifests, which never change."""

    def __init__(self, database: Database, store: Store, overlay_rows: int) -> None:
        self._database = database
        self._store = store
        self._overlay = Overlay(overlay_rows)
        self._manifests: OrderedDict[str, Snapshot] = OrderedDict()
        self._lock = Lock()

    def now(self, dataset: Dataset, spool: Spool, entities: Set[str] | None = None) -> View:
        """The head and the unflushed events, taken in one transaction. Raises DatasetNotFound, ManifestInvalid.

        With `entities`, at least the events on these.
        """
        with self._database.read() as connection:
            found = overlay.present(connection, dataset)
            events = self._overlay.events(connection, dataset, found, entities, spool)
        head = found.head
        return View(dataset, None if head.id is None else self._manifest(dataset, Named(head.seq, head.id)), events)

    def head(self, dataset: Dataset) -> View:
        """The head alone. Raises DatasetNotFound, ManifestInvalid."""
        with self._database.read() as connection:
            head = snapshots.recorded(connection, dataset)
        return View(dataset, None if head.id is None else self._manifest(dataset, Named(head.seq, head.id)))

    def at(self, dataset: Dataset, name: str) -> View:
        """A snapshot by id, number, moment or ref. Raises as `snapshots.find_state` does, and ManifestInvalid."""
        with self._database.read() as connection:
            named = snapshots.find_state(connection, dataset, name)
        return View(dataset, self._manifest(dataset, named))

    def _manifest(self, dataset: Dataset, named: Named) -> Snapshot:
        with self._lock:
            if (known := self._manifests.get(named.id)) is not None:
                self._manifests.move_to_end(named.id)
                return known
        found = snapshots.read_named(self._store, dataset, named)
        with self._lock:
            self._manifests[named.id] = found
            files = sum(map(_files, self._manifests.values()))
            while files > MAX_FILES and len(self._manifests) > 1:
                files -= _files(self._manifests.popitem(last=False)[1])
        return found


def _files(snapshot: Snapshot) -> int:
    return len(snapshot.statements.files) + len(snapshot.translog.files)
