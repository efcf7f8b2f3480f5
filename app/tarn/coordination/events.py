"""Events of datasets and jobs, as followers of a stream read them from the outbox."""

from collections.abc import Mapping
from typing import NamedTuple

from tarn.access import revision
from tarn.db import outbox
from tarn.db.engine import Database
from tarn.db.outbox import OutboxPage

PAGE_EVENTS = 100
"""Events that are read by one query."""


class EventPage(NamedTuple):
    """A page of new events, and the access revision under which they were read."""

    page: OutboxPage
    revision: str


class NewEvents(NamedTuple):
    """The access revision, and a page of each stream that has new events."""

    revision: str
    pages: dict[str, OutboxPage]


class EventReader:
    """Reads event streams, each time together with the access revision, in one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def last_number(self, stream: str) -> int:
        """Return the number of a stream's last event, or 0."""
        with self._database.read() as connection:
            return outbox.heads(connection, [stream]).get(stream, 0)

    def after(self, positions: Mapping[str, int]) -> NewEvents:
        """Return the events after these numbers, by stream."""
        with self._database.read() as connection:
            current = revision.current(connection)
            last_numbers = outbox.heads(connection, positions.keys())
            moved = [stream for stream, last in last_numbers.items() if last > positions[stream]]
            pages = {stream: outbox.after(connection, stream, positions[stream], PAGE_EVENTS) for stream in moved}
            return NewEvents(current, pages)

    def page(self, stream: str, above: int, job: str | None) -> EventPage:
        """Return the events of a stream above a number, or only those of one job."""
        with self._database.read() as connection:
            current = revision.current(connection)
            return EventPage(outbox.after(connection, stream, above, PAGE_EVENTS, job), current)

    def has_more(self, stream: str, above: int, job: str) -> bool:
        """Return whether a job has events above a number."""
        with self._database.read() as connection:
            return bool(outbox.after(connection, stream, above, 1, job).events)
