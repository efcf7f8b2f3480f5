"""Queue consumer: processes queue items without an addressee, dataset by dataset, in their order.

A lease keeps workers from processing the same item concurrently, but correctness does not depend on it: an item is
settled in the transaction that has its effect, so of two workers only one has an effect. If a worker dies before that
transaction, nothing has happened, and the next worker starts the item again.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.archive import documents
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.files import Archive
from tarn.coordination import queue
from tarn.coordination.queue import ItemAlreadySettled, StartedItem
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey
from tarn.db.tables import queue_leases
from tarn.errors import DatasetNotFound, Internal, InvalidPath, Locked, LockLost, TarnError
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchWithEvents
from tarn.journal.parsing.event_buffer import Events
from tarn.journal.parsing.event_chunks import DEFAULT_ORIGIN
from tarn.lake.leases import Lease, Leases
from tarn.model.file import ArchiveFile, NewFile
from tarn.model.ftm.entity import Exploder
from tarn.model.ids import now
from tarn.model.names import FilePath, Origin, TenantName
from tarn.model.timestamps import since_epoch
from tarn.model.work.queue import NamedEntity, NamedFile, QueueAction, QueueItem, QueueResource, SourceFile
from tarn.settings import Settings
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

Reached = Callable[[str], None]

ITEMS_PER_DATASET = 50
"""Items of one dataset that are processed before those of the next dataset."""

ACTION = "work_off_queue_item"


class QueueConsumer:
    """Processes queue items. Its leases belong to one owner, the worker."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        owner: str,
        reached: Reached = lambda _: None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._store = store
        self._reached = reached
        self._leases = Leases(database, store, owner, settings.lease_seconds, queue_leases, mirrored=False)
        self._archive = Archive(database, store, settings)
        self._fetcher = fetcher or Fetcher.from_settings(settings)
        self._exploder = Exploder()

    def work(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Process some waiting items of every dataset. Returns how many were attempted. Raises Unavailable."""
        with self._database.read() as connection:
            datasets = queue.waiting(connection)
        return sum(self._process_dataset(dataset, stopping) for dataset in datasets if not stopping())

    def _process_dataset(self, dataset: Dataset, stopping: Callable[[], bool]) -> int:
        try:
            lease = self._leases.take(dataset)
        except (Locked, DatasetNotFound):  # another worker processes the queue, or the dataset is deleted
            return 0
        attempted = 0
        try:
            lease_renewal = _RenewedLease(self._leases, lease, self._settings.lease_seconds)
            while attempted < ITEMS_PER_DATASET and not stopping() and self._next(dataset, lease_renewal):
                attempted += 1
        except LockLost:
            log.warning("the lease on a dataset's queue was lost to another worker", dataset=dataset.name)
        finally:
            self._leases.release(lease)
        return attempted

    def _next(self, dataset: Dataset, lease_renewal: "_RenewedLease") -> bool:
        """Attempt the oldest item. Returns False if there is none that may be attempted now."""
        lease_renewal.renew_if_due()
        with self._database.write() as connection:
            started = queue.begin(connection, dataset)
        if started is None:
            return False
        self._reached("begun")
        item: QueueItem | None
        try:
            item = self._apply(dataset, started, lease_renewal)
        except ItemAlreadySettled:
            return True
        except LockLost:
            raise
        except Exception as error:  # noqa: BLE001 - an item may fail in any way; it is logged in `_record_failure`
            item = self._record_failure(dataset, started.item, error)
        if item is not None:
            queue.write_mirror(self._store, dataset, item)
        self._reached("shown")
        return True

    def _apply(self, dataset: Dataset, started: StartedItem, lease_renewal: "_RenewedLease") -> QueueItem:
        """Apply the effect of an item and settle it, both in one transaction."""
        item, origin = started.item, None if started.item.origin is None else Origin(started.item.origin)
        work = _ItemInProgress(dataset, item, _audited_action(dataset, started), origin)
        if item.resource is QueueResource.ENTITY:
            return self._write(work, self._events(work))
        if item.action is QueueAction.UPSERT:
            return self._put_file(work, lease_renewal)
        return self._delete_file(work)

    def _record_failure(self, dataset: Dataset, item: QueueItem, error: Exception) -> QueueItem | None:
        known = (
            error if isinstance(error, TarnError) else Internal("the item failed; see the worker's log for the cause")
        )
        log.warning("queue item failed", item=item.id, attempt=item.attempts, problem=known.slug, exc_info=error)
        try:
            with self._database.write() as connection:
                return queue.fail(connection, dataset, item, known)
        except ItemAlreadySettled:
            return None

    # Entities

    def _events(self, work: "_ItemInProgress") -> Events:
        events, payload = Events(), work.item.payload
        if work.item.action is QueueAction.DELETE:
            events.erase(NamedEntity.model_validate(payload).id, work.origin)
            return events
        origin = work.origin or DEFAULT_ORIGIN
        exploded = self._exploder.explode(work.dataset.name, payload)
        events.erase(exploded.entity_id, origin)
        events.add_entity(exploded, origin, since_epoch(now()))
        return events

    def _write(self, work: "_ItemInProgress", events: Events) -> QueueItem:
        with self._database.write() as connection:
            item = queue.settle(connection, work.dataset, work.item)
            self._journal(connection, work, events)
            self._reached("written")
        self._reached("done")
        return item

    def _journal(self, connection: Connection, work: "_ItemInProgress", events: Events) -> None:
        once = IdempotencyKey(work.item.id, work.item.id)
        batch = Batch(work.dataset, work.tenant, work.act, work.origin, once=once)
        batches.write_small(connection, self._settings, [BatchWithEvents(batch, events)])

    # Files

    def _put_file(self, work: "_ItemInProgress", lease_renewal: "_RenewedLease") -> QueueItem:
        request = SourceFile.model_validate(work.item.payload)
        settled: list[QueueItem] = []

        def recorded(connection: Connection, files: list[ArchiveFile]) -> None:
            (file,) = files
            settled.append(queue.settle(connection, work.dataset, work.item))
            work.act.done(connection, target=f"files/{file.checksum}/{file.id}", size=file.size)
            if request.entity:
                self._journal(connection, work, self._document(work, file))
            self._reached("written")

        with self._fetcher.open(request.uri) as source:
            path = request.path or _path(source.name)
            new_file = NewFile(path=path, origin=work.origin, meta=request.meta, checksum=request.checksum)
            reservation = self._archive.reservation(work.dataset, work.tenant)
            reservation.declare(source.size)
            staged = self._archive.stage(work.dataset, new_file, lease_renewal.while_reading(source), reservation)
        self._archive.commit(work.dataset, work.tenant, [staged], recorded)
        self._reached("done")
        return settled[-1]

    def _document(self, work: "_ItemInProgress", file: ArchiveFile) -> Events:
        events, moment = Events(), since_epoch(now())
        for entity in documents.entities(work.dataset.name, file):
            events.add_entity(self._exploder.explode(work.dataset.name, entity), file.origin, moment)
        return events

    def _delete_file(self, work: "_ItemInProgress") -> QueueItem:
        named = NamedFile.model_validate(work.item.payload)
        settled: list[QueueItem] = []

        def recorded(connection: Connection) -> None:
            settled.append(queue.settle(connection, work.dataset, work.item))
            work.act.done(connection, target=f"files/{named.checksum}/{named.id}")
            self._reached("written")

        self._archive.delete(work.dataset, named.checksum, named.id, recorded)
        self._reached("done")
        return settled[-1]


@dataclass(frozen=True, slots=True)
class _ItemInProgress:
    """An item that is being processed: its dataset, audited action and origin."""

    dataset: Dataset
    item: QueueItem
    act: AuditedAction
    origin: Origin | None

    @property
    def tenant(self) -> TenantName:
        return TenantName(self.item.tenant)


class _RenewedLease:
    """A lease that is renewed whenever a third of its time has passed."""

    def __init__(self, leases: Leases, lease: Lease, seconds: float) -> None:
        self._leases = leases
        self._lease = lease
        self._every = seconds / 3
        self._renewed = time.monotonic()

    def renew_if_due(self) -> None:
        """Renew the lease if it is time to. Raises LockLost if another worker has acquired it."""
        if time.monotonic() >= self._renewed + self._every:
            self._leases.renew(self._lease)
            self._renewed = time.monotonic()

    def while_reading(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.renew_if_due()
            yield chunk


def _audited_action(dataset: Dataset, started: StartedItem) -> AuditedAction:
    """Return the audited action of the worker, on behalf of the tenant that created the item."""
    target = f"/v1/datasets/{dataset.name}/queue/{started.item.id}"
    return AuditedAction.of_tenant(TenantName(started.item.tenant), ACTION, target, started.request)


def _path(name: str | None) -> FilePath:
    try:
        return FilePath(name or "")
    except ValueError as error:
        raise InvalidPath(f"the source gives no valid file name, set `path` in the item: {error}") from None
