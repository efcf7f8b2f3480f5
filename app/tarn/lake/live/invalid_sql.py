"""SQL that finds invalid entities: their statements do not assemble, as no schema of theirs descends from all others.

Every schema has a mask: one bit for itself and one for each schema that it extends. The masks of an entity's
schemata, combined by OR, are the mask of a schema if and only if the entity has that schema and it extends all its
others. So one pass with a few integers for each entity decides it, and DuckDB can spill that. Like
`tarn.query.output.ftm_model.resolved_schema`, it ignores schemata that FollowTheMoney does not know; an entity that
has no other schema does not assemble.
"""

# ruff: noqa: S608 - composed from names of FollowTheMoney's model and from our own SQL

from functools import cache

from followthemoney.model import Model

WORD_BITS = 64


@cache
def masks() -> str:
    """Return a query for the mask of every schema: columns `schema`, `mask_0`, `mask_1` and so on."""
    named = ", ".join(["schema", *columns()])
    rows = ", ".join(f"('{name}', {', '.join(_literals(mask))})" for name, mask in _masks().items())
    return f"SELECT * FROM (VALUES {rows}) AS masks({named})"


def combined() -> str:
    """Return the aggregates that combine the masks of an entity's schemata, under the column names of `masks`."""
    return ", ".join(f"coalesce(bit_or({column}), 0) AS {column}" for column in columns())


def invalid(source: str, key: str = "dataset, canonical_id") -> str:
    """Return a query for the keys of invalid entities.

    `source` is a relation or a query in parentheses, with the columns of `key` and `schema`.
    """
    own = ", ".join(f"coalesce(bit_or({column}), 0)" for column in columns())
    known = ", ".join(f"({', '.join(_literals(mask))})" for mask in _masks().values())
    return (
        f"SELECT {key} FROM {source} LEFT JOIN ({masks()}) AS masks USING (schema) "
        f"GROUP BY {key} HAVING ({own}) NOT IN ({known})"
    )


@cache
def _masks() -> dict[str, int]:
    schemata = Model.instance().schemata
    bits = {name: 1 << position for position, name in enumerate(sorted(schemata))}
    return {name: sum(bits[other] for other in schemata[name].names) for name in bits}


@cache
def columns() -> list[str]:
    """Return the columns that hold a mask, the lowest bits first."""
    words = -(-len(_masks()) // WORD_BITS)
    return [f"mask_{word}" for word in range(words)]


def _literals(mask: int) -> list[str]:
    """Return the 64-bit words of a mask as SQL literals, the lowest first."""
    return [f"{mask >> (word * WORD_BITS) & ((1 << WORD_BITS) - 1)}::UBIGINT" for word, _ in enumerate(columns())]
