"""Data format versions during rolling upgrades: a new format is written only once every running process can read it.

While old and new processes run side by side, an old one cannot see data in a new format. A writer therefore calls
`may_write` first, and writes the old format while it returns False:

1. Each process lists the formats that it reads in its first heartbeat (`readers.speaks`); old versions list none.
2. `may_write` is False while any live process does not read the format.
3. The first True is permanent: the same transaction records that versions without the format are no longer supported,
   and none of them starts afterwards. A starting process writes its heartbeat first, then waits to see whether its
   version is still supported.
"""

from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection, select

from tarn.db import migrate
from tarn.db.tables import compatibility, readers
from tarn.model.ids import now

ALIVE_AFTER_HEARTBEAT = timedelta(minutes=10)
"""How long after its last heartbeat a process counts as alive, with room for clock skew. One that stops removes its
heartbeat."""


class DataFormat(NamedTuple):
    """A data format, and the database revision of the first version that reads it."""

    name: str
    since: str


JOURNAL_PACKS = DataFormat("journal-packs", since="0013")
"""Events of the journal in packs (`app/tarn/journal/packs.py`)."""

FORMATS: tuple[DataFormat, ...] = (JOURNAL_PACKS,)
"""Formats that this version reads in addition to those of the first version."""


def may_write(connection: Connection, data_format: DataFormat) -> bool:
    """Return whether this format may be written: every live process reads it, and none that does not can start.

    Needs a write transaction, not necessarily the one that writes the data.
    """
    if connection.execute(select(compatibility.c.oldest)).scalar_one() >= data_format.since:
        return True
    # A process that starts now has either written its heartbeat before we hold the row, or waits for us and is refused.
    connection.execute(select(compatibility.c.oldest).with_for_update())
    if not is_read_by_all(connection, data_format):
        return False
    migrate.raise_oldest(connection, data_format.since)
    return True


def is_read_by_all(connection: Connection, data_format: DataFormat) -> bool:
    """Return whether every process with a recent heartbeat reads this format."""
    alive = select(readers.c.speaks).where(readers.c.seen > now() - ALIVE_AFTER_HEARTBEAT)
    return all(data_format.name in (names or ()) for names in connection.execute(alive).scalars())
