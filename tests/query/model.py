"""Reference model of all reads, in Python over live statements; and strategies for random histories."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from followthemoney.model import Model as Ftm
from followthemoney.types import registry
from hypothesis import strategies as st
from tarn.model.ftm.statement import statement_id
from tarn.query.output.assembly import Row, entity_line

from tests.pipeline.history import Expected

Event = dict[str, Any]
Matches = Callable[[list[Row]], bool]


def iso(moment: int) -> str:
    return (datetime(1970, 1, 1) + timedelta(microseconds=moment)).isoformat(timespec="microseconds") + "Z"


@dataclass(frozen=True)
class Model:
    """One state of a dataset: its live statements."""

    rows: tuple[Row, ...] = ()

    @classmethod
    def of(cls, dataset: str, expected: Expected) -> "Model":
        columns = [name for name in Row._fields if name not in ("dataset", "external")]
        rows = [
            Row(dataset=dataset, external=False, **{name: row[name] for name in columns})
            for row in expected.live.values()
        ]
        return cls(tuple(sorted(rows, key=lambda row: (row.canonical_id, row.id, row.origin))))

    @cached_property
    def entities(self) -> dict[str, list[Row]]:
        """Return all rows of each canonical id, in order."""
        entities: dict[str, list[Row]] = {}
        for row in self.rows:
            entities.setdefault(row.canonical_id, []).append(row)
        return entities

    def named(self, ids: Iterable[str]) -> list[Row]:
        """Return the rows of the entities with these ids, canonical or of a merged part."""
        requested = set(ids)
        return [row for rows in self.entities.values() if requested & ids_of(rows) for row in rows]

    def one(self, name: str, origin: str | None = None) -> bytes | None:
        """Return the entity shown for an id: of several the one whose canonical id it is, or else the first."""
        rows = [row for row in self.named([name]) if origin in (None, row.origin)]
        chosen = min(
            {row.canonical_id for row in rows}, key=lambda canonical: (canonical != name, canonical), default=""
        )
        return line(row for row in rows if row.canonical_id == chosen) if rows else None

    def lines(self, matches: Matches = bool) -> list[bytes]:
        return [line(rows) for rows in self.entities.values() if matches(rows)]

    def sorted_lines(self, by: Callable[[list[Row]], Any], matches: Matches = bool) -> list[bytes]:
        return [line(rows) for rows in sorted(filter(matches, self.entities.values()), key=by)]

    def facets(self, by: str, matches: Matches) -> list[dict[str, Any]]:
        """Return how many entities have each value, how many distinct names they have, and the latest last_seen."""
        groups: dict[str | None, list[list[Row]]] = {}
        for rows in filter(matches, self.entities.values()):
            group_values: set[str | None] = {*values(by, rows)}
            for value in group_values or {None}:
                groups.setdefault(value, []).append(rows)
        return [
            {
                "group": {by: value},
                "metrics": {
                    "count": len(entities),
                    "count_distinct:prop:name": len({name for rows in entities for name in values("prop:name", rows)}),
                    "max:last_seen": max(iso(last_seen(rows)) for rows in entities),
                },
            }
            for value, entities in sorted(
                groups.items(), key=lambda item: (-len(item[1]), item[0] is None, item[0] or "")
            )
        ]

    def adjacent(self, name: str) -> list[tuple[str, str, bool, bytes | None]]:
        """Return the entities that one refers to and that refer to it, by property and id."""
        chosen = min({row.canonical_id for row in self.named([name])}, key=lambda one: (one != name, one))
        own = ids_of(self.entities[chosen])
        references = {(row.prop, row.value, True) for row in self.entities[chosen] if refers(row)}
        references |= {
            (Ftm.instance()[row.schema].get(row.prop).reverse.name, row.canonical_id, False)
            for row in self.rows
            if refers(row) and row.value in own
        }
        return [(prop, other, out, self.one(other)) for prop, other, out in sorted(references)]


def line(rows: Iterable[Row]) -> bytes:
    return entity_line(rows)[0]


def ids_of(rows: list[Row]) -> set[str]:
    return {row.entity_id for row in rows} | {row.canonical_id for row in rows}


def refers(row: Row) -> bool:
    prop = Ftm.instance()[row.schema].get(row.prop)
    return prop is not None and prop.type is registry.entity


def values(field: str, rows: list[Row]) -> set[str]:
    if field in ("schema", "origin"):
        return {getattr(row, field) for row in rows}
    return {row.value for row in rows if f"prop:{row.prop}" == field}


def last_seen(rows: list[Row]) -> int:
    return max(row.last_seen for row in [row for row in rows if row.prop != "id"] or rows)


def shown(row: Row) -> dict[str, Any]:
    """Return a statement as FtM's dict."""
    prop = Ftm.instance()[row.schema].get(row.prop)
    moments = {"first_seen": iso(row.first_seen), "last_seen": iso(row.last_seen)}
    return row._asdict() | moments | {"id": row.id.hex(), "prop_type": "id" if prop is None else prop.type.name}


# Histories of few entities and values, so that events collide

ENTITIES = ("a", "b", "c", "é'" + "x" * 70)
CANONICALS = (None, None, None, "a", "b", "Q1", "Q2")
NAMES = (*ENTITIES, "Q1", "Q2", "nobody")
ORIGINS = ("crawl", "by.hand", "mapping:x")
FACTS = (
    ("Person", "name", "x"), ("LegalEntity", "name", "x"), ("Company", "name", "y"), ("Person", "birthDate", "2000"),
    ("Document", "name", "x"), ("Ownership", "owner", "b"), ("Ownership", "asset", "Q1"),
    ("Company", "id", "sum-1"), ("Person", "id", "sum-1"), ("Person", "id", "sum-2"),
)  # fmt: skip

moments = st.integers(1, 50)
facts = st.sampled_from(FACTS)
origins = st.sampled_from(ORIGINS)
entity_ids = st.sampled_from(ENTITIES)


def under(dataset: str, event: Event) -> Event:
    """Return an event with the id that its statement has in a dataset."""
    if event["kind"] == 3:
        return event
    return event | {"id": statement_id(dataset, event["entity_id"], event["prop"], event["value"])}


def added(entity: str, origin: str, fact: tuple[str, str, str], canonical: str | None, first: int, last: int) -> Event:
    schema, prop, value = fact
    return {
        "kind": 1,
        "entity_id": entity,
        "canonical_id": None if canonical == entity else canonical,
        "origin": origin,
        "schema": schema,
        "prop": prop,
        "value": value,
        "lang": None,
        "original_value": None,
        "first_seen": first,
        "last_seen": max(first, last),
    }


def erased(entity: str | None, origin: str | None) -> Event:
    return {"kind": 3, "entity_id": entity, "origin": origin}


def deleted(entity: str, origin: str, fact: tuple[str, str, str]) -> Event:
    _, prop, value = fact
    return {"kind": 2, "entity_id": entity, "origin": origin, "prop": prop, "value": value}


def moved(rows: Iterable[Row], canonical: str, moment: int) -> list[Event]:
    """Return the same statements as part of another entity."""
    return [
        added(row.entity_id, row.origin, (row.schema, row.prop, row.value), canonical, moment, moment) for row in rows
    ]


adds = st.lists(st.builds(added, entity_ids, origins, facts, st.sampled_from(CANONICALS), moments, moments), min_size=1,
                max_size=5)  # fmt: skip
deletes = st.builds(lambda *fact: [deleted(*fact)], entity_ids, origins, facts)
erases = st.builds(lambda *what: [erased(*what)], entity_ids, origins | st.none())
origin_erases = st.builds(lambda origin: [erased(None, origin)], origins)


@st.composite
def puts(draw) -> list[Event]:
    """Return a PUT of an entity by an origin, with its BASE statement."""
    entity, origin, moment = draw(entity_ids), draw(origins), draw(moments)
    chosen = draw(st.lists(facts, max_size=3))
    chosen.append(("Person", "id", draw(st.sampled_from(("sum-1", "sum-2")))))
    return [erased(entity, origin), *(added(entity, origin, fact, None, moment, moment) for fact in chosen)]


class Flush:
    """Step: flush the committed batches into a snapshot."""


class Compact:
    """Step: fold all flushed rows into new files."""


class Pack:
    """Step: merge small files into larger ones."""


@dataclass(frozen=True)
class Move:
    """Step: make all live statements of an entity part of another, or its own again."""

    entity: str
    canonical: str
    moment: int


FLUSH, COMPACT, PACK = Flush(), Compact(), Pack()

Step = list[Event] | Flush | Compact | Pack | Move

moves = st.builds(Move, entity_ids, st.sampled_from(("a", "b", "c", "Q1", "Q2")), moments)
rewritings = st.sampled_from([COMPACT, PACK])
steps = st.one_of(
    adds, adds, adds, puts(), moves, deletes, erases, origin_erases, st.just(FLUSH), st.just(FLUSH), rewritings
)
histories = st.lists(steps, min_size=2, max_size=12)
