"""Which snapshots are being read, as whoever deletes files must know it.

Reads ask nobody for leave and cost no call: each API process notes its own in memory and reports, every few seconds,
the oldest snapshot that it reads of each dataset (`app/tarn/query/active_reads.py`). Why no read loses a file:

1. A process reports before its first read, so whoever reads is among `told`.
2. A read is noted before it resolves its snapshot, as one of which nobody knows what it will be (`UNKNOWN`, which
   stands for every snapshot), and until it ends.
3. A vacuum first publishes where history begins from now on. A read that resolves after that finds only what is kept.
   One that resolved before was noted before, and is in every report that is collected afterwards, until it ends.
4. So the vacuum waits for such a report of every process. It counts them, as clocks may differ: of the reports that
   arrive after it has looked, the first may have been collected earlier; the second was collected after the first had
   arrived.
5. What a report says may be over by now; then files stay until the next vacuum. It never says too little.

A process that reports nothing for long is taken for dead. If it only stood still, its reads may find a file missing,
which breaks them off with an error; none of them shows less than there is.
"""

import time
from collections.abc import Mapping

import structlog

from tarn.datasets.registry import Dataset
from tarn.db import reader_heartbeats as readers
from tarn.db.engine import Database
from tarn.model.job import Report
from tarn.settings import Settings

log = structlog.get_logger(__name__)

UNKNOWN = 0
"""Below every number of a snapshot."""

REPORTS_NEEDED = 2
"""Reports after which one of them was collected after the first look."""


def oldest_reported(database: Database, dataset: Dataset) -> int | None:
    """The oldest snapshot that anybody was reading a moment ago; None: nobody reads any."""
    with database.read() as connection:
        return _oldest(readers.latest(connection), dataset)


def oldest_running(database: Database, settings: Settings, dataset: Dataset, report: Report) -> int | None:
    """The oldest snapshot that a read needs which began before this call; None: there is no such read.

    Waits for the reports of every process, and forgets those that are silent for too long. `report` is called while
    it waits, and ends the wait by what it raises.
    """
    with database.read() as connection:
        first = readers.latest(connection)
    until = time.monotonic() + settings.reader_silent_after
    while True:
        with database.read() as connection:
            told = readers.latest(connection)
        # Whoever is gone reads nothing any more.
        late = [
            reader for reader in first.keys() & told.keys() if told[reader].beat < first[reader].beat + REPORTS_NEEDED
        ]
        if not late or time.monotonic() > until:
            break
        report(None)
        time.sleep(settings.reader_heartbeat / 4)
    if late:
        log.warning("API processes are silent, and are taken for dead", readers=late)
        with database.write() as connection:
            readers.forget(connection, late)
    return _oldest({reader: said for reader, said in told.items() if reader not in late}, dataset)


def _oldest(told: Mapping[str, readers.ReaderHeartbeat], dataset: Dataset) -> int | None:
    return min((said.oldest[dataset.id] for said in told.values() if dataset.id in said.oldest), default=None)
