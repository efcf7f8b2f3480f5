"""Signs of life of the workers."""

import os
import socket
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, func, insert, select, update

from tarn.db.tables import workers
from tarn.model.ids import now


def register(connection: Connection, worker: str) -> None:
    moment = now()
    connection.execute(
        insert(workers).values(id=worker, host=socket.gethostname(), pid=os.getpid(), started=moment, seen=moment)
    )


def beat(connection: Connection, worker: str, forget_after: float) -> None:
    """Say that this worker lives, and forget those that have been silent for long."""
    moment = now()
    connection.execute(update(workers).where(workers.c.id == worker).values(seen=moment))
    connection.execute(delete(workers).where(workers.c.seen < moment - timedelta(seconds=forget_after)))


def leave(connection: Connection, worker: str) -> None:
    connection.execute(delete(workers).where(workers.c.id == worker))


def last_seen(connection: Connection) -> datetime | None:
    """When any worker last gave a sign of life."""
    return connection.execute(select(func.max(workers.c.seen, type_=workers.c.seen.type))).scalar()
