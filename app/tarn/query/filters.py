"""Where: nodes as a condition on the statements of one entity.

What they mean is in `tarn.model.query`. The condition goes into `SELECT … FROM live GROUP BY dataset, canonical_id
HAVING …`: each comparison is an aggregate over the entity's statements, so one pass over them decides any node.
Whatever a caller sent binds as a parameter.
"""

import re
from typing import Any, NamedTuple

from followthemoney.types import registry

from tarn.model import pattern
from tarn.model.query import And, Comparison, Node, Not, Op, Or
from tarn.model.query_fields import FieldName, kinds_of
from tarn.model.statement import microseconds

FIRST_SEEN = "coalesce(min(first_seen) FILTER (WHERE prop <> 'id'), min(first_seen))"
LAST_SEEN = "coalesce(max(last_seen) FILTER (WHERE prop <> 'id'), max(last_seen))"
"""An entity's own moments: a BASE statement counts only where there is nothing else."""

NUMBER_TEXT = r"^[\s\pZ]*([+-]?[\s\pZ]?(?:\d{1,3}(?:[,\s\pZ]\d{2,3})+|\d+)(?:\.\d+)?)[\s\pZ]*[^\s\pZ\d]*[\s\pZ]*$"
DIGITS = rf"regexp_replace(regexp_extract(value, '{NUMBER_TEXT}', 1), '[,\s\pZ]', '', 'g')"
NUMBER = f"CASE WHEN isfinite(try_cast({DIGITS} AS DOUBLE)) THEN try_cast({DIGITS} AS DOUBLE) END"
"""A value as FtM reads a number: groups of digits, perhaps a unit after it. Null for what is none."""

LONG_LIST = 200
"""Values from which on a hash table pays. It costs the planner a join, and a hundred of them seconds."""

ORDER_SIGNS = {Op.GT: ">", Op.GTE: ">=", Op.LT: "<", Op.LTE: "<="}
NEGATED = {Op.NE: Op.EQ, Op.NOT_IN: Op.IN}

TESTS = {
    Op.EQ: "= ?",
    **{op: f"{sign} ?" for op, sign in ORDER_SIGNS.items()},
}
CALLS = {
    Op.STARTSWITH: "starts_with({}, ?)",
    Op.ENDSWITH: "ends_with({}, ?)",
    Op.CONTAINS: "contains({}, ?)",
    # DuckDB's own LIKE with ESCAPE tries every place for every %: a thousand characters and four of them take minutes.
    Op.LIKE: "regexp_full_match({}, ?, 's')",
    Op.ILIKE: "regexp_full_match({}, ?, 'si')",
}


class Condition(NamedTuple):
    """A boolean SQL expression, and what binds to its question marks, in their order."""

    sql: str
    parameters: tuple[Any, ...]


def compile(where: Node | None) -> Condition:
    """The condition that an entity's statements meet exactly if it matches; never null."""
    match where:
        case None:
            return Condition("true", ())
        case And(and_=nodes):
            return _join(" AND ", [compile(node) for node in nodes])
        case Or(or_=nodes):
            return _join(" OR ", [compile(node) for node in nodes])
        case Not(not_=node):
            return _negate(compile(node))
        case Comparison():
            return _compile_comparison(where)


def named_ids(where: Node | None) -> list[str] | None:
    """Ids of which every match has one or more, as entity id or canonical id; None if it may have any.

    An entity can have several ids, so lists that it must meet both do not narrow each other: the shorter one is told.
    """
    match where:
        case Comparison(field="id" | "canonical_id", op=Op.EQ, value=str(value)):
            return [value]
        case Comparison(field="id" | "canonical_id", op=Op.IN, value=list(values)):
            return sorted(set(values))
        case And(and_=nodes):
            return min((ids for ids in map(named_ids, nodes) if ids is not None), key=len, default=None)
        case Or(or_=nodes):
            each = [named_ids(node) for node in nodes]
            named = [ids for ids in each if ids is not None]
            return sorted({one for ids in named for one in ids}) if len(named) == len(each) else None
        case _:
            return None


def has_value(field: FieldName) -> Condition:
    """Whether a statement holds a value of a `prop:` or `type:` field."""
    names, in_some = field.holders
    if not in_some:
        return Condition("prop = ?", (names[0],)) if len(names) == 1 else _is_in("prop", names)
    partly = [
        _join(" AND ", [Condition("prop = ?", (name,)), _is_in("schema", schemata)])
        for name, schemata in in_some.items()
    ]
    return _join(" OR ", [_is_in("prop", names), *partly])


def _compile_comparison(comparison: Comparison) -> Condition:
    field, op, value = comparison.field, comparison.op, comparison.value
    if op in NEGATED:
        return _negate(_match(field, NEGATED[op], value))
    if op is Op.NULL:
        some = _any(has_value(field))
        return _negate(some) if value is True else some
    return _match(field, op, value)


def _match(field: FieldName, op: Op, value: Any) -> Condition:
    """A comparison that some value must meet."""
    if field.is_moment:
        return _moment(field, op, value)
    if field.kind == "schemata":
        kinds = sorted({kind for schema in (value if op is Op.IN else [value]) for kind in kinds_of(schema)})
        return _any(_is_in("schema", kinds))
    if field == "id":
        return _any(_join(" OR ", [_test("entity_id", op, value), _test("canonical_id", op, value)]))
    if field.kind not in ("prop", "type"):
        return _any(_test(field, op, value))
    if field.is_number and op in ORDER_SIGNS:
        test = Condition(f"coalesce({NUMBER} {ORDER_SIGNS[op]} ?, false)", (registry.number.to_number(value),))
    else:
        test = _test("value", op, value)
    held = has_value(field)
    # AND would test the values of every property: CASE tests none that does not matter.
    return _any(Condition(f"CASE WHEN {held.sql} THEN {test.sql} ELSE false END", held.parameters + test.parameters))


def _test(column: str, op: Op, value: Any) -> Condition:
    """The test of one column of a statement."""
    if op is Op.IN:
        return _is_in(column, value)
    if op in (Op.LIKE, Op.ILIKE):
        value = _expression(value)
    sql = CALLS[op].format(column) if op in CALLS else f"{column} {TESTS[op]}"
    return Condition(sql, (value,))


def _moment(field: FieldName, op: Op, value: Any) -> Condition:
    own = FIRST_SEEN if field == "first_seen" else LAST_SEEN
    if op is Op.IN:
        moments = [microseconds(moment, field) for moment in value]
        return Condition(f"list_contains(?::BIGINT[], {own})", (moments,))
    return Condition(f"({own} {TESTS[op]})", (microseconds(value, field),))


def _is_in(column: str, values: list[str]) -> Condition:
    if len(values) < LONG_LIST:
        return Condition(f"list_contains(?::VARCHAR[], {column})", (values,))
    return Condition(f"{column} IN (SELECT unnest(?::VARCHAR[]))", (values,))


def _expression(value: str) -> str:
    """The regular expression of a LIKE pattern. Where `%` stands decides how many states it has."""
    found = []
    any_open = False
    for part in pattern.parts(value):
        if isinstance(part, str):
            found.append(re.escape(part))
            continue
        singles = f".{{{part.least}}}" if part.least else ""
        if not part.is_open:
            found.append(singles)
        else:
            # Before the first loop, a number of characters has one place; after any other, it has the loop's places.
            found.append(f".*{singles}" if any_open else f"{singles}.*")
            any_open = True
    return "".join(found)


def _any(of_statement: Condition) -> Condition:
    return Condition(f"bool_or({of_statement.sql})", of_statement.parameters)


def _negate(condition: Condition) -> Condition:
    return Condition(f"(NOT {condition.sql})", condition.parameters)


def _join(by: str, conditions: list[Condition]) -> Condition:
    sql = by.join(condition.sql for condition in conditions)
    return Condition(f"({sql})", tuple(value for condition in conditions for value in condition.parameters))
