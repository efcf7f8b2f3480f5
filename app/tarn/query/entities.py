"""Entities, read: one, a page in some order, all of them, and those beside one."""

# ruff: noqa: S608 - put together from constants of ours; what users send is bound

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from followthemoney.model import Model

from tarn.datasets.registry import Dataset
from tarn.lake.live import invalid_sql
from tarn.model.query import EntityAggregate, Facet, Node
from tarn.model.query_fields import FieldName, SortKey
from tarn.query import facets, filters
from tarn.query.assembly import Row, entity_line, entity_lines, invalid_count, ndjson
from tarn.query.ftm_model import schema_conflict_reason
from tarn.query.reader import Reading, RequestedState
from tarn.query.sorting import EntityPosition, Sorting
from tarn.query.views import View

REFERENCES = FieldName("type:entity")

MAX_ORIGINS = 100
"""Origins listed of an invalid entity; all of them are counted."""

Place = tuple[str, str]
"""A dataset and a canonical id."""


NeighbourPlace = tuple[str, str, bool]
"""Where an entity stands beside another: by property, id, and whether it is outgoing. No two have the same."""


class Line(NamedTuple):
    """An entity's JSON, or what is wrong with it; ends with a newline."""

    json: bytes
    invalid: bool


class LookupResult(NamedTuple):
    """An entity as a view shows it; None if it does not."""

    line: Line | None
    snapshot: str | None


class EntityLines(NamedTuple):
    """A part of a list, and where the next part begins, if there is one."""

    lines: list[Line]
    following: str | None
    snapshot: str | None


class Neighbour(NamedTuple):
    """An entity beside another: by which property, seen from that one; without a line if it is not there."""

    property: str
    outgoing: bool
    id: str
    line: Line | None


class SchemaConflict(NamedTuple):
    """An entity whose statements do not assemble, and which origins use which schemata."""

    id: str
    reason: str
    schemata: list[str]
    by_origin: list[tuple[str, list[str]]]
    """The first `MAX_ORIGINS` origins, sorted, each with its schemata."""
    origins: int
    """How many origins there are."""


def one(reading: Reading, dataset: Dataset, state: RequestedState, entity_id: str, origin: str | None) -> LookupResult:
    """The entity that an id names, as all origins tell it or as one does. Its own id comes before a referent's."""
    if not reading.brief:
        return _one_of_any_size(reading, dataset, state, entity_id, origin)
    view, statements = reading.entity(dataset, state, entity_id, origin)
    if not statements:
        return LookupResult(None, view.snapshot_id)
    found = [Row(dataset.name, *one) for one in statements]
    chosen = min({row.canonical_id for row in found}, key=lambda name: (name != entity_id, name))
    return LookupResult(Line(*entity_line(row for row in found if row.canonical_id == chosen)), view.snapshot_id)


def _one_of_any_size(
    reading: Reading, dataset: Dataset, state: RequestedState, entity_id: str, origin: str | None
) -> LookupResult:
    """The same, put together a column at a time: its statements may be a million."""
    view = reading.entities(dataset, state, [entity_id])
    said = "SELECT * FROM live WHERE (?::VARCHAR IS NULL OR origin = ?)"
    names = reading.duck.execute(f"SELECT DISTINCT canonical_id FROM ({said})", [origin, origin]).fetchall()
    if not names:
        return LookupResult(None, view.snapshot_id)
    chosen = min((name for (name,) in names), key=lambda name: (name != entity_id, name))
    ((_, line),) = _read_lines(reading, f"({said} AND canonical_id = ?)", [origin, origin, chosen])
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
    """Up to `limit` entities that match, in an order that no two share a place in."""
    sorting = Sorting(tuple(keys))
    views = create_live(reading, datasets, state, where)
    condition, columns = filters.compile(where), sorting.select
    begins = filters.Condition("true", ()) if after is None else sorting.after(after)
    picked = reading.duck.execute(
        f"SELECT * FROM (SELECT {columns.sql} FROM live GROUP BY dataset, canonical_id HAVING {condition.sql}) "
        f"WHERE {begins.sql} ORDER BY {sorting.order_by} LIMIT ?",
        [*columns.parameters, *condition.parameters, *begins.parameters, limit + 1],
    ).fetchall()
    following = sorting.encode(picked[limit - 1]) if len(picked) > limit else None
    places = [(row[0], row[1]) for row in picked[:limit]]
    found = (
        _read_entities(reading, views, places)
        if filters.named_ids(where) is None
        else dict(_read_lines(reading, "live"))
    )
    lines = [found[place] for place in places]
    return EntityLines(lines, following, views[0].snapshot_id if len(views) == 1 else None)


def invalid(
    reading: Reading, dataset: Dataset, state: RequestedState, after: str | None, limit: int
) -> tuple[str | None, list[SchemaConflict]]:
    """List up to `limit` entities that do not assemble, by canonical id, and the snapshot that was read."""
    view = reading.everything(dataset, state)
    source, parameters = ("live", []) if after is None else ("(FROM live WHERE canonical_id > ?)", [after])
    found = reading.duck.execute(
        f"SELECT canonical_id FROM ({invalid_sql.invalid(source)}) ORDER BY canonical_id LIMIT ?", [*parameters, limit]
    ).fetchall()
    ids = [canonical_id for (canonical_id,) in found]
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
    for canonical_id, origin, names, count in rows:
        by_origin.setdefault(canonical_id, []).append((origin, names))
        origins[canonical_id] = count
    return view.snapshot_id, [
        SchemaConflict(one, schema_conflict_reason(schemata[one]), schemata[one], by_origin[one], origins[one])
        for one in ids
    ]


def stream(
    reading: Reading, dataset: Dataset, state: RequestedState, where: Node | None
) -> tuple[str | None, Iterator[tuple[bytes, int, int]]]:
    """The snapshot, and every entity that matches as NDJSON, by canonical id.

    Each piece comes with the number of its lines, and how many of them are `$invalid`.
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
    reading: Reading, datasets: Sequence[Dataset], state: RequestedState, wanted: EntityAggregate
) -> tuple[str | None, list[Facet]]:
    """The snapshot, if there is one for all, and the groups."""
    views = create_live(reading, datasets, state, wanted.where)
    query = facets.facets(wanted)
    rows = reading.duck.execute(query.sql, query.parameters).fetchall()
    return views[0].snapshot_id if len(views) == 1 else None, facets.shown(wanted, rows)


def adjacent(
    reading: Reading, dataset: Dataset, state: RequestedState, entity_id: str, after: NeighbourPlace | None, limit: int
) -> tuple[LookupResult, list[Neighbour]]:
    """The entity, and up to `limit` entities that it refers to or that refer to it, by property and id."""
    view = reading.view(dataset, state)
    reading.show_entities(view, [entity_id], name="this")
    held = filters.has_value(REFERENCES)
    this = [Row(*row) for row in reading.duck.execute("SELECT * FROM this").fetchall()]
    if not this:
        return LookupResult(None, view.snapshot_id), []
    chosen = min({row.canonical_id for row in this}, key=lambda name: (name != entity_id, name))
    ids = sorted({row.entity_id for row in this if row.canonical_id == chosen} | {chosen})
    reading.show(view)
    outgoing = reading.duck.execute(
        f"SELECT DISTINCT prop, value FROM this WHERE canonical_id = ? AND {held.sql}", [chosen, *held.parameters]
    ).fetchall()
    incoming = reading.duck.execute(
        f"SELECT DISTINCT schema, prop, canonical_id FROM live WHERE {held.sql} AND value IN ({_marks(ids)})",
        [*held.parameters, *ids],
    ).fetchall()
    beside = {(prop, value, True) for prop, value in outgoing}
    beside |= {(_reverse(schema, prop), name, False) for schema, prop, name in incoming}
    places = sorted(place for place in beside if after is None or place > after)[:limit]
    lines = _by_id(reading, view, {name for _, name, _ in places})
    found = LookupResult(Line(*entity_line(row for row in this if row.canonical_id == chosen)), view.snapshot_id)
    return found, [Neighbour(prop, out, name, lines.get(name)) for prop, name, out in places]


def create_live(reading: Reading, datasets: Sequence[Dataset], state: RequestedState, where: Node | None) -> list[View]:
    """Make `live` of these datasets: all of it, or, where the condition names ids, at least the entities they name."""
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


def _read_entities(reading: Reading, views: Sequence[View], places: Sequence[Place]) -> dict[Place, Line]:
    """The entities at these places; each is looked up by itself, as `live` may be the whole store."""
    found: dict[Place, Line] = {}
    for view in views:
        if ids := [name for dataset, name in places if dataset == view.dataset.name]:
            reading.show_entities(view, ids, name="picked")
            found |= dict(_read_lines(reading, "picked"))
    return found


def _by_id(reading: Reading, view: View, ids: set[str]) -> dict[str, Line]:
    """Entities by each of the ids that were asked for: canonical or a referent's."""
    if not ids:
        return {}
    reading.show_entities(view, ids, name="picked")
    names = reading.duck.execute("SELECT DISTINCT entity_id, canonical_id FROM picked").fetchall()
    lines = {name: line for (_, name), line in _read_lines(reading, "picked")}
    found = {entity: lines[canonical] for entity, canonical in sorted(names) if entity in ids}
    return found | {name: line for name, line in lines.items() if name in ids}


def _read_lines(reading: Reading, source: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[Place, Line]]:
    for batch in entity_lines(reading.duck, source, parameters):
        columns = (batch.column(name).to_pylist() for name in ("dataset", "canonical_id", "line", "invalid"))
        for dataset, name, line, invalid in zip(*columns, strict=True):
            yield (dataset, name), Line(line.encode(), invalid)


def _reverse(schema: str, prop: str) -> str:
    """What a reference is called on the side that it points to; its own name if FtM has none for that side."""
    found: Any = Model.instance()[schema].get(prop)
    return prop if found.reverse is None else str(found.reverse.name)


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
