"""Leases: who may work on a dataset now. SQL is the truth; `.LOCK` shows it to people and offline tools.

A lease saves work and decides nothing: a holder that is paused past its expiry loses at the manifest or at the swap of
the head (docs/decisions/010). Whether it has expired is said by the database's clock.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import orjson
import structlog
from sqlalchemy import Connection, Table, or_, select, update

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import datasets, leases
from tarn.db.upsert import upsert
from tarn.errors import DatasetNotFound, Locked, LockLost, TarnError
from tarn.model.statement import EPOCH
from tarn.storage.store import Store

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was taken. The token is higher than every earlier holder's."""

    dataset: Dataset
    owner: str
    token: int
    expires: datetime


class Leases:
    """Takes, renews and releases leases in one owner's name."""

    def __init__(
        self, database: Database, store: Store, owner: str, seconds: float, table: Table = leases, shown: bool = True
    ) -> None:
        self._database = database
        self._store = store
        self._owner = owner
        self._seconds = seconds
        self._leases = table
        self._shown = shown

    def take(self, dataset: Dataset) -> Lease:
        """Take a dataset's lease if it is free, has expired, or is this owner's already.

        Raises Locked, and DatasetNotFound for one that is being deleted: its folder may be the next one's by now.
        """
        with self._database.write() as connection:
            moment = database_time(connection)
            expires = moment + timedelta(seconds=self._seconds)
            active = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
            if connection.execute(active).first() is None:
                raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
            held = self._leases.c
            free = or_(held.expires < moment, held.owner == self._owner)
            token = connection.execute(
                update(self._leases)
                .where(held.dataset_id == dataset.id, free)
                .values(owner=self._owner, token=held.token + 1, expires=expires)
                .returning(held.token)
            ).scalar()
            if token is None:
                token = self._first(connection, dataset, expires)
        lease = Lease(dataset, self._owner, token, expires)
        self._mirror(lease)
        return lease

    def _first(self, connection: Connection, dataset: Dataset, expires: datetime) -> int:
        values = {"dataset_id": dataset.id, "owner": self._owner, "token": 1, "expires": expires}
        made = connection.execute(
            upsert(connection, self._leases).values(**values).on_conflict_do_nothing().returning(self._leases.c.token)
        ).scalar()
        if made is not None:
            return 1
        holder = connection.execute(select(self._leases).where(self._leases.c.dataset_id == dataset.id)).first()
        if holder is None:
            raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
        raise Locked(f"{holder.owner} works on {dataset.name!r}", holder=holder.owner)

    def renew(self, lease: Lease) -> None:
        """Keep a lease for another while. Raises LockLost if somebody else has it, or it is gone."""
        with self._database.write() as connection:
            expires = database_time(connection) + timedelta(seconds=self._seconds)
            kept = connection.execute(update(self._leases).where(*self._own(lease)).values(expires=expires))
        if kept.rowcount != 1:
            raise LockLost(f"the lease on {lease.dataset.name!r} went to another holder")

    def release(self, lease: Lease) -> None:
        """Give a lease back. One that is lost already is somebody else's business."""
        try:
            with self._database.write() as connection:
                # The row stays, so that tokens go on rising.
                given_back = update(self._leases).where(*self._own(lease)).values(expires=EPOCH)
                freed = connection.execute(given_back).rowcount == 1
            if freed and self._shown:
                self._store.delete([lease.dataset.layout.lock])
        except TarnError as error:  # it expires by itself
            log.warning("a lease could not be given back", dataset=lease.dataset.name, problem=error.slug)

    def _mirror(self, lease: Lease) -> None:
        if not self._shown:
            return
        document = {"owner": lease.owner, "token": lease.token, "expires": lease.expires}
        try:
            self._store.put_hint(lease.dataset.layout.lock, orjson.dumps(document))
        except TarnError as error:
            log.warning("a lease is not shown", dataset=lease.dataset.name, problem=error.slug)

    def _own(self, lease: Lease) -> tuple[Any, ...]:
        held = self._leases.c
        return held.dataset_id == lease.dataset.id, held.owner == lease.owner, held.token == lease.token
