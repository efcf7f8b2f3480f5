"""Active readers: the oldest snapshot that any API process still reads, which a vacuum must not delete files of.

Reads need no lease and cost no call: each API process tracks its own in memory and reports, every few seconds, the
oldest snapshot that it reads of each dataset (`app/tarn/query/active_reads.py`). Why no read loses a file:

1. A process reports before its first read, so every reader is among the reports.
2. A read is tracked from before it resolves its snapshot until it ends. Until it is resolved it counts as reading any
   snapshot (`UNKNOWN`).
3. A vacuum first publishes where history begins from now on. A read that resolves after that finds only kept
   snapshots. One that resolved before was tracked before, and is in every later report until it ends.
4. So the vacuum waits for such a report of every process. It counts reports instead of comparing times, as clocks may
   differ: the first report that arrives after the vacuum began to wait may have been collected earlier; the second was
   collected after the first had arrived.
5. A report may name a read that has ended; then its files stay until the next vacuum. It never omits a running read.

A process whose heartbeat stops is considered dead. If it was only paused, its reads may find a file missing and fail
with an error; none of them returns incomplete data.
"""

import time
from collections.abc import Mapping

import structlog

from tarn.datasets.registry import Dataset
from tarn.db import reader_heartbeats
from tarn.db.engine import Database
from tarn.model.work.job import Report
from tarn.settings import Settings

log = structlog.get_logger(__name__)

UNKNOWN = 0
"""Lower than every snapshot number."""

REPORTS_NEEDED = 2
"""Reports of a process after which one of them is certain to have been collected after the wait began."""


def oldest_reported(database: Database, dataset: Dataset) -> int | None:
    """Return the oldest snapshot that is being read by the latest reports, or None if no read is reported."""
    with database.read() as connection:
        return _oldest(reader_heartbeats.latest(connection), dataset)


def oldest_running(database: Database, settings: Settings, dataset: Dataset, report: Report) -> int | None:
    """Return the oldest snapshot that is needed by a read which began before this call, or None if there is none.

    Wait for the reports of every process, and remove those that are silent for too long. `report` is called during the
    wait, and ends it by raising.
    """
    with database.read() as connection:
        first = reader_heartbeats.latest(connection)
    until = time.monotonic() + settings.reader_silent_after
    while True:
        with database.read() as connection:
            reports = reader_heartbeats.latest(connection)
        # A process that has deregistered reads nothing any more.
        late = [
            reader
            for reader in first.keys() & reports.keys()
            if reports[reader].beat < first[reader].beat + REPORTS_NEEDED
        ]
        if not late or time.monotonic() > until:
            break
        report(None)
        time.sleep(settings.reader_heartbeat / 4)
    if late:
        log.warning("API processes sent no heartbeat in time and are considered dead", readers=late)
        with database.write() as connection:
            reader_heartbeats.forget(connection, late)
    return _oldest({reader: latest for reader, latest in reports.items() if reader not in late}, dataset)


def _oldest(reports: Mapping[str, reader_heartbeats.ReaderHeartbeat], dataset: Dataset) -> int | None:
    oldest = (heartbeat.oldest[dataset.id] for heartbeat in reports.values() if dataset.id in heartbeat.oldest)
    return min(oldest, default=None)
