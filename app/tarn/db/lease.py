"""Leases in SQL: one holder at a time, until an expiry that is judged by the database's clock.

`LeaseColumns` names the columns of a table that store its leases, and builds the statements that change them. The
caller adds which rows, and further values, and executes the statement in its own transaction:

1. acquire  the lease must be free or expired. The condition is part of the update, so that of several callers one
            acquires it. The fencing number rises
2. renew    only by the holder: one that was paused past its expiry learns that another has acquired the lease
3. release  only by the holder. The row is kept, so that its number keeps rising

Every `moment` is the time of `database_clock.database_time`: the clocks of processes may differ. What each kind of
lease stores in these columns is in docs/decisions/043-one-lease.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Row, Table, Update, and_, or_, update

from tarn.db.upsert import upsert
from tarn.model.timestamps import EPOCH


@dataclass(frozen=True, slots=True)
class LeaseColumns:
    """The columns of a table that store its leases."""

    holder: Column[Any]
    """What proves that a lease is held: the holder's id, or a secret that it was given. Null in a released lease,
    unless the column is not nullable."""
    expires: Column[Any]
    """When the lease expires. In a released lease null, or EPOCH if the column is not nullable."""
    number: Column[Any] | None = None
    """The fencing number: rises with every holder."""

    def is_free(self, moment: datetime) -> ColumnElement[bool]:
        """Return the condition that a lease can be acquired: it was released or has expired."""
        expired = self.expires <= moment
        return or_(self.expires.is_(None), expired) if self.expires.nullable else expired

    def is_abandoned(self, moment: datetime) -> ColumnElement[bool]:
        """Return the condition that a lease has expired without being released."""
        expired = self.expires <= moment
        return expired if self.expires.nullable else and_(self.expires > EPOCH, expired)

    def is_held_by(self, holder: str, number: int | None = None) -> ColumnElement[bool]:
        """Return the condition that a holder has a lease: it has not released it, and no other has acquired it since.

        An expired lease is held until another holder acquires it.
        """
        condition = self.holder == holder
        if not self.holder.nullable:
            condition &= self.expires > EPOCH
        return condition if number is None else condition & (self.number == number)

    def acquire(self, holder: str, moment: datetime, until: datetime, *, reentrant: bool = False) -> Update:
        """Return an update that acquires leases that are free or, if `reentrant`, that the holder has already."""
        free = or_(self.is_free(moment), self.holder == holder) if reentrant else self.is_free(moment)
        values: dict[str, Any] = {self.holder.name: holder, self.expires.name: until}
        if self.number is not None:
            values[self.number.name] = self.number + 1
        return update(self._table).where(free).values(values)

    def create(
        self, connection: Connection, holder: str, until: datetime, values: Mapping[str, Any]
    ) -> Row[Any] | None:
        """Insert the row of a lease, held and with the number 1. Returns None if the row exists."""
        number = {} if self.number is None else {self.number.name: 1}
        row = {**values, **number, self.holder.name: holder, self.expires.name: until}
        insert = upsert(connection, self._table).values(row).on_conflict_do_nothing()
        return connection.execute(insert.returning(self._table)).first()

    def renew(self, holder: str, until: datetime, number: int | None = None) -> Update:
        """Return an update that extends the leases of a holder."""
        return update(self._table).where(self.is_held_by(holder, number)).values({self.expires.name: until})

    def release(self, holder: str, number: int | None = None) -> Update:
        """Return an update that releases the leases of a holder."""
        return update(self._table).where(self.is_held_by(holder, number)).values(self.released)

    @property
    def released(self) -> dict[str, Any]:
        """The values of a released lease, by the names of the columns. The number stays as it is."""
        holder = {self.holder.name: None} if self.holder.nullable else {}
        return holder | {self.expires.name: None if self.expires.nullable else EPOCH}

    @property
    def _table(self) -> Table:
        return self.expires.table
