"""The relation `live`: one row for each statement that is live in a view, for every kind of read.

`tarn.lake.live.sql` defines which statements are live. This module evaluates it over data files and unflushed events
together: rows that no event touches are read from the files, and the rest is folded as a flush would fold it.
"""

# ruff: noqa: S608 - SQL is built from constants, valid names and paths in the lake; user input is bound

from collections.abc import Collection, Set
from typing import Any

import duckdb

from tarn.journal.overlay import Unflushed
from tarn.lake.live import sql
from tarn.lake.live.reference import ADD, Event, Mark, Statement, StoredRow, fold, stored_live
from tarn.model.datasets.ranges import Range
from tarn.query.engine.duckdb_process import register_table
from tarn.query.planner import ScanPlan, SqlQuery
from tarn.query.views import NONE, View
from tarn.storage.duckdb_sql import placeholders, quote_literal, scan_parquet
from tarn.storage.store import Store

COLUMNS = (
    "canonical_id, entity_id, id, schema, prop, value, lang, original_value, external, origin, first_seen, last_seen"
)


class IncompleteEvents(Exception):
    """The view has only the events on the requested entities, and more are needed: resolve it again with all events."""


def make_within(duck: duckdb.DuckDBPyConnection, store: Store, view: View, name: str, within: Range) -> None:
    """Create the view `name` of what is live in a snapshot within a range of canonical ids.

    A statement that moves to another key leaves a mark under its former key, so each range can be folded separately.
    """
    assert view.events is NONE
    stored = _stored_whole(ScanPlan(store, view.dataset, view.snapshot, keys=within))
    _create_view(duck, view, name, f"SELECT {COLUMNS} FROM ({stored})")


def make_all(duck: duckdb.DuckDBPyConnection, store: Store, view: View, name: str, origin: str | None = None) -> None:
    """Create the view `name` of everything that is live: of every origin, or at least of one."""
    plan = ScanPlan(store, view.dataset, view.snapshot, origin)
    everything = _stored_whole(plan)
    if not _create_events(duck, view.events):
        _create_view(duck, view, name, f"SELECT {COLUMNS} FROM ({everything})")
        return
    duck.execute(
        f"CREATE OR REPLACE TEMP TABLE {name}_affected AS "
        "SELECT DISTINCT entity_id FROM events WHERE entity_id IS NOT NULL"
    )
    about = SqlQuery(f"WHERE entity_id IN (SELECT entity_id FROM {name}_affected)")
    _fold(duck, _stored(plan, plan.rows(about), plan.changes(about)), f"{name}_changed")
    erasures = "SELECT DISTINCT origin FROM events WHERE kind = 3 AND entity_id IS NULL"
    erased = [origin for (origin,) in _fetch_all(duck, erasures)]
    # All stored rows are older than any event, so erasing an origin ends all its rows that no other event touches.
    not_erased = (
        "false" if None in erased else f"origin NOT IN ({', '.join(map(quote_literal, erased))})" if erased else "true"
    )
    _create_view(
        duck,
        view,
        name,
        f"SELECT {COLUMNS} FROM ({everything}) ANTI JOIN {name}_affected USING (entity_id) WHERE {not_erased} "
        f"UNION ALL SELECT {COLUMNS} FROM {name}_changed",
    )


class LookupTooLarge(Exception):
    """A lookup needs more ids or statements than this process may handle: restart it in the query process."""


MAX_LOOKUP_IDS = 500
MAX_LOOKUP_ROWS = 10_000
"""Limits of a lookup in the API process, where it cannot be killed and its rows become Python objects."""


def make_entities(
    duck: duckdb.DuckDBPyConnection, store: Store, view: View, ids: Collection[str], name: str, is_lookup: bool = False
) -> None:
    """Create the table `name` of the entities that these ids name: by canonical id, entity id or referent.

    It has the statements of every origin: which entity an id names does not depend on the origin that is requested.
    Raises IncompleteEvents, and LookupTooLarge if `is_lookup` is set and the limits of a lookup are exceeded.
    """
    plan = ScanPlan(store, view.dataset, view.snapshot)
    entities = _find_ids(duck, plan, view.events, frozenset(ids), is_lookup)
    sorted_ids = sorted(entities)
    stored = _stored(
        plan, SqlQuery("SELECT * FROM candidates"), plan.changes(_where("entity_id", sorted_ids), sorted_ids)
    )
    if _create_events(duck, Unflushed(view.events.on(entities))):
        _fold(duck, stored, "folded")
    else:
        duck.execute(f"CREATE OR REPLACE TEMP TABLE folded AS SELECT {COLUMNS} FROM ({stored.sql})", stored.parameters)
    requested = sorted(ids)
    duck.execute(
        f"CREATE OR REPLACE TEMP TABLE {name} AS "
        f"SELECT {quote_literal(view.dataset.name)} AS dataset, {COLUMNS} FROM folded "
        f"WHERE canonical_id IN (SELECT canonical_id FROM folded WHERE entity_id IN ({placeholders(requested)}) "
        f"OR canonical_id IN ({placeholders(requested)}))",
        requested * 2,
    )


def own_statements(
    duck: duckdb.DuckDBPyConnection,
    store: Store,
    view: View,
    entity_id: str,
    origin: str | None = None,
    is_lookup: bool = False,
) -> list[Statement] | None:
    """Return the live statements of an entity whose only id is `entity_id`, of every origin or at least of one.

    Most entities are of this kind; then one lookup in the files and a fold of a few events in Python are enough. Return
    None if other ids are involved, or if the origin has no statement under this id: it may have some under an id that
    other origins merged with it. Raises LookupTooLarge if `is_lookup` is set and statements or events are too many.
    """
    plan = ScanPlan(store, view.dataset, view.snapshot, origin)
    events: list[Event] = []
    if view.events.may_concern(entity_id):
        if view.events.added({entity_id}, {entity_id}) - {(entity_id, entity_id)}:
            return None
        concerned = view.events.on({entity_id})
        if is_lookup and concerned.num_rows > MAX_LOOKUP_ROWS:
            raise LookupTooLarge
        events = [_event(row) for row in concerned.to_pylist()]
    stored = _rows_of(plan, {entity_id}, {entity_id})
    rows: list[tuple[Any, ...]] = []
    if stored is not None:
        rows = _fetch(duck, SqlQuery(f"SELECT {COLUMNS}, ord FROM ({stored.sql})", stored.parameters), is_lookup)
    if any((row[0], row[1]) != (entity_id, entity_id) for row in rows):
        return None
    changes = plan.changes(_where("entity_id", [entity_id]), [entity_id])
    marks = [] if changes is None else _fetch(duck, changes, is_lookup)
    before = stored_live((StoredRow(Statement(*row), ord_) for *row, ord_ in rows), (Mark(*mark) for mark in marks))
    live = [*fold(before, events).values()]
    return live if live or origin is None else None


def _fetch(duck: duckdb.DuckDBPyConnection, query: SqlQuery, is_lookup: bool) -> list[tuple[Any, ...]]:
    """Return the rows of a query. Raises LookupTooLarge if `is_lookup` is set and there are too many."""
    if not is_lookup:
        return duck.execute(query.sql, query.parameters).fetchall()
    limited = f"SELECT * FROM ({query.sql}) LIMIT {MAX_LOOKUP_ROWS + 1}"
    rows = duck.execute(limited, query.parameters).fetchall()
    if len(rows) > MAX_LOOKUP_ROWS:
        raise LookupTooLarge
    return rows


def _event(row: dict[str, Any]) -> Event:
    statement = None
    if row["kind"] == ADD:
        own = {name: row[name] for name in Statement._fields}
        statement = Statement(**own | {"canonical_id": row["canonical_id"] or row["entity_id"]})
    return Event(row["ord"], row["kind"], row["entity_id"], row["origin"], row["id"], statement)


def _find_ids(
    duck: duckdb.DuckDBPyConnection, plan: ScanPlan, events: Unflushed, requested: frozenset[str], is_lookup: bool
) -> frozenset[str]:
    """Return the entity ids whose statements may belong to the requested entities; create the table `candidates`.

    Most ids are both entity id and canonical id. Where entities were merged, an id leads to a canonical id, and that to
    other entity ids; so the lookup is repeated until no new id appears.
    """
    entities = canonicals = requested
    searched: tuple[frozenset[str], frozenset[str]] | None = None
    while (entities, canonicals) != searched:
        pairs = _find(duck, plan, events, entities, canonicals, is_lookup)
        if is_lookup and len(pairs) > MAX_LOOKUP_IDS:
            raise LookupTooLarge
        if searched is None:
            canonicals = canonicals.union(canonical for _, canonical in pairs)
            searched = requested, requested
        else:
            searched = entities, canonicals
        entities = entities.union(entity for entity, canonical in pairs if canonical in canonicals)
        # Another canonical id may have entities whose events this view does not have.
        if not events.is_whole and not entities == canonicals == requested:
            raise IncompleteEvents
    return entities


def _find(
    duck: duckdb.DuckDBPyConnection,
    plan: ScanPlan,
    events: Unflushed,
    entities: frozenset[str],
    canonicals: frozenset[str],
    is_lookup: bool,
) -> set[tuple[str, str]]:
    """Create the table `candidates` of the rows stored under these ids.

    Return the pairs of entity id and canonical id in it and in the events that add statements.
    """
    stored = _rows_of(plan, entities, canonicals) or SqlQuery(plan.nothing())
    duck.execute(f"CREATE OR REPLACE TEMP TABLE candidates AS {stored.sql}", stored.parameters)
    limit = f" LIMIT {MAX_LOOKUP_IDS + 1}" if is_lookup else ""
    rows = _fetch_all(duck, f"SELECT DISTINCT entity_id, canonical_id FROM candidates{limit}")
    pairs = {(entity_id, canonical_id) for entity_id, canonical_id in rows}
    return pairs | events.added(entities, canonicals)


def _rows_of(plan: ScanPlan, entities: Set[str], canonicals: Set[str]) -> SqlQuery | None:
    """Return a query for the rows stored of these entities, or under these canonical ids; None if no file has any."""
    entity_ids, canonical_ids = sorted(entities), sorted(canonicals)
    by_key = plan.rows(_where("canonical_id", canonical_ids), canonical_ids)
    # Two scans: each can skip most of a file by the bounds of its own column; one scan with OR could not.
    where = SqlQuery(
        f"WHERE entity_id IN ({placeholders(entity_ids)}) AND canonical_id NOT IN ({placeholders(canonical_ids)})",
        (*entity_ids, *canonical_ids),
    )
    others = plan.rows(where, entity_ids, "entity_id")
    if by_key is None or others is None:
        return by_key or others
    return SqlQuery(f"{by_key.sql} UNION ALL {others.sql}", by_key.parameters + others.parameters)


def _stored(plan: ScanPlan, rows: SqlQuery | None, changes: SqlQuery | None) -> SqlQuery:
    """Return a query for those of the stored rows that are live."""
    if rows is None:
        return SqlQuery(plan.nothing())
    marks = changes or SqlQuery("")
    live = sql.stored_live(rows.sql, marks.sql or None, each_once=plan.is_each_once)
    return SqlQuery(live, rows.parameters + marks.parameters)


def _stored_whole(plan: ScanPlan) -> str:
    """Return SQL for all live rows in the data files, or in the plan's range of keys."""
    rows, changes = plan.rows(plan.within), plan.changes(plan.within)
    if rows is None:
        return plan.nothing()
    marks = None if changes is None else changes.sql
    return sql.stored_live(rows.sql, marks, plan.identities(plan.within).sql, each_once=plan.is_each_once)


def _create_events(duck: duckdb.DuckDBPyConnection, events: Unflushed) -> bool:
    """Create the table `events`, if there are any. Return whether there are."""
    if events.file is not None:
        source = scan_parquet([str(events.file)])
    elif events.table.num_rows:
        register_table(duck, "incoming", events.table, events.version)
        source = "incoming"
    else:
        return False
    duck.execute(f"CREATE OR REPLACE TEMP TABLE events AS SELECT * FROM {source}")
    duck.execute(sql.ADDS)
    return True


def _fold(duck: duckdb.DuckDBPyConnection, stored: SqlQuery, name: str) -> None:
    """Create the table `name` of what is live after applying the events to the live stored rows."""
    duck.execute(f"CREATE OR REPLACE TEMP TABLE stored AS {stored.sql}", stored.parameters)
    for statement in sql.ENDINGS:
        duck.execute(statement)
    duck.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {sql.AFTER}")


def _create_view(duck: duckdb.DuckDBPyConnection, view: View, name: str, query: str) -> None:
    duck.execute(
        f"CREATE OR REPLACE TEMP VIEW {name} AS "
        f"SELECT {quote_literal(view.dataset.name)} AS dataset, {COLUMNS} FROM ({query})"
    )


def _where(column: str, values: list[str]) -> SqlQuery:
    return SqlQuery(f"WHERE {column} IN ({placeholders(values)})", tuple(values))


def _fetch_all(duck: duckdb.DuckDBPyConnection, query: str) -> list[tuple[str, ...]]:
    return duck.execute(query).fetchall()
