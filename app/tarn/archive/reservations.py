"""Quota reservations: bytes of a body are counted against its tenant's quota before they are written.

A reservation is a row of `file_puts`, like the announcement of a file, but without a checksum yet. If its process dies,
it expires, and a vacuum releases its bytes. The commit of the file replaces it by the announcement, in one
transaction.
"""

from collections.abc import Iterable, Iterator

import structlog
from sqlalchemy import Connection, delete, func, insert, select, update

from tarn.access import limits
from tarn.archive import file_index
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import file_puts, upload_blocks
from tarn.errors import QuotaExceeded, TarnError
from tarn.model.ids import new_id
from tarn.model.names import Checksum, FileId, TenantName
from tarn.settings import Settings

log = structlog.get_logger(__name__)

UNRESERVED = 1 << 20
"""Bytes of a body that need no reservation: they are kept in memory, and the commit counts them."""

AHEAD = 8 << 20
"""Bytes that are reserved beyond those received, if the quota allows: one transaction for each block would cost as much
as writing it."""

NO_CHECKSUM, NO_FILE = Checksum("0" * 64), FileId("0" * 40)
"""Placeholders for the checksum and the id of a file that is not received yet; no content has this SHA-256. Releases of
Tarn without reservations find no record under it, and release the bytes once the row has expired."""


def resize(
    connection: Connection, settings: Settings, dataset: Dataset, tenant: TenantName, reservation: str, size: int
) -> None:
    """Set a reservation to exactly this many bytes, creating it if needed.

    Raises QuotaExceeded, and DatasetNotFound if the dataset is being deleted.
    """
    own = file_puts.c.id == reservation
    reserved_before = connection.execute(select(file_puts.c.reserved).where(own).with_for_update()).scalar()
    if reserved_before is None:
        file_index.require_active(connection, dataset)
    limits.reserve(connection, tenant, settings, size=size - (reserved_before or 0))
    values = {"reserved": size, "expires": file_index.expiry(settings)}
    if reserved_before is not None:
        connection.execute(update(file_puts).where(own).values(**values))
        return
    unknown = {"checksum": NO_CHECKSUM, "file_id": NO_FILE}
    connection.execute(
        insert(file_puts).values(id=reservation, dataset_id=dataset.id, tenant=tenant, **unknown, **values)
    )


class Reservation:
    """Reservation of the bytes of one body. Used by one thread at a time.

    Without a quota nothing is counted before the commit.
    """

    def __init__(
        self, database: Database, settings: Settings, dataset: Dataset, tenant: TenantName, replaced: int = 0
    ) -> None:
        """Create it. `replaced` bytes are released when the body is committed, and so need not be reserved."""
        self.id = new_id()
        self._database = database
        self._settings = settings
        self._dataset = dataset
        self._tenant = tenant
        self._replaced = replaced
        self._taken = 0
        self._has_quota: bool | None = None

    @property
    def is_held(self) -> bool:
        """Return whether anything is reserved."""
        return self._taken > 0

    def declare(self, size: int | None) -> None:
        """Reserve the declared size of a body, before any of it is read. Raises QuotaExceeded."""
        if size is None or size <= self._replaced or not self._is_limited(size):
            return
        if size > UNRESERVED:
            self._take(size)

    def each(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks of the body, each reserved before it is passed on. Raises QuotaExceeded."""
        size = 0
        for chunk in chunks:
            size += len(chunk)
            self._grow(size)
            yield chunk

    def release(self) -> None:
        """Release what is reserved. If that fails, the reservation expires."""
        if not self.is_held:
            return
        try:
            with self._database.write() as connection:
                self.give_back(connection)
        except TarnError as error:
            log.warning(
                "cannot release reserved bytes; they will expire", dataset=self._dataset.name, problem=error.slug
            )
            return
        self._taken = 0

    def give_back(self, connection: Connection) -> None:
        """Release what is reserved, in the caller's transaction."""
        file_index.withdraw(connection, [self.id])

    def _grow(self, size: int) -> None:
        if size <= max(UNRESERVED, self._taken, self._replaced) or not self._is_limited(0):
            return
        try:
            self._take(size + AHEAD)
        except QuotaExceeded:
            self._take(size)

    def _take(self, size: int) -> None:
        with self._database.write() as connection:
            self._reserve(connection, size - self._replaced)
        self._taken = size

    def _reserve(self, connection: Connection, size: int) -> None:
        resize(connection, self._settings, self._dataset, self._tenant, self.id, size)

    def _is_limited(self, size: int) -> bool:
        """Return whether the tenant has a quota. Raises QuotaExceeded if it does not allow this many bytes."""
        if self._has_quota is None or size:
            with self._database.read() as connection:
                self._has_quota = limits.require(
                    connection, self._tenant, self._settings, max(0, self._room_needed(connection, size))
                )
        return self._has_quota

    def _room_needed(self, connection: Connection, size: int) -> int:
        return size - self._replaced


class BlockReservation(Reservation):
    """Reservation of the bytes of one block of an upload, which has reserved its full length.

    While a block is received, its bytes are moved from the upload's reservation to its own. So the blocks in progress
    and those received are together at most the upload's length, or else they count on top of it.
    """

    def __init__(
        self, database: Database, settings: Settings, dataset: Dataset, tenant: TenantName, upload: str
    ) -> None:
        super().__init__(database, settings, dataset, tenant)
        self._upload = upload
        self._moved = 0

    def give_back(self, connection: Connection) -> None:
        """Release what is reserved: bytes moved from the upload go back to it, if it is still in progress."""
        upload_bytes = self._of_upload(connection, lock=True)
        deleted = connection.execute(delete(file_puts).where(file_puts.c.id == self.id).returning(file_puts.c.reserved))
        reserved = deleted.scalar()
        if reserved is None:
            return
        moved = 0 if upload_bytes is None else min(self._moved, reserved)
        if moved:
            _set(connection, self._upload, (upload_bytes or 0) + moved)
        limits.release(connection, self._tenant, size=reserved - moved)

    def _reserve(self, connection: Connection, size: int) -> None:
        upload_bytes = self._of_upload(connection, lock=True)
        moved = min(size, self._moved + self._free(connection, upload_bytes))
        if upload_bytes is not None and moved > self._moved:
            _set(connection, self._upload, upload_bytes - (moved - self._moved))
            # These bytes only change their owner: `resize` counts them again.
            limits.release(connection, self._tenant, size=moved - self._moved)
        super()._reserve(connection, size)
        self._moved = max(moved, self._moved)

    def _room_needed(self, connection: Connection, size: int) -> int:
        return size - self._free(connection, self._of_upload(connection))

    def _of_upload(self, connection: Connection, lock: bool = False) -> int | None:
        query = select(file_puts.c.reserved).where(file_puts.c.id == self._upload)
        return connection.execute(query.with_for_update() if lock else query).scalar()

    def _free(self, connection: Connection, upload_bytes: int | None) -> int:
        """Return the bytes of the upload's reservation that no block has used."""
        if upload_bytes is None:
            return 0
        length = func.coalesce(func.sum(upload_blocks.c.end - upload_blocks.c.start), 0)
        arrived = connection.execute(select(length).where(upload_blocks.c.upload == self._upload)).scalar_one()
        return max(0, upload_bytes - int(arrived))


def _set(connection: Connection, reservation: str, size: int) -> None:
    connection.execute(update(file_puts).where(file_puts.c.id == reservation).values(reserved=size))
