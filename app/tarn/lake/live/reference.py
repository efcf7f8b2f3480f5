"""Reference implementation: the definition of live statements, one row or event at a time.

`stored_live` says what is live in a store:

- The newest row of an identity decides, unless a later mark of the translog deletes it. An identity is (statement,
  origin).
- `first_seen` and `last_seen` range over that row and the marks after it.

`fold` says what is live after events of the journal:

- The newest event of an identity decides.
- Of an entity's BASE statements of one origin only the newest is live.
- An erase ends what came before it, and nothing that comes after it.
- `first_seen` and `last_seen` range over all adds since the statement last became live. A statement that one commit
  both ends and adds again never stopped being live for readers.

`tarn.lake.live.sql` computes both in SQL for many entities at once; tests check that they agree.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

ADD, DELETE, ERASE = 1, 2, 3

BASE = "id"
"""FtM's property name of BASE statements; not imported, because executors run without FtM."""

Identity = tuple[bytes, str]


class Statement(NamedTuple):
    """A live statement."""

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
    """An event of the journal. A field that does not apply is None: an erase without an entity applies to all."""

    ord: int
    kind: int
    entity_id: str | None
    origin: str | None
    id: bytes | None
    statement: Statement | None = None

    @property
    def commit(self) -> int:
        return self.ord >> 32


class StoredRow(NamedTuple):
    """A row of the table `statements`."""

    statement: Statement
    ord: int


class Mark(NamedTuple):
    """A row of the translog that changes a statement after its row was written."""

    id: bytes
    origin: str
    kind: str
    first_seen: int
    last_seen: int
    ord: int


Live = dict[Identity, Statement]


def stored_live(rows: Iterable[StoredRow], marks: Iterable[Mark]) -> Live:
    """Return the live statements of a store, given its rows and marks in any order."""
    newest: dict[Identity, StoredRow] = {}
    for row in rows:
        identity = row.statement.identity
        if identity not in newest or newest[identity].ord < row.ord:
            newest[identity] = row
    live = {identity: row.statement for identity, row in newest.items()}
    deleted = set()
    for mark in marks:
        identity = mark.id, mark.origin
        if identity not in newest or mark.ord <= newest[identity].ord:
            continue
        if mark.kind == "delete":
            deleted.add(identity)
        live[identity] = _seen_at(live[identity], mark)
    return {identity: statement for identity, statement in live.items() if identity not in deleted}


def fold(before: Live, events: Iterable[Event]) -> Live:
    """Return the live statements after these events, given the live statements before them."""
    live = dict(before)
    for _, commit in groupby(sorted(events), attrgetter("commit")):
        known = dict(live)
        for event in commit:
            _apply(live, known, event)
    return live


def _apply(live: Live, known: Live, event: Event) -> None:
    """Apply one event. `known` has every statement that was live at some point of the commit, even if ended since."""
    if event.kind == ADD:
        added = event.statement
        assert added is not None
        if added.prop == BASE:
            _end(live, [other for other in live.values() if _is_other_base(other, added)])
        former = known.get(added.identity)
        if former is not None:
            added = _seen_at(added, former)
        live[added.identity] = known[added.identity] = added
    elif event.kind == DELETE:
        assert event.id is not None
        assert event.origin is not None
        live.pop((event.id, event.origin), None)
    else:
        _end(live, [statement for statement in live.values() if _is_erased(statement, event)])


def _seen_at(statement: Statement, other: Statement | Mark) -> Statement:
    """Extend the times of a statement by those of another record of it."""
    first, last = min(statement.first_seen, other.first_seen), max(statement.last_seen, other.last_seen)
    return statement._replace(first_seen=first, last_seen=last)


def _end(live: Live, ended: Iterable[Statement]) -> None:
    for statement in ended:
        del live[statement.identity]


def _is_other_base(other: Statement, added: Statement) -> bool:
    same = (other.prop, other.entity_id, other.origin) == (BASE, added.entity_id, added.origin)
    return same and other.id != added.id


def _is_erased(statement: Statement, event: Event) -> bool:
    return event.entity_id in (None, statement.entity_id) and event.origin in (None, statement.origin)
