"""The database's clock, by which leases of all processes are judged: no process's own may be trusted with another's.

PostgreSQL has one. SQLite has none but the machine's, which somebody may set while locks are held. All its processes
are on that machine, so its time is a moment that was noted once, and the seconds that the machine has counted since.
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
    """What the database's clock says now. A transaction that writes notes the moment from which SQLite's counts."""
    if connection.dialect.name == "postgresql":
        moment: datetime = connection.execute(select(func.clock_timestamp(type_=clock.c.at.type))).scalar_one()
        return moment
    boot = _boot()
    if boot is None:
        return now()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    noted = connection.execute(select(clock)).first()
    if noted is not None and noted.boot == boot:
        counted: datetime = noted.at + timedelta(seconds=uptime - noted.since)
        return counted
    moment = now() if noted is None else max(now(), noted.at)
    if connection.get_execution_options().get("sqlite_begin"):
        connection.execute(delete(clock))
        connection.execute(insert(clock).values(boot=boot, since=uptime, at=moment))
    return moment


@cache
def _boot() -> str | None:
    """What names this run of the machine; None where the system does not tell."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return None
