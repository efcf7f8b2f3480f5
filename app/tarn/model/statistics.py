"""Statistics of entities: values that add up.

They are of parts: a part has whole entities, and no entity is in two. Parts can be added, taken away and replaced, so
that a small change does not count everything again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self

from followthemoney.model import Model
from followthemoney.types import registry

THINGS, INTERVALS, OTHERS = GROUPS = "things", "intervals", "others"
"""An event is a thing and an interval, and counts as both; what is neither is one of the others."""

BOUNDS: dict[str, Callable[[str, str], str]] = {
    "first_date": min,
    "last_date": max,
    "first_seen": min,
    "last_seen": max,
    "last_change": max,
}
"""The least or greatest of what the entities have, as text that sorts by time."""


class Count(NamedTuple):
    """What is counted: statements, invalid entities, or the valid entities of one schema, origin or country."""

    what: str
    """`statement`, `invalid`, `schema`, `origin`, or a group for the countries in it."""
    name: str = ""


class Bound(NamedTuple):
    """A least or greatest value, and how many entities have it for theirs: as long as one is left, it holds."""

    value: str
    entities: int


class _Underivable(Exception):
    """What is left cannot be told from the whole and the part that goes."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was counted: nothing, to begin with. The same entities give equal ones, in whatever parts they came."""

    counts: Mapping[Count, int] = field(default_factory=dict)
    """None is zero."""
    bounds: Mapping[str, Bound] = field(default_factory=dict)

    @property
    def statements(self) -> int:
        return self.counts.get(Count("statement"), 0)

    @property
    def invalid(self) -> int:
        """Entities whose schemata do not fit together."""
        return self.counts.get(Count("invalid"), 0)

    @property
    def entities(self) -> int:
        """Those that are valid."""
        return sum(self.by("schema").values())

    @property
    def things(self) -> int:
        return self._total(THINGS)

    @property
    def intervals(self) -> int:
        return self._total(INTERVALS)

    def by(self, what: str) -> dict[str, int]:
        """Entities by `schema`, by `origin`, or those of a group by country."""
        return {count.name: number for count, number in self.counts.items() if count.what == what}

    def __add__(self, other: Self) -> Self:
        """Both parts together."""
        return type(self)(
            dict(Counter(self.counts) + Counter(other.counts)),
            _known((name, _outer(choose, *held)) for name, choose, *held in _each_bound(self, other)),
        )

    def without(self, part: Self) -> Self | None:
        """What is left if a part goes, or None if that cannot be told: then it is to be counted anew."""
        return self.replaced(part, type(self)())

    def replaced(self, former: Self, present: Self) -> Self | None:
        """What it is after a part of it became another one: entities have changed, come or gone.

        None if that cannot be told: the last entity at a bound has left it and none that came is there or beyond, or
        `former` was no part of this.
        """
        left = Counter(self.counts)
        left.subtract(former.counts)
        if min(left.values(), default=0) < 0:
            return None
        rest = type(self)(dict(+left))
        if rest.entities:
            try:
                found = _known(
                    (name, _exchanged(choose, *held)) for name, choose, *held in _each_bound(self, former, present)
                )
            except _Underivable:
                return None
        else:
            found = dict(present.bounds)
        return type(self)((rest + present).counts, found)

    def document(self) -> dict[str, Any]:
        """All of it as JSON, for people and for `parsed`: nothing is left out, and the largest counts come first."""
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
        """The statistics that a document is of, whatever else it has. Raises ValueError if it is none of today's."""
        try:
            found = cls(_counts(document), _bounds(document))
            told = found.document()
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is not a document of statistics: {error!r}") from None
        if told != {name: document[name] for name in told}:
            raise ValueError("this is a document of statistics that do not add up, or are told otherwise now")
        return found

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
    """The groups that an entity of a schema counts in."""
    known = Model.instance()[schema]
    found = [group for group, kind in ((THINGS, "Thing"), (INTERVALS, "Interval")) if known.is_a(kind)]
    return tuple(found) or (OTHERS,)


def _counts(document: Mapping[str, Any]) -> dict[Count, int]:
    groups = {group: document[group] for group in GROUPS}
    told = {
        Count("statement"): document["statements"],
        Count("invalid"): document["invalid"],
        **{Count("origin", one["name"]): one["count"] for one in document["origins"]},
        **{Count("schema", one["name"]): one["count"] for group in groups.values() for one in group["schemata"]},
        **{Count(name, one["code"]): one["count"] for name, group in groups.items() for one in group["countries"]},
    }
    return {count: number for count, number in told.items() if number}


def _bounds(document: Mapping[str, Any]) -> dict[str, Bound]:
    told = {**document, "first_date": document["dates"]["first"], "last_date": document["dates"]["last"]}
    return {name: Bound(told[name], entities) for name, entities in document["entities_at"].items()}


def _each_bound(*parts: Statistics) -> Iterator[tuple[Any, ...]]:
    """Every bound: its name, what chooses it, and what each part has for it."""
    for name, choose in BOUNDS.items():
        yield name, choose, *(part.bounds.get(name) for part in parts)


def _outer(choose: Callable[[str, str], str], one: Bound | None, other: Bound | None) -> Bound | None:
    """The bound of two parts together."""
    if one is None or other is None:
        return one or other
    if one.value == other.value:
        return Bound(one.value, one.entities + other.entities)
    return one if choose(one.value, other.value) == one.value else other


def _exchanged(
    choose: Callable[[str, str], str], whole: Bound | None, former: Bound | None, present: Bound | None
) -> Bound | None:
    """The bound of a whole after one part of it became another. Raises _Untold."""
    if former is None:
        return _outer(choose, whole, present)
    if whole is None or choose(former.value, whole.value) != whole.value:
        raise _Underivable
    if former.value != whole.value:
        return _outer(choose, whole, present)
    if former.entities < whole.entities:
        return _outer(choose, Bound(whole.value, whole.entities - former.entities), present)
    # Whatever is left is within the former bound, nobody knows where; but what came may be as far out, or farther.
    if present is not None and choose(present.value, whole.value) == present.value:
        return present
    raise _Underivable


def _known(bounds: Iterable[tuple[str, Bound | None]]) -> dict[str, Bound]:
    return {name: bound for name, bound in bounds if bound is not None}


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
