"""Entity queries: models of filters, sorting and aggregation, validated against FtM's model.

A node of `where` is `{"and": [node, …]}`, `{"or": [node, …]}`, `{"not": node}` or a comparison
`{"field", "op", "value"}`. An entity is all live statements of one canonical id in one dataset; it matches a
comparison if any of them does.

    eq, in          some value equals this one, or one of these
    ne, not_in      their negations: no value does; so an entity without values matches
    gt gte lt lte   compares text by code points, which is the order of FtM's dates; if the type is number, compares
                    numbers as FtM parses them, and a value that is not a number never matches
    startswith, endswith, contains   literal, case-sensitive
    like, ilike     matches the entire value, where % is any run of characters, _ any one, and a backslash escapes the
                    character after it; ilike is case-insensitive. Limited: see `tarn.model.ftm.pattern`
    null            true: there is no value; false: there is one or more

`schema` is the exact schema of some statement; `schemata` includes parent schemata (is-a). `first_seen` and `last_seen`
have one value each.
The fields are in `tarn.model.ftm.query_fields`.
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

from tarn.model.ftm import pattern
from tarn.model.ftm.query_fields import FieldName, SortKey, schema_names
from tarn.model.ftm.statement import microseconds
from tarn.model.tenant import Strict

DEEPEST = 32
"""Maximum levels of nodes; a single comparison is one level."""
MOST_COMPARISONS = 200
MOST_VALUES = 1000
"""Maximum values of one `in` or `not_in`."""
MOST_VALUES_IN_ALL = 10_000
"""Maximum values of all of them together: each is compared with every statement, or costs the planner a join."""
LONGEST_VALUE = 10_000
"""Maximum characters of a value; patterns have separate limits (`tarn.model.ftm.pattern`)."""
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
"""The operators that each field supports. Only properties can have no value; schemata are a closed list."""


class Comparison(Strict):
    """A field compared with a value: a list of strings for `in` and `not_in`, a boolean for `null`, else a string."""

    model_config = ConfigDict(frozen=True)

    field: FieldName
    op: Op
    value: StrictStr | list[StrictStr] | StrictBool

    @field_validator("op")
    @classmethod
    def is_supported(cls, op: Op, info: ValidationInfo) -> Op:
        field: FieldName | None = info.data.get("field")
        if field is not None and op not in OPS[field.kind]:
            raise ValueError(f"{op} is not supported by {field}, which supports {', '.join(OPS[field.kind])}")
        return op

    @field_validator("value", mode="before")
    @classmethod
    def fits_field(cls, value: Any, info: ValidationInfo) -> Any:
        field, op = info.data.get("field"), info.data.get("op")
        if field is None or op is None:
            return ""  # the comparison is invalid already, and the type of its value is unknown
        if op is Op.NULL:
            if type(value) is not bool:
                raise ValueError("must be true or false for null")
        elif op in (Op.IN, Op.NOT_IN):
            _check_list(field, op, value)
        else:
            _check_text(field, op, value)
        return value


class And(Strict):
    """Matches entities that match all of these nodes."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    and_: "list[Node]" = Field(alias="and", min_length=1)


class Or(Strict):
    """Matches entities that match at least one of these nodes."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    or_: "list[Node]" = Field(alias="or", min_length=1)


class Not(Strict):
    """Matches entities that do not match this node."""

    model_config = ConfigDict(frozen=True, validate_by_name=True)

    not_: "Node" = Field(alias="not")


def _read(raw: Any) -> Any:
    """Build nodes from JSON values. Limits are checked before any recursion, and each error has its exact location."""
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
                faults += [_fault((*loc, *fault["loc"]), fault["msg"]) for fault in error.errors(include_input=False)]
    if faults:
        raise _refusal(faults)
    for loc, node in reversed(places.items()):  # inner nodes before the nodes that contain them
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
    """The number of distinct values of a field."""

    model_config = ConfigDict(frozen=True)

    count_distinct: FieldName


class Min(Strict):
    """The smallest value of a field; a number if the field's type is number."""

    model_config = ConfigDict(frozen=True)

    min: FieldName


class Max(Strict):
    """The largest value of a field; a number if the field's type is number."""

    model_config = ConfigDict(frozen=True)

    max: FieldName


def _read_metric(raw: Any) -> Any:
    """Build a metric from JSON by its key, so that an error is reported once and not for every metric class."""
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
    """Return the key of a metric in a response, such as `count` or `count_distinct:prop:country`."""
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
    """Return the items. Raises ValidationError for a duplicate."""
    for index, item in enumerate(items):
        if item in items[:index]:
            raise _refusal([_fault((index,), "is there twice")])
    return items


class EntityQuery(Strict):
    """A query for entities. Entities without a value of a sort key come last in both directions."""

    where: Node | None = None
    sort: Annotated[list[SortKey], Field(max_length=3), AfterValidator(require_unique), Field(default_factory=list)]
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    cursor: Annotated[str, Field(max_length=LONGEST_CURSOR)] | None = None


class EntityAggregate(Strict):
    """Metrics of matching entities, grouped by the values of up to three fields, largest groups first."""

    where: Node | None = None
    group_by: Annotated[
        list[FieldName], Field(max_length=3), AfterValidator(require_unique), Field(default_factory=list)
    ]
    metrics: Annotated[list[Metric], Field(min_length=1, max_length=10), AfterValidator(require_unique)]
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class Facet(BaseModel):
    """A group of entities: the value of each field of `group_by` (null: no value), and its metrics."""

    group: dict[str, str | None]
    metrics: dict[str, int | float | str | None]


def _connective(node: Any) -> str | None:
    """Return the connective of a node (`and`, `or`, `not`); None for a comparison and for anything else."""
    return next((key for key in ("and", "or", "not") if key in node), None) if isinstance(node, dict) else None


def _places(raw: Any) -> dict[Loc, Any]:
    """Return every node by its location, parents first. Validates the structure of all nodes but comparisons."""
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
                values += min(len(node["value"]), MOST_VALUES)  # a list with more is reported separately
        else:
            faults += [_fault((*loc, other), f"cannot be combined with {key}") for other in node if other != key]
            if key == "not":
                waiting.append(((*loc, key), node[key], depth + 1))
            elif not isinstance(node[key], list) or not node[key]:
                faults.append(_fault((*loc, key), "must be a list of one node or more"))
            else:
                nodes = node[key][: MOST_COMPARISONS + 1]
                waiting += [((*loc, key, index), nodes[index], depth + 1) for index in reversed(range(len(nodes)))]
        if comparisons + len(waiting) > MOST_COMPARISONS:  # each waiting node has at least one
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
    """Raise ValueError if a value is not valid for the field and the operator."""
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
            raise ValueError("must not contain an unpaired surrogate") from None
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
    """Return an error to whose locations pydantic prepends that of the field being validated."""
    return ValidationError.from_exception_data("query", faults)
