"""Which statements of a lakehouse are live, in SQL: what its own merge would leave, one row to each of Tarn's.

Of rows with a `deleted_at` of their own, a group's newest count: a group is a statement under one origin and role, or
with a `fragment` all that was said of an entity's property in it, so that what is said later takes the place of what
was said before. A tombstone is as new as what it ends, and wins.

With a translog, a statement is shown if its line there says nothing of a delete; its times are that line's. One without
a line is not shown, nor is one that was said again after its delete: both are `hidden`.

Tarn knows a statement by its origin, entity, property, value, language and whether it is external, and of an entity's
BASE statements of one origin only the newest. Roles and fragments are no part of that: rows that differ in nothing else
are one, first seen when the first was and last seen when the last was.
"""

# ruff: noqa: S608 - put together from constants of this module

from dataclasses import dataclass

from tarn.cli.failures import Misuse

NEEDED = ("id", "entity_id", "origin", "schema", "prop", "value")
KEPT = ("canonical_id", "dataset", "prop_type", "original_value", "lang", "external", "first_seen", "last_seen")
STORED = ("bucket", "shard", "source", "deleted_at", "fragment", "role")
KNOWN = frozenset({*NEEDED, *KEPT, *STORED})
TRANSLOG = frozenset({"id", "first_seen", "last_seen", "deleted_at"})

BASE = "id"
"""FtM's property of BASE statements."""


@dataclass(frozen=True)
class SourceLayout:
    """The columns that tables have, which say how rows are deleted."""

    columns: frozenset[str]
    translog: bool

    @property
    def described(self) -> str:
        if self.translog:
            return "statements and translog"
        return "statements with deleted_at" if "deleted_at" in self.columns else "statements, none deleted"


def detect_layout(where: str, columns: list[str], translog: list[str] | None) -> SourceLayout:
    """The layout of tables with these columns. Raises Misuse for columns of which nobody knows what they would say."""
    given = frozenset(columns)
    lacking = [name for name in NEEDED if name not in given]
    if lacking:
        raise Misuse(f"{where} is no table of statements: it lacks {', '.join(lacking)}")
    if unknown := sorted(given - KNOWN):
        raise Misuse(f"{where} is of a layout that is not known here: it has the columns {', '.join(unknown)}")
    if translog is not None and frozenset(translog) != TRANSLOG:
        raise Misuse(f"the translog beside {where} is of a layout that is not known here: it has {', '.join(translog)}")
    return SourceLayout(given, translog is not None)


def live(layout: SourceLayout, hidden: bool) -> str:
    """The live statements of one origin (`$origin`), out of the relations `raw` and, if there is one, `log`."""
    return f"""
WITH said AS ({_source_rows(layout)}),
shown AS ({_from_translog(hidden) if layout.translog else _newest()})
SELECT entity_id, prop, value, lang, external,
    arg_max({_REST}, coalesce(last, 0)) AS rest, min(first) AS first, max(last) AS last
FROM shown WHERE prop <> '{BASE}'
GROUP BY entity_id, prop, value, lang, external
UNION ALL
SELECT entity_id, '{BASE}', newest.value, newest.lang, newest.external, newest.rest, newest.first, newest.last
FROM (
    SELECT entity_id, max({{'last': last, 'first': first, 'value': value, 'lang': lang, 'external': external,
        'rest': {_REST}}}) AS newest
    FROM shown WHERE prop = '{BASE}' GROUP BY entity_id
)"""


def rows(layout: SourceLayout, hidden: bool) -> str:
    """The live statements of one origin, with the columns that Tarn takes."""
    return f"""
SELECT entity_id, rest.canonical_id AS canonical_id, rest.schema AS "schema", prop, value, lang,
    rest.original_value AS original_value, external, $name AS origin,
    make_timestamp(first) AS first_seen, make_timestamp(last) AS last_seen
FROM ({live(layout, hidden)})"""


def counted(live: str) -> str:
    """The entities among live statements, and how many each has.

    All that will be read again is read, not what counting needs alone: pages of any column may be damaged.
    """
    return (
        f"SELECT entity_id, count(*) AS rows, count(hash(rest, value, lang)) AS read FROM ({live}) GROUP BY entity_id"
    )


def hidden_rows() -> str:
    """How many statements of one origin are held and not shown: without a line in the translog, and said again."""
    said = "SELECT id FROM raw WHERE origin IS NOT DISTINCT FROM $origin"
    return f"""
SELECT count(*) FILTER (log.id IS NULL), count(*) FILTER (log.id IS NOT NULL AND NOT live AND last > ended)
FROM ({said}) LEFT JOIN ({_LINES}) log USING (id)"""


_REST = "{'canonical_id': canonical_id, 'schema': schema, 'original_value': original_value}"

_LINES = """
SELECT id, min(epoch_us(first_seen)) AS first, max(epoch_us(last_seen)) AS last, max(epoch_us(deleted_at)) AS ended,
    bool_or(deleted_at IS NULL) AS live
FROM log GROUP BY id"""


def _source_rows(layout: SourceLayout) -> str:
    def column(name: str, default: str) -> str:
        return name if name in layout.columns else default

    return f"""
SELECT id, entity_id, coalesce({column("canonical_id", "NULL")}, entity_id) AS canonical_id, schema, prop, value,
    nullif({column("original_value", "NULL")}, '') AS original_value, nullif({column("lang", "NULL")}, '') AS lang,
    coalesce({column("external", "false")}, false) AS external,
    epoch_us({column("first_seen", "NULL::TIMESTAMP")}) AS first,
    epoch_us({column("last_seen", "NULL::TIMESTAMP")}) AS last,
    epoch_us({column("deleted_at", "NULL::TIMESTAMP")}) AS ended, {column("bucket", "''")} AS bucket,
    coalesce({column("fragment", "''")}, '') AS fragment, coalesce({column("role", "''")}, '') AS role
FROM raw WHERE origin IS NOT DISTINCT FROM $origin"""


def _newest() -> str:
    # Without a fragment a group is a statement; with one, everything that an entity's property has in it.
    group = "bucket, role, fragment, CASE fragment WHEN '' THEN id ELSE entity_id || chr(31) || prop END"
    return f"""
SELECT * EXCLUDE (newest, state) FROM (
    SELECT * REPLACE (min(first) OVER one AS first),
        last IS NOT DISTINCT FROM max(last) OVER (PARTITION BY {group}) AS newest,
        max({{'last': last, 'dead': ended IS NOT NULL}}) OVER one AS state
    FROM said
    WINDOW one AS (PARTITION BY bucket, role, fragment, id)
) WHERE newest AND NOT state.dead"""


def _from_translog(hidden: bool) -> str:
    shown = "log.live" if not hidden else "log.id IS NULL OR log.live OR log.last > log.ended"
    return f"""
SELECT said.* REPLACE (coalesce(log.first, said.first) AS first, coalesce(log.last, said.last) AS last)
FROM said LEFT JOIN ({_LINES}) log ON said.id = log.id
WHERE {shown}"""
