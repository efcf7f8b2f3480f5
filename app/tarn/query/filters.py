"""Compiler of query filters (`where` nodes) to an SQL condition on the statements of one entity.

`tarn.model.ftm.query` defines what the nodes mean. The condition goes into `SELECT … FROM live GROUP BY dataset,
canonical_id HAVING …`: each comparison is an aggregate over the entity's statements, so one pass over them evaluates
any node. All user input is bound as parameters.
"""

import re
from typing import Any, NamedTuple

from followthemoney.types import registry

from tarn.model.ftm import pattern
from tarn.model.ftm.query import And, Comparison, Node, Not, Op, Or
from tarn.model.ftm.query_fields import FieldName, schema_descendants
from tarn.model.ftm.statement import microseconds

FIRST_SEEN = "coalesce(min(first_seen) FILTER (WHERE prop <> 'id'), min(first_seen))"
LAST_SEEN = "coalesce(max(last_seen) FILTER (WHERE prop <> 'id'), max(last_seen))"
"""When an entity was first and last seen: its BASE statement counts only if it has no other statement."""

NUMBER_TEXT = r"^[\s\pZ]*([+-]?[\s\pZ]?(?:\d{1,3}(?:[,\s\pZ]\d{2,3})+|\d+)(?:\.\d+)?)[\s\pZ]*[^\s\pZ\d]*[\s\pZ]*$"
DIGITS = rf"regexp_replace(regexp_extract(value, '{NUMBER_TEXT}', 1), '[,\s\pZ]', '', 'g')"
NUMBER = f"CASE WHEN isfinite(try_cast({DIGITS} AS DOUBLE)) THEN try_cast({DIGITS} AS DOUBLE) END"
"""SQL that parses a value as FtM parses a number: groups of digits, an optional unit. Null if it is not a number."""

LONG_LIST = 200
"""Number of values from which a hash join is faster. Each adds a join to plan; planning a hundred takes seconds."""

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
    # DuckDB's LIKE with ESCAPE backtracks for every %: a thousand characters and four of them take minutes.
    Op.LIKE: "regexp_full_match({}, ?, 's')",
    Op.ILIKE: "regexp_full_match({}, ?, 'si')",
}


class Condition(NamedTuple):
    """A boolean SQL expression, and its parameters in order."""

    sql: str
    parameters: tuple[Any, ...]


def compile(where: Node | None) -> Condition:
    """Return the condition that is true for an entity's statements if the entity matches, else false; never null."""
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
    """Return ids of which every match has at least one, as entity id or canonical id; None if it may have any.

    An entity can have several ids, so two lists joined by AND cannot be intersected: the shorter one is returned.
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
            return sorted({name for ids in named for name in ids}) if len(named) == len(each) else None
        case _:
            return None


def has_value(field: FieldName) -> Condition:
    """Return the condition that a statement has a value of a `prop:` or `type:` field."""
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
    """Return the condition that at least one value satisfies a comparison."""
    if field.is_moment:
        return _moment(field, op, value)
    if field.kind == "schemata":
        kinds = sorted({kind for schema in (value if op is Op.IN else [value]) for kind in schema_descendants(schema)})
        return _any(_is_in("schema", kinds))
    if field == "id":
        return _any(_join(" OR ", [_test("entity_id", op, value), _test("canonical_id", op, value)]))
    if field.kind not in ("prop", "type"):
        return _any(_test(field, op, value))
    if field.is_number and op in ORDER_SIGNS:
        test = Condition(f"coalesce({NUMBER} {ORDER_SIGNS[op]} ?, false)", (registry.number.to_number(value),))
    else:
        test = _test("value", op, value)
    has_field = has_value(field)
    # AND would test the values of every property; CASE tests only those of this field.
    return _any(
        Condition(f"CASE WHEN {has_field.sql} THEN {test.sql} ELSE false END", has_field.parameters + test.parameters)
    )


def _test(column: str, op: Op, value: Any) -> Condition:
    """Return the condition on one column of a statement."""
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
    """Return the regular expression for a LIKE pattern. The position of `%` determines how many states it has."""
    expression = []
    any_open = False
    for part in pattern.parts(value):
        if isinstance(part, str):
            expression.append(re.escape(part))
            continue
        singles = f".{{{part.least}}}" if part.least else ""
        if not part.is_open:
            expression.append(singles)
        else:
            # Counted characters before the first `.*` can match at one position only; after a `.*`, at any position.
            expression.append(f".*{singles}" if any_open else f"{singles}.*")
            any_open = True
    return "".join(expression)


def _any(of_statement: Condition) -> Condition:
    return Condition(f"bool_or({of_statement.sql})", of_statement.parameters)


def _negate(condition: Condition) -> Condition:
    return Condition(f"(NOT {condition.sql})", condition.parameters)


def _join(by: str, conditions: list[Condition]) -> Condition:
    sql = by.join(condition.sql for condition in conditions)
    return Condition(f"({sql})", tuple(value for condition in conditions for value in condition.parameters))
