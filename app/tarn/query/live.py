"""The relation `live`: one row for each statement that is live in a view, for every kind of read.

What is live is said in `tarn.lake.live.sql`. Here it is asked of files and of unflushed events together: what the
events do not touch is taken from the store as it is, and the rest is folded as a flush would fold it.
"""

# ruff: noqa: S608 - put together from constants, names and paths of ours; what users send is bound

from collections.abc import Collection, Iterable, Set
from typing import Any, NamedTuple

import duckdb

from tarn.journal.overlay import Unflushed
from tarn.lake.live import sql as fold_sql
from tarn.lake.live.reference import ADD, Event, Identity, Live, Statement, fold
from tarn.model.ranges import Range
from tarn.query.duckdb_process import hand_over
from tarn.query.planner import IDENTITY, NO_MARKS, NOTHING, Query, ScanPlan, quoted
from tarn.query.views import NONE, View
from tarn.storage.store import Store

COLUMNS = (
    "canonical_id, entity_id, id, schema, prop, value, lang, original_value, external, origin, first_seen, last_seen"
)


class IncompleteEvents(Exception):
    """The view has events on the entities that were asked for, and it takes more than those: resolve it anew."""


def make_within(duck: duckdb.DuckDBPyConnection, store: Store, view: View, name: str, within: Range) -> None:
    """Make `name` a view of what is live in a snapshot under a range of canonical ids.

    Whatever moves to another key leaves a mark under the one it had, so a range can be folded by itself.
    """
    assert view.events is NONE
    stored = _stored_whole(ScanPlan(store, view.dataset, view.snapshot, within=within))
    _create_view(duck, view, name, f"SELECT {COLUMNS} FROM ({stored})")


def make_all(duck: duckdb.DuckDBPyConnection, store: Store, view: View, name: str, origin: str | None = None) -> None:
    """Make `name` a view of everything that is live: of every origin, or at least of one."""
    plan = ScanPlan(store, view.dataset, view.snapshot, origin)
    everything = _stored_whole(plan)
    if not _create_events(duck, view.events):
        _create_view(duck, view, name, f"SELECT {COLUMNS} FROM ({everything})")
        return
    duck.execute(
        f"CREATE OR REPLACE TEMP TABLE {name}_concerned AS "
        "SELECT DISTINCT entity_id FROM events WHERE entity_id IS NOT NULL"
    )
    about = Query(f"WHERE entity_id IN (SELECT entity_id FROM {name}_concerned)")
    _fold(duck, _stored(plan, plan.rows(about), plan.happened(about)), f"{name}_changed")
    erased = [row[0] for row in _all(duck, "SELECT DISTINCT origin FROM events WHERE kind = 3 AND entity_id IS NULL")]
    # All that is stored is older than any event, so an erase of an origin ends all of it that the events do not touch.
    left = "false" if None in erased else f"origin NOT IN ({', '.join(map(quoted, erased))})" if erased else "true"
    _create_view(
        duck,
        view,
        name,
        f"SELECT {COLUMNS} FROM ({everything}) ANTI JOIN {name}_concerned USING (entity_id) WHERE {left} "
        f"UNION ALL SELECT {COLUMNS} FROM {name}_changed",
    )


class LookupTooLarge(Exception):
    """A lookup concerns more ids or statements than this process may work on: begin it anew as a query."""


MAX_LOOKUP_IDS = 500
MAX_LOOKUP_ROWS = 10_000
"""What a lookup in the API's own process concerns at most. It cannot be killed there, and its rows become objects."""


def make_entities(
    duck: duckdb.DuckDBPyConnection, store: Store, view: View, ids: Collection[str], name: str, brief: bool = False
) -> None:
    """Make `name` a table of the entities that these ids name: by canonical id, entity id or referent.

    Of every origin: which entity an id names does not depend on whose word of it is asked for. Raises NotWhole, and
    NotBrief if it must be brief and concerns too much.
    """
    plan = ScanPlan(store, view.dataset, view.snapshot)
    entities = _find_ids(duck, plan, view.events, frozenset(ids), brief)
    among = sorted(entities)
    stored = _stored(plan, Query("SELECT * FROM found"), plan.happened(_where("entity_id", among), among))
    if _create_events(duck, Unflushed(view.events.on(entities))):
        _fold(duck, stored, "folded")
    else:
        duck.execute(f"CREATE OR REPLACE TEMP TABLE folded AS SELECT {COLUMNS} FROM ({stored.sql})", stored.parameters)
    wanted = sorted(ids)
    duck.execute(
        f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT {quoted(view.dataset.name)} AS dataset, {COLUMNS} FROM folded "
        f"WHERE canonical_id IN (SELECT canonical_id FROM folded WHERE entity_id IN ({_marks(wanted)}) "
        f"OR canonical_id IN ({_marks(wanted)}))",
        wanted * 2,
    )


def own_statements(
    duck: duckdb.DuckDBPyConnection,
    store: Store,
    view: View,
    entity_id: str,
    origin: str | None = None,
    brief: bool = False,
) -> list[Statement] | None:
    """The live statements of an entity that goes by its own id alone, of every origin or at least of one.

    Most do, and then a look at the files and a few events folded one after the other are all there is to do. None if
    other ids come into it, or if an origin says nothing under this one: it may do so under one that others gave it.
    Raises NotBrief if it must be brief and there are too many statements or events.
    """
    plan = ScanPlan(store, view.dataset, view.snapshot, origin)
    events: list[Event] = []
    if view.events.may_concern(entity_id):
        if view.events.added({entity_id}, {entity_id}) - {(entity_id, entity_id)}:
            return None
        concerned = view.events.on({entity_id})
        if brief and concerned.num_rows > MAX_LOOKUP_ROWS:
            raise LookupTooLarge
        events = [_event(row) for row in concerned.to_pylist()]
    found = _under(plan, {entity_id}, {entity_id})
    rows = []
    if found != NOTHING:
        rows = _fetch(duck, Query(f"SELECT {COLUMNS}, ord FROM ({found.sql})", found.parameters), brief)
    if any((row[0], row[1]) != (entity_id, entity_id) for row in rows):
        return None
    happened = plan.happened(_where("entity_id", [entity_id]), [entity_id])
    marks = [] if happened is None else _fetch(duck, happened, brief)
    live = [*fold(_newest(rows, [Mark(*mark) for mark in marks]), events).values()]
    return live if live or origin is None else None


def _fetch(duck: duckdb.DuckDBPyConnection, query: Query, brief: bool) -> list[tuple[Any, ...]]:
    """The rows of a query. Raises NotBrief if they must be few and are not."""
    if not brief:
        return duck.execute(query.sql, query.parameters).fetchall()
    limited = f"SELECT * FROM ({query.sql}) LIMIT {MAX_LOOKUP_ROWS + 1}"
    rows = duck.execute(limited, query.parameters).fetchall()
    if len(rows) > MAX_LOOKUP_ROWS:
        raise LookupTooLarge
    return rows


class Mark(NamedTuple):
    """What happened to a statement since its row was written."""

    id: bytes
    origin: str
    kind: str
    first_seen: int
    last_seen: int
    ord: int


def _newest(rows: Iterable[tuple[Any, ...]], marks: Iterable[Mark]) -> Live:
    """What is live in the store: the newest row of an identity, unless something later deletes it."""
    newest: dict[Identity, tuple[int, Statement]] = {}
    for *columns, ord_ in rows:
        one = Statement(*columns)
        if one.identity not in newest or newest[one.identity][0] < ord_:
            newest[one.identity] = ord_, one
    live = {identity: one for identity, (_, one) in newest.items()}
    ended = set()
    for mark in marks:
        identity = mark.id, mark.origin
        if identity not in newest or mark.ord <= newest[identity][0]:
            continue
        if mark.kind == "delete":
            ended.add(identity)
        one = live[identity]
        first, last = min(one.first_seen, mark.first_seen), max(one.last_seen, mark.last_seen)
        live[identity] = one._replace(first_seen=first, last_seen=last)
    return {identity: one for identity, one in live.items() if identity not in ended}


def _event(row: dict[str, Any]) -> Event:
    said = None
    if row["kind"] == ADD:
        own = {name: row[name] for name in Statement._fields}
        said = Statement(**own | {"canonical_id": row["canonical_id"] or row["entity_id"]})
    return Event(row["ord"], row["kind"], row["entity_id"], row["origin"], row["id"], said)


def _find_ids(
    duck: duckdb.DuckDBPyConnection, plan: ScanPlan, events: Unflushed, wanted: frozenset[str], brief: bool
) -> frozenset[str]:
    """The entity ids whose statements may be part of what these ids name; and the table `found` of what is stored.

    Most ids name what they are. Where entities were merged, an id leads to a canonical one, and that to others.
    """
    entities = canonicals = wanted
    looked: tuple[frozenset[str], frozenset[str]] | None = None
    while (entities, canonicals) != looked:
        pairs = _find(duck, plan, events, entities, canonicals, brief)
        if brief and len(pairs) > MAX_LOOKUP_IDS:
            raise LookupTooLarge
        if looked is None:
            canonicals = canonicals.union(canonical for _, canonical in pairs)
            looked = wanted, wanted
        else:
            looked = entities, canonicals
        entities = entities.union(entity for entity, canonical in pairs if canonical in canonicals)
        # Under another canonical id there may be entities whose events were not asked for.
        if not events.is_whole and not entities == canonicals == wanted:
            raise IncompleteEvents
    return entities


def _find(
    duck: duckdb.DuckDBPyConnection,
    plan: ScanPlan,
    events: Unflushed,
    entities: frozenset[str],
    canonicals: frozenset[str],
    brief: bool,
) -> set[tuple[str, str]]:
    """Make the table `found` of what is stored under these ids; the pairs of ids in it and in the events' adds."""
    found = _under(plan, entities, canonicals)
    duck.execute(f"CREATE OR REPLACE TEMP TABLE found AS {found.sql}", found.parameters)
    enough = f" LIMIT {MAX_LOOKUP_IDS + 1}" if brief else ""
    pairs = {(row[0], row[1]) for row in _all(duck, f"SELECT DISTINCT entity_id, canonical_id FROM found{enough}")}
    return pairs | events.added(entities, canonicals)


def _under(plan: ScanPlan, entities: Set[str], canonicals: Set[str]) -> Query:
    """What is stored of these entities, or under these canonical ids."""
    of, under = sorted(entities), sorted(canonicals)
    by_key = plan.rows(_where("canonical_id", under), under)
    # Two scans, as each can leave out most of a file by its own bounds; with OR between them none could.
    others = Query(f"WHERE entity_id IN ({_marks(of)}) AND canonical_id NOT IN ({_marks(under)})", (*of, *under))
    return by_key.then(plan.rows(others, of, "entity_id"))


def _stored(plan: ScanPlan, rows: Query, marks: Query | None) -> Query:
    """What is live in the store of these rows."""
    if plan.is_once and marks is None:
        return rows
    query = fold_sql.STORED_ONCE if plan.is_once else fold_sql.STORED
    marked = marks or Query(NO_MARKS)
    return Query(query.format(rows=rows.sql, marks=marked.sql, materialized=""), rows.parameters + marked.parameters)


def _stored_whole(plan: ScanPlan) -> str:
    """What is live in all of the store, or in the plan's range of it."""
    rows, happened = plan.rows(plan.within), plan.happened(plan.within)
    if plan.is_once:
        return _stored(plan, rows, happened).sql
    marks = happened or Query(NO_MARKS)
    identities = plan.rows(plan.within, columns=IDENTITY)
    return fold_sql.STORED_WHOLE.format(rows=rows.sql, identities=identities.sql, marks=marks.sql)


def _create_events(duck: duckdb.DuckDBPyConnection, events: Unflushed) -> bool:
    """Make the table `events`, if there are any."""
    if events.file is not None:
        source = f"read_parquet({quoted(str(events.file))})"
    elif events.table.num_rows:
        hand_over(duck, "incoming", events.table, events.version)
        source = "incoming"
    else:
        return False
    duck.execute(f"CREATE OR REPLACE TEMP TABLE events AS SELECT * FROM {source}")
    duck.execute(fold_sql.ADDS)
    return True


def _fold(duck: duckdb.DuckDBPyConnection, stored: Query, name: str) -> None:
    """Make the table `name` of what is live after the events, of what was live in the store before."""
    duck.execute(f"CREATE OR REPLACE TEMP TABLE stored AS {stored.sql}", stored.parameters)
    for statement in fold_sql.ENDINGS:
        duck.execute(statement)
    duck.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {fold_sql.AFTER}")


def _create_view(duck: duckdb.DuckDBPyConnection, view: View, name: str, query: str) -> None:
    duck.execute(
        f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT {quoted(view.dataset.name)} AS dataset, {COLUMNS} FROM ({query})"
    )


def _where(column: str, values: list[str]) -> Query:
    return Query(f"WHERE {column} IN ({_marks(values)})", tuple(values))


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _all(duck: duckdb.DuckDBPyConnection, query: str) -> list[tuple[str, ...]]:
    return duck.execute(query).fetchall()
