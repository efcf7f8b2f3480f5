"""Incremental entity statistics: counts and bounds that can be added and subtracted.

Statistics are computed per part of a dataset: each entity is completely in one part. Parts can be added, removed and
replaced, so that a small change does not require a full recount.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self

from followthemoney.model import Model
from followthemoney.types import registry

THINGS, INTERVALS, OTHERS = GROUPS = "things", "intervals", "others"
"""Groups of schemata. An Event is a thing and an interval, and counts as both; what is neither counts as other."""

BOUNDS: dict[str, Callable[[str, str], str]] = {
    "first_date": min,
    "last_date": max,
    "first_seen": min,
    "last_seen": max,
    "last_change": max,
}
"""Minimum or maximum over the entities, of text that sorts by time."""


class Count(NamedTuple):
    """The key of a count: statements, invalid entities, or valid entities of one schema, origin or country."""

    what: str
    """`statement`, `invalid`, `schema`, `origin`, or a group for the countries in it."""
    name: str = ""


class Bound(NamedTuple):
    """A minimum or maximum, and the number of entities that have it: the bound holds as long as one is left."""

    value: str
    entities: int


class _Underivable(Exception):
    """The remaining bound cannot be derived from the total and the removed part."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts and bounds; empty by default. Equal entities give equal statistics, independent of their parts."""

    counts: Mapping[Count, int] = field(default_factory=dict)
    """A count that is absent is zero."""
    bounds: Mapping[str, Bound] = field(default_factory=dict)

    @property
    def statements(self) -> int:
        return self.counts.get(Count("statement"), 0)

    @property
    def invalid(self) -> int:
        """Return the number of entities with incompatible schemata."""
        return self.counts.get(Count("invalid"), 0)

    @property
    def entities(self) -> int:
        """Return the number of valid entities."""
        return sum(self.by("schema").values())

    @property
    def things(self) -> int:
        return self._total(THINGS)

    def by(self, what: str) -> dict[str, int]:
        """Return entity counts by `schema` or `origin`, or for a group, by country."""
        return {count.name: number for count, number in self.counts.items() if count.what == what}

    def __add__(self, other: Self) -> Self:
        """Return the statistics of both parts together."""
        return type(self)(
            dict(Counter(self.counts) + Counter(other.counts)),
            _known((name, _outer(choose, *held)) for name, choose, *held in _each_bound(self, other)),
        )

    def replaced(self, former: Self, present: Self) -> Self | None:
        """Return the statistics after a part was replaced: entities were changed, added or removed.

        Returns None if they cannot be derived: the last entity at a bound was removed and no added one is at or beyond
        it, or `former` was not a part of this.
        """
        left = Counter(self.counts)
        left.subtract(former.counts)
        if min(left.values(), default=0) < 0:
            return None
        rest = type(self)(dict(+left))
        if rest.entities:
            try:
                bounds = _known(
                    (name, _exchanged(choose, *held)) for name, choose, *held in _each_bound(self, former, present)
                )
            except _Underivable:
                return None
        else:
            bounds = dict(present.bounds)
        return type(self)((rest + present).counts, bounds)

    def document(self) -> dict[str, Any]:
        """Return everything as JSON, for people and for `parsed`; largest counts first."""
        values = {name: bound.value for name, bound in self.bounds.items()}
        return {
            "entity_count": self.entities,
            **{group: self._document(group) for group in GROUPS},
            "invalid": self.invalid,
            "statements": self.statements,
            "origins": [{"name": name, "count": count} for name, count in _largest_first(self.by("origin"))],
            "dates": {"first": values.get("first_date"), "last": values.get("last_date")},
            **{name: values.get(name) for name in ("first_seen", "last_seen", "last_change")},
            "entities_at": {name: bound.entities for name, bound in sorted(self.bounds.items())},
        }

    @classmethod
    def parsed(cls, document: Mapping[str, Any]) -> Self:
        """Parse a document; additional fields are ignored. Raises ValueError if it is not of the current format."""
        try:
            statistics = cls(_counts(document), _bounds(document))
            expected = statistics.document()
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a statistics document: {error!r}") from None
        if expected != {name: document[name] for name in expected}:
            raise ValueError("the statistics document is inconsistent, or of another version's format")
        return statistics

    def _total(self, group: str) -> int:
        return sum(count for name, count in self.by("schema").items() if group in groups_of(name))

    def _document(self, group: str) -> dict[str, Any]:
        schemata = {name: count for name, count in self.by("schema").items() if group in groups_of(name)}
        return {
            "total": self._total(group),
            "countries": [
                {"code": code, "count": count, "label": registry.country.caption(code)}
                for code, count in _largest_first(self.by(group))
            ],
            "schemata": [
                {"name": name, "count": count, "label": schema.label, "plural": schema.plural}
                for name, count in _largest_first(schemata)
                for schema in [Model.instance()[name]]
            ],
        }


@cache
def groups_of(schema: str) -> tuple[str, ...]:
    """Return the groups that an entity of a schema counts in."""
    known = Model.instance()[schema]
    groups = [group for group, kind in ((THINGS, "Thing"), (INTERVALS, "Interval")) if known.is_a(kind)]
    return tuple(groups) or (OTHERS,)


def _counts(document: Mapping[str, Any]) -> dict[Count, int]:
    groups = {group: document[group] for group in GROUPS}
    counts = {
        Count("statement"): document["statements"],
        Count("invalid"): document["invalid"],
        **{Count("origin", item["name"]): item["count"] for item in document["origins"]},
        **{Count("schema", item["name"]): item["count"] for group in groups.values() for item in group["schemata"]},
        **{Count(name, item["code"]): item["count"] for name, group in groups.items() for item in group["countries"]},
    }
    return {count: number for count, number in counts.items() if number}


def _bounds(document: Mapping[str, Any]) -> dict[str, Bound]:
    values = {**document, "first_date": document["dates"]["first"], "last_date": document["dates"]["last"]}
    return {name: Bound(values[name], entities) for name, entities in document["entities_at"].items()}


def _each_bound(*parts: Statistics) -> Iterator[tuple[Any, ...]]:
    """Yield each bound: its name, `min` or `max`, and its value in each part."""
    for name, choose in BOUNDS.items():
        yield name, choose, *(part.bounds.get(name) for part in parts)


def _outer(choose: Callable[[str, str], str], one: Bound | None, other: Bound | None) -> Bound | None:
    """Return the bound of two parts together."""
    if one is None or other is None:
        return one or other
    if one.value == other.value:
        return Bound(one.value, one.entities + other.entities)
    return one if choose(one.value, other.value) == one.value else other


def _exchanged(
    choose: Callable[[str, str], str], total: Bound | None, former: Bound | None, present: Bound | None
) -> Bound | None:
    """Return the bound of the total after one part was replaced. Raises _Underivable."""
    if former is None:
        return _outer(choose, total, present)
    if total is None or choose(former.value, total.value) != total.value:
        raise _Underivable
    if former.value != total.value:
        return _outer(choose, total, present)
    if former.entities < total.entities:
        return _outer(choose, Bound(total.value, total.entities - former.entities), present)
    # The bound of the remaining entities is unknown, but within the former one: an added one at or beyond it decides.
    if present is not None and choose(present.value, total.value) == present.value:
        return present
    raise _Underivable


def _known(bounds: Iterable[tuple[str, Bound | None]]) -> dict[str, Bound]:
    return {name: bound for name, bound in bounds if bound is not None}


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
