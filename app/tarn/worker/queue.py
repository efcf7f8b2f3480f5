"""The consumer of the queue: does what items addressed to nobody ask for, dataset by dataset, in their order.

A lease keeps workers from doing the same twice at once, and decides nothing: an item is settled in the transaction that
has its effect, so of two workers one has none. A worker that dies in between has had none either, and the next one
begins again.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.archive import documents
from tarn.archive.fetch import Fetcher
from tarn.archive.files import Archive
from tarn.coordination import queue
from tarn.coordination.queue import Begun, Settled
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey
from tarn.db.tables import queue_leases
from tarn.errors import DatasetNotFound, Internal, InvalidPath, Locked, LockLost, TarnError
from tarn.journal import batches
from tarn.journal.batches import Batch, BatchWithEvents
from tarn.journal.event_buffer import Events
from tarn.journal.event_chunks import DEFAULT_ORIGIN
from tarn.lake.leases import Lease, Leases
from tarn.model.entity import Exploder
from tarn.model.file import ArchiveFile, NewFile
from tarn.model.ids import now
from tarn.model.names import FilePath, Origin, TenantName
from tarn.model.queue import NamedEntity, NamedFile, QueueAction, QueueItem, QueueResource, SourceFile
from tarn.model.statement import EPOCH
from tarn.settings import Settings
from tarn.storage.store import Store

log = structlog.get_logger(__name__)

Reached = Callable[[str], None]

ITEMS_PER_DATASET = 50
"""Items of one dataset that are done before another has its turn."""

ACTION = "work_off_queue_item"


class Consumer:
    """Works off queues, in one worker's name."""

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
        self._leases = Leases(database, store, owner, settings.lease_seconds, queue_leases, shown=False)
        self._archive = Archive(database, store, settings)
        self._fetcher = fetcher or Fetcher.from_settings(settings)
        self._exploder = Exploder()

    def work(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Do some of what waits, of every dataset in turn. Returns how many items were tried. Raises Unavailable."""
        with self._database.read() as connection:
            found = queue.waiting(connection)
        return sum(self._work_off(dataset, stopping) for dataset in found if not stopping())

    def _work_off(self, dataset: Dataset, stopping: Callable[[], bool]) -> int:
        try:
            lease = self._leases.take(dataset)
        except (Locked, DatasetNotFound):  # somebody else does it, or nobody need do it any more
            return 0
        tried = 0
        try:
            holding = _RenewedLease(self._leases, lease, self._settings.lease_seconds)
            while tried < ITEMS_PER_DATASET and not stopping() and self._next(dataset, holding):
                tried += 1
        except LockLost:
            log.warning("the queue of a dataset went to another worker", dataset=dataset.name)
        finally:
            self._leases.release(lease)
        return tried

    def _next(self, dataset: Dataset, holding: "_RenewedLease") -> bool:
        """Try the oldest item. False if there is none that may be tried now."""
        holding.on()
        with self._database.write() as connection:
            begun = queue.begin(connection, dataset)
        if begun is None:
            return False
        self._reached("begun")
        item: QueueItem | None
        try:
            item = self._done(dataset, begun, holding)
        except Settled:
            return True
        except LockLost:
            raise
        except Exception as error:  # noqa: BLE001 - an item may fail in any way; the others go on, and it is logged below
            item = self._failed(dataset, begun.item, error)
        if item is not None:
            queue.write_mirror(self._store, dataset, item)
        self._reached("shown")
        return True

    def _done(self, dataset: Dataset, begun: Begun, holding: "_RenewedLease") -> QueueItem:
        """Have the effect of an item and settle it, both in one transaction."""
        item, origin = begun.item, None if begun.item.origin is None else Origin(begun.item.origin)
        work = _ItemInProgress(dataset, item, _audited_action(dataset, begun), origin)
        if item.resource is QueueResource.ENTITY:
            return self._write(work, self._events(work))
        if item.action is QueueAction.UPSERT:
            return self._put_file(work, holding)
        return self._delete_file(work)

    def _failed(self, dataset: Dataset, item: QueueItem, error: Exception) -> QueueItem | None:
        known = error if isinstance(error, TarnError) else Internal("the item failed; the worker's log says why")
        log.warning("queue item failed", item=item.id, attempt=item.attempts, problem=known.slug, exc_info=error)
        try:
            with self._database.write() as connection:
                return queue.fail(connection, dataset, item, known)
        except Settled:
            return None

    # Entities

    def _events(self, work: "_ItemInProgress") -> Events:
        events, payload = Events(), work.item.payload
        if work.item.action is QueueAction.DELETE:
            events.erase(NamedEntity.model_validate(payload).id, work.origin)
            return events
        said_by = work.origin or DEFAULT_ORIGIN
        exploded = self._exploder.explode(work.dataset.name, payload)
        events.erase(exploded.entity_id, said_by)
        events.add_entity(exploded, said_by, _moment())
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

    def _put_file(self, work: "_ItemInProgress", holding: "_RenewedLease") -> QueueItem:
        wanted = SourceFile.model_validate(work.item.payload)
        settled: list[QueueItem] = []

        def recorded(connection: Connection, files: list[ArchiveFile]) -> None:
            (file,) = files
            settled.append(queue.settle(connection, work.dataset, work.item))
            work.act.done(connection, target=f"files/{file.checksum}/{file.id}", size=file.size)
            if wanted.entity:
                self._journal(connection, work, self._document(work, file))
            self._reached("written")

        with self._fetcher.open(wanted.uri) as source:
            path = wanted.path or _path(source.name)
            said = NewFile(path=path, origin=work.origin, meta=wanted.meta, checksum=wanted.checksum)
            reservation = self._archive.reservation(work.dataset, work.tenant)
            reservation.declare(source.size)
            staged = self._archive.stage(work.dataset, said, holding.while_reading(source), reservation)
        self._archive.commit(work.dataset, work.tenant, [staged], recorded)
        self._reached("done")
        return settled[-1]

    def _document(self, work: "_ItemInProgress", file: ArchiveFile) -> Events:
        events, moment = Events(), _moment()
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
    """An item that is being done: where, in whose name, and as whose words."""

    dataset: Dataset
    item: QueueItem
    act: AuditedAction
    origin: Origin | None

    @property
    def tenant(self) -> TenantName:
        return TenantName(self.item.tenant)


class _RenewedLease:
    """A lease that is renewed whenever a good part of it is over."""

    def __init__(self, leases: Leases, lease: Lease, seconds: float) -> None:
        self._leases = leases
        self._lease = lease
        self._every = seconds / 3
        self._renewed = time.monotonic()

    def on(self) -> None:
        """Raises LockLost if somebody else has it by now."""
        if time.monotonic() >= self._renewed + self._every:
            self._leases.renew(self._lease)
            self._renewed = time.monotonic()

    def while_reading(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.on()
            yield chunk


def _audited_action(dataset: Dataset, begun: Begun) -> AuditedAction:
    """What the worker does, in the name of the tenant that asked for it."""
    target = f"/v1/datasets/{dataset.name}/queue/{begun.item.id}"
    return AuditedAction.of_tenant(TenantName(begun.item.tenant), ACTION, target, begun.request)


def _path(name: str | None) -> FilePath:
    try:
        return FilePath(name or "")
    except ValueError as error:
        raise InvalidPath(f"the source does not say what the file is called: {error}") from None


def _moment() -> int:
    """The present, in microseconds."""
    return int((now() - EPOCH).total_seconds() * 1_000_000)
