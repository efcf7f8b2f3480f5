"""Leases on datasets: at most one writer per dataset at a time. SQL is authoritative; `.LOCK` mirrors it for users.

A lease only avoids wasted work and is not needed for correctness: a holder that is paused past its expiry loses at the
put-if-absent of the manifest or at the compare-and-swap of the head (docs/decisions/010). Expiry is judged by the
database's clock.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson
import structlog
from sqlalchemy import Connection, Table, select, update

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.lease import LeaseColumns
from tarn.db.tables import datasets, export_leases, leases, queue_leases
from tarn.errors import DatasetNotFound, Locked, LockLost, TarnError
from tarn.storage.store import Store

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that is held. Its token is higher than that of every earlier holder."""

    dataset: Dataset
    owner: str
    token: int
    expires: datetime


def lease_columns(table: Table) -> LeaseColumns:
    """Return the lease columns of `leases`, `export_leases` or `queue_leases`, which have one row per dataset."""
    return LeaseColumns(holder=table.c.owner, expires=table.c.expires, number=table.c.token)


DATASET_LEASE = lease_columns(leases)


def release_all(connection: Connection) -> None:
    """Release the leases of all owners: in a restored database no process holds one. Tokens keep increasing."""
    for table in (leases, export_leases, queue_leases):
        connection.execute(update(table).values(lease_columns(table).released))


class Leases:
    """Takes, renews and releases leases on behalf of one owner."""

    def __init__(
        self, database: Database, store: Store, owner: str, seconds: float, table: Table = leases, mirrored: bool = True
    ) -> None:
        self._database = database
        self._store = store
        self._owner = owner
        self._duration = timedelta(seconds=seconds)
        self._table = table
        self._columns = lease_columns(table)
        self._is_mirrored = mirrored

    def take(self, dataset: Dataset) -> Lease:
        """Take a dataset's lease if it is free, has expired, or is already held by this owner.

        Raises Locked if another owner holds it, and DatasetNotFound if the dataset is being deleted: its folder may
        already belong to a new dataset of the same name.
        """
        with self._database.write() as connection:
            moment = database_time(connection)
            expires = moment + self._duration
            active = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
            if connection.execute(active).first() is None:
                raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
            same = self._table.c.dataset_id == dataset.id
            acquire = self._columns.acquire(self._owner, moment, expires, reentrant=True).where(same)
            row = connection.execute(acquire.returning(self._table)).first() or self._columns.create(
                connection, self._owner, expires, {"dataset_id": dataset.id}
            )
            if row is None:
                holder = connection.execute(select(self._table.c.owner).where(same)).scalar()
                if holder is None:  # deleted meanwhile
                    raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
                raise Locked(f"{dataset.name!r} is locked by {holder}", holder=holder)
        lease = Lease(dataset, self._owner, row.token, expires)
        self._mirror(lease)
        return lease

    def renew(self, lease: Lease) -> None:
        """Extend a lease by its full duration. Raises LockLost if another owner holds it or its row is gone."""
        with self._database.write() as connection:
            renew = self._columns.renew(lease.owner, database_time(connection) + self._duration, lease.token)
            renewed = connection.execute(renew.where(self._table.c.dataset_id == lease.dataset.id))
        if renewed.rowcount != 1:
            raise LockLost(f"the lease on {lease.dataset.name!r} was taken by another holder")

    def release(self, lease: Lease) -> None:
        """Release a lease. Do nothing if another owner holds it by now."""
        try:
            with self._database.write() as connection:
                release = self._columns.release(lease.owner, lease.token)
                released = connection.execute(release.where(self._table.c.dataset_id == lease.dataset.id))
            if released.rowcount == 1 and self._is_mirrored:
                self._store.delete([lease.dataset.layout.lock])
        except TarnError as error:  # the lease expires anyway
            log.warning("cannot release a lease; it will expire", dataset=lease.dataset.name, problem=error.slug)

    def _mirror(self, lease: Lease) -> None:
        if not self._is_mirrored:
            return
        document = {"owner": lease.owner, "token": lease.token, "expires": lease.expires}
        try:
            self._store.put_hint(lease.dataset.layout.lock, orjson.dumps(document))
        except TarnError as error:
            log.warning("cannot write the .LOCK mirror of a lease", dataset=lease.dataset.name, problem=error.slug)
