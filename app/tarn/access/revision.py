"""Access revision: one value in SQL that changes with every change of access rights, and the cache keyed by it.

Code that changes a tenant, key, grant, limit, or the set of datasets calls `bump` in the same transaction. A request
reads the revision first, and cached values of the same revision are valid: one query instead of several, and a
revocation takes effect with the next request in every process.

The revision is random and not a counter: after a restore or failover that lost transactions, a counter could reach a
number again under which some process has cached other values.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from sqlalchemy import Connection, update

from tarn.db.engine import Database
from tarn.db.notifications import ACCESS, publish
from tarn.db.tables import access_revision
from tarn.model.ids import new_id

T = TypeVar("T")

MAX_CACHED = 10_000
"""Maximum cached values; the least recently used are evicted."""


def bump(connection: Connection) -> None:
    """Invalidate the caches of all processes when this transaction commits.

    Best called last: on PostgreSQL, changes of access wait for each other from here to the commit.
    """
    changed = connection.execute(update(access_revision).values(revision=new_id()))
    assert changed.rowcount == 1, "the table has exactly one row, inserted by its migration"
    publish(connection, ACCESS)


def read_current(database: Database) -> str:
    """Return the current access revision, in a transaction of its own."""
    with database.read() as connection:
        return current(connection)


def current(connection: Connection) -> str:
    """Return the current access revision."""
    # Every request runs this, so it bypasses SQLAlchemy's compiler.
    return str(connection.exec_driver_sql("SELECT revision FROM access_revision").scalar_one())


class RevisionCache(Generic[T]):
    """LRU cache of values read under a revision, valid while it is current. Thread-safe."""

    def __init__(self, max_size: int = MAX_CACHED) -> None:
        self._max_size = max_size
        self._lock = threading.Lock()
        self._values: OrderedDict[tuple[str, Hashable], T] = OrderedDict()

    def get(self, revision: str, key: Hashable, read: Callable[[], T]) -> T:
        """Return the cached value, or call `read` in the transaction that read the revision and cache its result.

        Exceptions of `read` are not cached.
        """
        entry = revision, key
        with self._lock:
            if entry in self._values:
                self._values.move_to_end(entry)
                return self._values[entry]
        value = read()
        self.put(revision, key, value)
        return value

    def peek(self, revision: str, key: Hashable) -> T | None:
        """Return the cached value, or None."""
        with self._lock:
            return self._values.get((revision, key))

    def put(self, revision: str, key: Hashable, value: T) -> None:
        """Cache a value that was read in the transaction that read the revision."""
        with self._lock:
            self._values[revision, key] = value
            while len(self._values) > self._max_size:
                self._values.popitem(last=False)
