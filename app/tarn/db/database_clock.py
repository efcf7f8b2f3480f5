"""The database's clock, by which the leases of all processes expire, because their own clocks may differ.

PostgreSQL has a clock. SQLite only has the machine's, which may be set while locks are held. All processes that use a
SQLite file run on one machine, so the time is a recorded wall-clock time plus the seconds of uptime since then.
"""

import time
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select

from tarn.db.tables import clock
from tarn.model.ids import now

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def database_time(connection: Connection) -> datetime:
    """Return the database's current time. On SQLite, a write transaction stores the starting point if absent."""
    if connection.dialect.name == "postgresql":
        moment: datetime = connection.execute(select(func.clock_timestamp(type_=clock.c.at.type))).scalar_one()
        return moment
    boot = _boot()
    if boot is None:
        return now()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    recorded = connection.execute(select(clock)).first()
    if recorded is not None and recorded.boot == boot:
        counted: datetime = recorded.at + timedelta(seconds=uptime - recorded.since)
        return counted
    moment = now() if recorded is None else max(now(), recorded.at)
    if connection.get_execution_options().get("sqlite_begin"):
        connection.execute(delete(clock))
        connection.execute(insert(clock).values(boot=boot, since=uptime, at=moment))
    return moment


@cache
def _boot() -> str | None:
    """Return the id of this boot of the machine; None where the operating system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None
