"""Entity reads: get one, list a sorted page, stream all, aggregate, list invalid ones and neighbours."""

# ruff: noqa: S608 - SQL is built from constants; user input is bound

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from followthemoney.model import Model

from tarn.datasets.registry import Dataset
from tarn.lake.live import invalid_sql
from tarn.model.ftm.query import EntityAggregate, Facet, Node
from tarn.model.ftm.query_fields import FieldName, SortKey
from tarn.query import facets, filters
from tarn.query.output.assembly import Row, entity_line, entity_lines, invalid_count, ndjson
from tarn.query.output.ftm_model import schema_conflict_reason
from tarn.query.reader import Reading, RequestedState
from tarn.query.sorting import EntityPosition, Sorting
from tarn.query.views import View
from tarn.storage.duckdb_sql import placeholders

REFERENCES = FieldName("type:entity")

MAX_ORIGINS = 100
"""Origins listed for an invalid entity; all of them are counted."""

EntityKey = tuple[str, str]
"""A dataset and a canonical id."""


NeighbourKey = tuple[str, str, bool]
"""Sort key of a neighbour, unique among the neighbours of an entity: property, id, and whether it is outgoing."""


class Line(NamedTuple):
    """An entity's JSON, or its `$invalid` report; ends with a newline."""

    json: bytes
    invalid: bool


class LookupResult(NamedTuple):
    """The result of a lookup in a view: the entity's line, or None if it does not exist, and the snapshot id."""

    line: Line | None
    snapshot: str | None


class EntityLines(NamedTuple):
    """A page of a list, and the cursor of the next page, if there is one."""

    lines: list[Line]
    following: str | None
    snapshot: str | None


class Neighbour(NamedTuple):
    """A neighbour of an entity, with the property as seen from that entity; `line` is None if it does not exist."""

    property: str
    outgoing: bool
    id: str
    line: Line | None


class SchemaConflict(NamedTuple):
    """An entity whose statements cannot be assembled, and which origins use which schemata."""

    id: str
    reason: str
    schemata: list[str]
    by_origin: list[tuple[str, list[str]]]
    """The first `MAX_ORIGINS` origins, sorted, each with its schemata."""
    origins: int
    """Total number of origins."""


def one(reading: Reading, dataset: Dataset, state: RequestedState, entity_id: str, origin: str | None) -> LookupResult:
    """Get the entity that an id names, from the statements of all origins or of one.

    If the id is both a canonical id and a referent, the entity with that canonical id is returned.
    """
    if not reading.is_lookup:
        return _one_of_any_size(reading, dataset, state, entity_id, origin)
    view, statements = reading.entity(dataset, state, entity_id, origin)
    if not statements:
        return LookupResult(None, view.snapshot_id)
    rows = [Row(dataset.name, *statement) for statement in statements]
    chosen = min({row.canonical_id for row in rows}, key=lambda name: (name != entity_id, name))
    return LookupResult(Line(*entity_line(row for row in rows if row.canonical_id == chosen)), view.snapshot_id)


def _one_of_any_size(
    reading: Reading, dataset: Dataset, state: RequestedState, entity_id: str, origin: str | None
) -> LookupResult:
    """Do the same as `one` with columnar assembly, for an entity that may have a million statements."""
    view = reading.entities(dataset, state, [entity_id])
    rows = "SELECT * FROM live WHERE (?::VARCHAR IS NULL OR origin = ?)"
    names = reading.duck.execute(f"SELECT DISTINCT canonical_id FROM ({rows})", [origin, origin]).fetchall()
    if not names:
        return LookupResult(None, view.snapshot_id)
    chosen = min((name for (name,) in names), key=lambda name: (name != entity_id, name))
    ((_, line),) = _read_lines(reading, f"({rows} AND canonical_id = ?)", [origin, origin, chosen])
    return LookupResult(line, view.snapshot_id)


def page(
    reading: Reading,
    datasets: Sequence[Dataset],
    state: RequestedState,
    where: Node | None,
    keys: Sequence[SortKey],
    after: EntityPosition | None,
    limit: int,
) -> EntityLines:
    """List up to `limit` entities that match, in a total order, from the position `after` on."""
    sorting = Sorting(tuple(keys))
    views = create_live(reading, datasets, state, where)
    condition, columns = filters.compile(where), sorting.select
    start = filters.Condition("true", ()) if after is None else sorting.after(after)
    page_rows = reading.duck.execute(
        f"SELECT * FROM (SELECT {columns.sql} FROM live GROUP BY dataset, canonical_id HAVING {condition.sql}) "
        f"WHERE {start.sql} ORDER BY {sorting.order_by} LIMIT ?",
        [*columns.parameters, *condition.parameters, *start.parameters, limit + 1],
    ).fetchall()
    following = sorting.encode(page_rows[limit - 1]) if len(page_rows) > limit else None
    entity_keys = [(row[0], row[1]) for row in page_rows[:limit]]
    by_key = (
        _read_entities(reading, views, entity_keys)
        if filters.named_ids(where) is None
        else dict(_read_lines(reading, "live"))
    )
    lines = [by_key[key] for key in entity_keys]
    return EntityLines(lines, following, views[0].snapshot_id if len(views) == 1 else None)


def invalid(
    reading: Reading, dataset: Dataset, state: RequestedState, after: str | None, limit: int
) -> tuple[str | None, list[SchemaConflict]]:
    """Return the id of the snapshot that was read, and up to `limit` invalid entities by canonical id."""
    view = reading.everything(dataset, state)
    source, parameters = ("live", []) if after is None else ("(FROM live WHERE canonical_id > ?)", [after])
    names = reading.duck.execute(
        f"SELECT canonical_id FROM ({invalid_sql.invalid(source)}) ORDER BY canonical_id LIMIT ?", [*parameters, limit]
    ).fetchall()
    ids = [canonical_id for (canonical_id,) in names]
    if not ids:
        return view.snapshot_id, []
    reading.show_entities(view, ids, name="picked")
    schemata = dict(
        reading.duck.execute(
            "SELECT canonical_id, list_sort(list(DISTINCT schema)) FROM picked GROUP BY canonical_id"
        ).fetchall()
    )
    rows = reading.duck.execute(
        "SELECT canonical_id, origin, list_sort(list(DISTINCT schema)), count(*) OVER (PARTITION BY canonical_id) "
        "FROM picked GROUP BY canonical_id, origin "
        f"QUALIFY row_number() OVER (PARTITION BY canonical_id ORDER BY origin) <= {MAX_ORIGINS} "
        "ORDER BY canonical_id, origin"
    ).fetchall()
    by_origin: dict[str, list[tuple[str, list[str]]]] = {}
    origins: dict[str, int] = {}
    for canonical_id, origin, used, count in rows:
        by_origin.setdefault(canonical_id, []).append((origin, used))
        origins[canonical_id] = count
    return view.snapshot_id, [
        SchemaConflict(name, schema_conflict_reason(schemata[name]), schemata[name], by_origin[name], origins[name])
        for name in ids
    ]


def stream(
    reading: Reading, dataset: Dataset, state: RequestedState, where: Node | None
) -> tuple[str | None, Iterator[tuple[bytes, int, int]]]:
    """Return the snapshot id, and an iterator over every entity that matches, as NDJSON by canonical id.

    Each chunk comes with the number of its lines, and how many of them are `$invalid`.
    """
    (view,) = create_live(reading, [dataset], state, where)
    source, parameters = "live", ()
    if where is not None:
        condition = filters.compile(where)
        matched = f"SELECT dataset, canonical_id FROM live GROUP BY dataset, canonical_id HAVING {condition.sql}"
        source = f"(SELECT live.* FROM live SEMI JOIN ({matched}) AS matched USING (dataset, canonical_id))"
        parameters = condition.parameters
    pieces = (
        (ndjson(batch).to_pybytes(), batch.num_rows, invalid_count(batch))
        for batch in entity_lines(reading.duck, source, parameters)
    )
    return view.snapshot_id, pieces


def aggregate(
    reading: Reading, datasets: Sequence[Dataset], state: RequestedState, request: EntityAggregate
) -> tuple[str | None, list[Facet]]:
    """Return the snapshot id (None if several datasets are read) and the groups of an aggregate."""
    views = create_live(reading, datasets, state, request.where)
    query = facets.facets(request)
    rows = reading.duck.execute(query.sql, query.parameters).fetchall()
    return views[0].snapshot_id if len(views) == 1 else None, facets.to_facets(request, rows)


def adjacent(
    reading: Reading, dataset: Dataset, state: RequestedState, entity_id: str, after: NeighbourKey | None, limit: int
) -> tuple[LookupResult, list[Neighbour]]:
    """Return the entity, and up to `limit` entities that it refers to or that refer to it, by property and id."""
    view = reading.view(dataset, state)
    reading.show_entities(view, [entity_id], name="this")
    condition = filters.has_value(REFERENCES)
    own_rows = [Row(*row) for row in reading.duck.execute("SELECT * FROM this").fetchall()]
    if not own_rows:
        return LookupResult(None, view.snapshot_id), []
    chosen = min({row.canonical_id for row in own_rows}, key=lambda name: (name != entity_id, name))
    ids = sorted({row.entity_id for row in own_rows if row.canonical_id == chosen} | {chosen})
    reading.show(view)
    outgoing = reading.duck.execute(
        f"SELECT DISTINCT prop, value FROM this WHERE canonical_id = ? AND {condition.sql}",
        [chosen, *condition.parameters],
    ).fetchall()
    incoming = reading.duck.execute(
        f"SELECT DISTINCT schema, prop, canonical_id FROM live WHERE {condition.sql} "
        f"AND value IN ({placeholders(ids)})",
        [*condition.parameters, *ids],
    ).fetchall()
    neighbours = {(prop, value, True) for prop, value in outgoing}
    neighbours |= {(_reverse(schema, prop), name, False) for schema, prop, name in incoming}
    neighbour_keys = sorted(key for key in neighbours if after is None or key > after)[:limit]
    lines = _by_id(reading, view, {name for _, name, _ in neighbour_keys})
    entity = LookupResult(Line(*entity_line(row for row in own_rows if row.canonical_id == chosen)), view.snapshot_id)
    return entity, [Neighbour(prop, out, name, lines.get(name)) for prop, name, out in neighbour_keys]


def create_live(reading: Reading, datasets: Sequence[Dataset], state: RequestedState, where: Node | None) -> list[View]:
    """Create `live` for these datasets: all rows, or, if the condition names ids, at least the entities they name."""
    ids = filters.named_ids(where)
    views = []
    names = ["live"] if len(datasets) == 1 else [f"live_{number}" for number in range(len(datasets))]
    for name, dataset in zip(names, datasets, strict=True):
        if ids is None:
            views.append(reading.everything(dataset, state, name=name))
        else:
            views.append(reading.entities(dataset, state, ids, name=name))
    if len(datasets) != 1:
        parts = " UNION ALL ".join(f"SELECT * FROM {name}" for name in names)
        reading.duck.execute(f"CREATE OR REPLACE TEMP VIEW live AS {parts}")
    return views


def _read_entities(reading: Reading, views: Sequence[View], keys: Sequence[EntityKey]) -> dict[EntityKey, Line]:
    """Return the entities with these keys, by point lookups: `live` may be the whole dataset."""
    lines: dict[EntityKey, Line] = {}
    for view in views:
        if ids := [name for dataset, name in keys if dataset == view.dataset.name]:
            reading.show_entities(view, ids, name="picked")
            lines |= dict(_read_lines(reading, "picked"))
    return lines


def _by_id(reading: Reading, view: View, ids: set[str]) -> dict[str, Line]:
    """Return entities by each of the requested ids, which may be canonical ids or referents."""
    if not ids:
        return {}
    reading.show_entities(view, ids, name="picked")
    names = reading.duck.execute("SELECT DISTINCT entity_id, canonical_id FROM picked").fetchall()
    lines = {name: line for (_, name), line in _read_lines(reading, "picked")}
    by_entity_id = {entity: lines[canonical] for entity, canonical in sorted(names) if entity in ids}
    return by_entity_id | {name: line for name, line in lines.items() if name in ids}


def _read_lines(reading: Reading, source: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[EntityKey, Line]]:
    for batch in entity_lines(reading.duck, source, parameters):
        columns = (batch.column(name).to_pylist() for name in ("dataset", "canonical_id", "line", "invalid"))
        for dataset, name, line, invalid in zip(*columns, strict=True):
            yield (dataset, name), Line(line.encode(), invalid)


def _reverse(schema: str, prop: str) -> str:
    """Return the name of a reference's reverse property, or its own name if FtM has no reverse."""
    known: Any = Model.instance()[schema].get(prop)
    return prop if known.reverse is None else str(known.reverse.name)
