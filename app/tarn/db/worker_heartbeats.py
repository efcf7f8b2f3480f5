"""Heartbeats of the workers."""

import os
import socket
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, func, insert, select, update

from tarn.db.tables import workers
from tarn.model.ids import now


def register(connection: Connection, worker: str) -> None:
    """Add a worker that starts."""
    moment = now()
    connection.execute(
        insert(workers).values(id=worker, host=socket.gethostname(), pid=os.getpid(), started=moment, seen=moment)
    )


def beat(connection: Connection, worker: str, forget_after: float) -> None:
    """Record a heartbeat of this worker, and delete workers without one for `forget_after` seconds."""
    moment = now()
    connection.execute(update(workers).where(workers.c.id == worker).values(seen=moment))
    connection.execute(delete(workers).where(workers.c.seen < moment - timedelta(seconds=forget_after)))


def leave(connection: Connection, worker: str) -> None:
    """Delete a worker that stops."""
    connection.execute(delete(workers).where(workers.c.id == worker))


def last_seen(connection: Connection) -> datetime | None:
    """Return the time of the latest heartbeat of any worker."""
    return connection.execute(select(func.max(workers.c.seen, type_=workers.c.seen.type))).scalar()
