"""Queries over entities: what may be asked, checked once against FtM's model.

A node of `where` is `{"and": [node, …]}`, `{"or": [node, …]}`, `{"not": node}` or a comparison
`{"field", "op", "value"}`. An entity is all live statements of one canonical id in one dataset; it matches a
comparison if any of them does.

    eq, in          some value is this one, is one of these
    ne, not_in      their negations: no value is; so an entity without values matches
    gt gte lt lte   as text, in the order of code points, which is the order of FtM's dates; where the type is number as
                    numbers, as FtM reads them, and a value that is none never matches
    startswith, endswith, contains   literally, and with regard to case
    like, ilike     the whole value, where % is any run of characters, _ any one, and a backslash takes the meaning from
                    the character after it; ilike without regard to case. Bounded: see `tarn.model.pattern`
    null            true: no value at all; false: some

`schema` is what some statement says, exactly; `schemata` is is-a. `first_seen` and `last_seen` have one value each.
The fields are in `tarn.model.query_fields`.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from followthemoney.types import registry
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from tarn.model import pattern
from tarn.model.query_fields import FieldName, SortKey, schema_names
from tarn.model.statement import microseconds
from tarn.model.tenant import Strict

DEEPEST = 32
"""Levels of nodes; a comparison by itself is one."""
MOST_COMPARISONS = 200
MOST_VALUES = 1000
"""Values of one `in` or `not_in`."""
MOST_VALUES_IN_ALL = 10_000
"""Values of all of them together: each is compared with every statement, or else costs the planner a join."""
LONGEST_VALUE = 10_000
"""Characters of a value; patterns have bounds of their own (`tarn.model.pattern`)."""
LONGEST_CURSOR = 10_000

Loc = tuple[str | int, ...]
Item = TypeVar("Item")


class Op(StrEnum):
    EQ = "eq"
    NE = "ne"
    IN = "in"
    NOT_IN = "not_in"
    GT = "gt"
    GTE = "gte"
    LT = "lt"
    LTE = "lte"
    STARTSWITH = "startswith"
    ENDSWITH = "endswith"
    CONTAINS = "contains"
    LIKE = "like"
    ILIKE = "ilike"
    NULL = "null"


SAME = (Op.EQ, Op.NE, Op.IN, Op.NOT_IN)
ORDER = (Op.GT, Op.GTE, Op.LT, Op.LTE)
PARTS = (Op.STARTSWITH, Op.ENDSWITH, Op.CONTAINS, Op.LIKE, Op.ILIKE)

OPS: dict[str, tuple[Op, ...]] = {
    "id": SAME + ORDER + PARTS,
    "canonical_id": SAME + ORDER + PARTS,
    "schema": SAME,
    "schemata": SAME,
    "origin": SAME + PARTS,
    "first_seen": SAME + ORDER,
    "last_seen": SAME + ORDER,
    "prop": SAME + ORDER + PARTS + (Op.NULL,),
    "type": SAME + ORDER + PARTS + (Op.NULL,),
}
"""Which comparisons make sense of a field. Only properties can be without a value; a schema is one of a closed list."""


class Comparison(Strict):
    """A field compared with a value: a list of strings for `in` and `not_in`, a boolean for `null`, else a string."""

    model_config = ConfigDict(frozen=True)

    field: FieldName
    op: Op
    value: StrictStr | list[StrictStr] | StrictBool

    @field_validator("op")
    @classmethod
    def makes_sense(cls, op: Op, info: ValidationInfo) -> Op:
        field: FieldName | None = info.data.get("field")
        if field is not None and op not in OPS[field.kind]:
            raise ValueError(f"{op} makes no sense of {field}, which takes {', '.join(OPS[field.kind])}")
        return op

    @field_validator("value", mode="before")
    @classmethod
    def fits(cls, value: Any, info: ValidationInfo) -> Any:
        field, op = info.data.get("field"), info.data.get("op")
        if field is None or op is None:
            return ""  # the comparison is refused already, and nobody knows what its value should be
        if op is Op.NULL:
            if type(value) is not bool:
                raise ValueError("must be true or false for null")
        elif op in (Op.IN, Op.NOT_IN):
            _check_list(field, op, value)
        else:
            _check_text(field, op, value)
        return value


class And(Strict):
    """What matches every one of these nodes."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    and_: "list[Node]" = Field(alias="and", min_length=1)


class Or(Strict):
    """What matches one of these nodes or more."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    or_: "list[Node]" = Field(alias="or", min_length=1)


class Not(Strict):
    """What does not match this node."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    not_: "Node" = Field(alias="not")


def _read(raw: Any) -> Any:
    """Nodes from what was sent. The bounds are checked before anything recurses, and each fault has its exact place."""
    if isinstance(raw, And | Or | Not | Comparison):
        return raw
    places = _places(raw)
    faults: list[InitErrorDetails] = []
    built: dict[Loc, Any] = {}
    for loc, node in places.items():
        if _connective(node) is None:
            try:
                built[loc] = Comparison.model_validate(node)
            except ValidationError as error:
                faults += [_fault((*loc, *found["loc"]), found["msg"]) for found in error.errors(include_input=False)]
    if faults:
        raise _refusal(faults)
    for loc, node in reversed(places.items()):  # what is inside comes before what holds it
        match _connective(node):
            case "and":
                built[loc] = And(and_=[built[*loc, "and", index] for index in range(len(node["and"]))])
            case "or":
                built[loc] = Or(or_=[built[*loc, "or", index] for index in range(len(node["or"]))])
            case "not":
                built[loc] = Not(not_=built[*loc, "not"])
    return built[()]


Node = Annotated[And | Or | Not | Comparison, BeforeValidator(_read)]

And.model_rebuild()
Or.model_rebuild()
Not.model_rebuild()


class CountDistinct(Strict):
    """How many different values of a field there are."""

    model_config = ConfigDict(frozen=True)

    count_distinct: FieldName


class Min(Strict):
    """The least value of a field; a number where the field's type is number."""

    model_config = ConfigDict(frozen=True)

    min: FieldName


class Max(Strict):
    """The greatest value of a field; a number where the field's type is number."""

    model_config = ConfigDict(frozen=True)

    max: FieldName


def _read_metric(raw: Any) -> Any:
    """A metric from what was sent: of the right kind, so that a fault in it is told once and not of every kind."""
    if raw == "count" or isinstance(raw, CountDistinct | Min | Max):
        return raw
    if isinstance(raw, dict) and len(raw) == 1:
        match next(iter(raw)):
            case "count_distinct":
                return CountDistinct.model_validate(raw)
            case "min":
                return Min.model_validate(raw)
            case "max":
                return Max.model_validate(raw)
    raise ValueError('must be "count", or an object with one of count_distinct, min and max')


Metric = Annotated[CountDistinct | Min | Max | Literal["count"], BeforeValidator(_read_metric)]


def metric_name(metric: Metric) -> str:
    """The key of a metric in an answer, such as `count` or `count_distinct:prop:country`."""
    match metric:
        case CountDistinct(count_distinct=field):
            return f"count_distinct:{field}"
        case Min(min=field):
            return f"min:{field}"
        case Max(max=field):
            return f"max:{field}"
        case _:
            return metric


def require_unique(items: list[Item]) -> list[Item]:
    """Raises ValueError if one is there twice."""
    for index, item in enumerate(items):
        if item in items[:index]:
            raise _refusal([_fault((index,), "is there twice")])
    return items


class EntityQuery(Strict):
    """Which entities, in which order; entities without a value of a sort key come last in both directions."""

    where: Node | None = None
    sort: Annotated[list[SortKey], Field(max_length=3), AfterValidator(require_unique), Field(default_factory=list)]
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    cursor: Annotated[str, Field(max_length=LONGEST_CURSOR)] | None = None


class EntityAggregate(Strict):
    """Metrics over the entities that match, in groups by the values of up to three fields, largest groups first."""

    where: Node | None = None
    group_by: Annotated[
        list[FieldName], Field(max_length=3), AfterValidator(require_unique), Field(default_factory=list)
    ]
    metrics: Annotated[list[Metric], Field(min_length=1, max_length=10), AfterValidator(require_unique)]
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class Facet(BaseModel):
    """A group of entities: the value of each field it is grouped by, null for those without one, and its metrics."""

    group: dict[str, str | None]
    metrics: dict[str, int | float | str | None]


def _connective(node: Any) -> str | None:
    """Which of and, or and not a node is; None for a comparison, and for what is no node."""
    return next((key for key in ("and", "or", "not") if key in node), None) if isinstance(node, dict) else None


def _places(raw: Any) -> dict[Loc, Any]:
    """Every node that was sent and where, each after the one that holds it. Checks the shape of all but comparisons."""
    places: dict[Loc, Any] = {}
    faults: list[InitErrorDetails] = []
    waiting: list[tuple[Loc, Any, int]] = [((), raw, 1)]
    comparisons = values = 0
    while waiting:
        loc, node, depth = waiting.pop()
        if depth > DEEPEST:
            raise _refusal([_fault((), f"is nested more than {DEEPEST} levels deep")])
        places[loc] = node
        key = _connective(node)
        if key is None:
            comparisons += 1
            if not isinstance(node, dict):
                faults.append(_fault(loc, "must be an object with and, or, not, or with field, op and value"))
            elif isinstance(node.get("value"), list):
                values += min(len(node["value"]), MOST_VALUES)  # more in one list is that list's own fault
        else:
            faults += [_fault((*loc, other), f"cannot stand beside {key}") for other in node if other != key]
            if key == "not":
                waiting.append(((*loc, key), node[key], depth + 1))
            elif not isinstance(node[key], list) or not node[key]:
                faults.append(_fault((*loc, key), "must be a list of one node or more"))
            else:
                held = node[key][: MOST_COMPARISONS + 1]
                waiting += [((*loc, key, index), held[index], depth + 1) for index in reversed(range(len(held)))]
        if comparisons + len(waiting) > MOST_COMPARISONS:  # whatever waits has one of them or more
            raise _refusal([_fault((), f"has more than {MOST_COMPARISONS} comparisons")])
        if values > MOST_VALUES_IN_ALL:
            raise _refusal([_fault((), f"has more than {MOST_VALUES_IN_ALL} values in its lists")])
    if faults:
        raise _refusal(faults)
    return places


def _check_list(field: FieldName, op: Op, values: Any) -> None:
    if type(values) is not list:
        raise ValueError(f"must be a list of strings for {op}")
    if not values:
        raise ValueError("must have one value or more")
    if len(values) > MOST_VALUES:
        raise ValueError(f"has {len(values)} values, at most {MOST_VALUES} are allowed")
    for index, value in enumerate(values):
        try:
            _check_text(field, op, value)
        except ValueError as error:
            raise _refusal([_fault((index,), str(error))]) from None


def _check_text(field: FieldName, op: Op, value: Any) -> None:
    """Raises ValueError if a single value does not fit the field and the comparison."""
    if type(value) is not str:
        raise ValueError("must be a string")
    if len(value) > LONGEST_VALUE:
        raise ValueError(f"is {len(value)} characters long, at most {LONGEST_VALUE} are allowed")
    if op in (Op.LIKE, Op.ILIKE):
        pattern.check(value)
    if "\x00" in value:
        raise ValueError("must not have NUL characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must not have half of a surrogate pair") from None
    if field.kind in ("schema", "schemata") and value not in schema_names():
        raise ValueError(f"{value[:100]!r} is not a schema of FollowTheMoney")
    if field.is_moment:
        microseconds(value, field)
    if op in ORDER and field.is_number:
        number = registry.number.to_number(value)
        if number is None or not math.isfinite(number):
            raise ValueError(f"must be a number, as the values of {field} are")


def _fault(loc: Loc, reason: str) -> InitErrorDetails:
    message = PydanticCustomError("query", "{reason}", {"reason": reason.removeprefix("Value error, ")})
    return InitErrorDetails(type=message, loc=loc, input=None)


def _refusal(faults: list[InitErrorDetails]) -> ValidationError:
    """An error whose places pydantic puts after that of the field being validated."""
    return ValidationError.from_exception_data("query", faults)
