"""Forms of data that came with later versions: none is written before everybody who may meet it can read it.

While old and new processes run side by side, what a new one writes in a new form would not be there for an old one.
So a writer asks `may_write` first, and writes the old form while the answer is no:

1. Each process says with its first sign of life which forms it reads (`readers.speaks`); old versions say nothing.
2. A process that lives and does not read the form makes the answer no.
3. The first yes is for good: the same transaction notes that versions without the form are not served any more, and
   none of them starts afterwards. One that is about to start tells of itself first, and then waits to see whether it
   is served.
"""

from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection, select

from tarn.db import migrate
from tarn.db.tables import compatibility, readers
from tarn.model.ids import now

ALIVE_AFTER_HEARTBEAT = timedelta(minutes=10)
"""How long after its last sign of life a process may still be there, whatever clocks say. One that stops says so."""


class DataFormat(NamedTuple):
    """A form of data, and the revision whose code was the first to read it."""

    name: str
    since: str


JOURNAL_PACKS = DataFormat("journal-packs", since="0013")
"""Events of the journal in packs (`app/tarn/journal/packs.py`)."""

FORMATS: tuple[DataFormat, ...] = (JOURNAL_PACKS,)
"""What this version reads besides what all versions do."""


def may_write(connection: Connection, form: DataFormat) -> bool:
    """Whether this form may be written now: every process that lives reads it, and none starts any more that does not.

    In a transaction that writes, which need not be the one that the form is written in.
    """
    if connection.execute(select(compatibility.c.oldest)).scalar_one() >= form.since:
        return True
    # Whoever starts now either has told of itself by the time that we have the row, or waits for us and is refused.
    connection.execute(select(compatibility.c.oldest).with_for_update())
    if not is_read_by_all(connection, form):
        return False
    migrate.raise_oldest(connection, form.since)
    return True


def is_read_by_all(connection: Connection, form: DataFormat) -> bool:
    """Whether every process that gave a sign of life lately reads this form."""
    alive = select(readers.c.speaks).where(readers.c.seen > now() - ALIVE_AFTER_HEARTBEAT)
    return all(form.name in (spoken or ()) for spoken in connection.execute(alive).scalars())
