"""What is live: the one definition, one event after the other.

The newest event on an identity counts. An identity is (statement, origin); of an entity's BASE statements of one origin
only the newest lives. An erase ends what came before it, and nothing that comes after. First and last seen are over all
adds since a statement last came to be; what one commit ends and says again was never gone for anybody.

`tarn.lake.live.sql` does the same set by set, for many entities at once; tests hold the two equal.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

ADD, DELETE, ERASE = 1, 2, 3

BASE = "id"
"""FtM's property of BASE statements; not imported, as executors can do without FtM."""

Identity = tuple[bytes, str]


class Statement(NamedTuple):
    """A statement that is live."""

    canonical_id: str
    entity_id: str
    id: bytes
    schema: str
    prop: str
    value: str
    lang: str | None
    original_value: str | None
    external: bool
    origin: str
    first_seen: int
    last_seen: int

    @property
    def identity(self) -> Identity:
        return self.id, self.origin


class Event(NamedTuple):
    """An event of the journal. What it does not speak of is None: an erase without an entity is of every one."""

    ord: int
    kind: int
    entity_id: str | None
    origin: str | None
    id: bytes | None
    said: Statement | None = None

    @property
    def commit(self) -> int:
        return self.ord >> 32


Live = dict[Identity, Statement]


def fold(before: Live, events: Iterable[Event]) -> Live:
    """What is live after these events, of what was live before."""
    live = dict(before)
    for _, commit in groupby(sorted(events), attrgetter("commit")):
        known = dict(live)
        for event in commit:
            _apply(live, known, event)
    return live


def _apply(live: Live, known: Live, event: Event) -> None:
    """Let one event happen. `known` is what the commit has seen live so far, ended since or not."""
    if event.kind == ADD:
        said = event.said
        assert said is not None
        if said.prop == BASE:
            _end(live, [one for one in live.values() if _is_other_base(one, said)])
        former = known.get(said.identity)
        if former is not None:
            first, last = min(former.first_seen, said.first_seen), max(former.last_seen, said.last_seen)
            said = said._replace(first_seen=first, last_seen=last)
        live[said.identity] = known[said.identity] = said
    elif event.kind == DELETE:
        assert event.id is not None
        assert event.origin is not None
        live.pop((event.id, event.origin), None)
    else:
        _end(live, [one for one in live.values() if _is_erased(one, event)])


def _end(live: Live, ended: Iterable[Statement]) -> None:
    for one in ended:
        del live[one.identity]


def _is_other_base(one: Statement, said: Statement) -> bool:
    same = (one.prop, one.entity_id, one.origin) == (BASE, said.entity_id, said.origin)
    return same and one.id != said.id


def _is_erased(one: Statement, event: Event) -> bool:
    return event.entity_id in (None, one.entity_id) and event.origin in (None, one.origin)
