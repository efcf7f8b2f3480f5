"""The access revision: one mark in SQL that changes with everything that decides who may do what.

Whoever changes a tenant, a key, a grant, a limit, or which datasets there are, calls `bump` in the same transaction.
A request reads the mark first, and what was looked up earlier under the same mark still holds: one statement instead
of one for each part, and what is taken away ends with the very next request, in every process.

The mark is drawn anew and not counted up: after a database was restored or failed over without its last transactions,
a count could come to a number that some process remembers something else by.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from sqlalchemy import Connection, update

from tarn.db.tables import access_revision
from tarn.model.ids import new_id

T = TypeVar("T")

MAX_CACHED = 10_000
"""Answers remembered at most; those not asked for longest go first."""


def bump(connection: Connection) -> None:
    """End what every process remembers, with this transaction.

    Best called last: on PostgreSQL, changes of access wait for each other from here to the commit.
    """
    changed = connection.execute(update(access_revision).values(revision=new_id()))
    assert changed.rowcount == 1, "the migration puts exactly one row there"


def current(connection: Connection) -> str:
    # Every request asks this, so it goes past SQLAlchemy's compiler.
    return str(connection.exec_driver_sql("SELECT revision FROM access_revision").scalar_one())


class RevisionCache(Generic[T]):
    """Answers read under one revision, good for as long as it is the current one. Safe between threads."""

    def __init__(self, most: int = MAX_CACHED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, Hashable], T] = OrderedDict()

    def get(self, revision: str, question: Hashable, read: Callable[[], T]) -> T:
        """The answer remembered, or else what `read` reads in the transaction that read the revision.

        What `read` raises is not remembered.
        """
        place = (revision, question)
        with self._lock:
            if place in self._answers:
                self._answers.move_to_end(place)
                return self._answers[place]
        answer = read()
        self.put(revision, question, answer)
        return answer

    def peek(self, revision: str, question: Hashable) -> T | None:
        """The answer remembered, or None."""
        with self._lock:
            return self._answers.get((revision, question))

    def put(self, revision: str, question: Hashable, answer: T) -> None:
        """Remember what was read in the transaction that read the revision."""
        with self._lock:
            self._answers[revision, question] = answer
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
