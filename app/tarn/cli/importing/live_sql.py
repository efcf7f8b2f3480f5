"""SQL for the live statements of an ftm-lakehouse dataset: the result of its merge, one row per Tarn statement.

In tables whose rows have a `deleted_at`, the newest rows of a group are live: a group is a statement of one origin and
role, or with a `fragment` all values of an entity's property in that fragment, so that later values replace earlier
ones. A tombstone has the time of the statement that it deletes, and wins.

With a translog, a statement is live if its row there has no delete; its times are those of that row. A statement
without a row, and one that was written again after its delete, are `hidden`: stored, but not live.

Tarn identifies a statement by its origin, entity, property, value, language and whether it is external, and keeps only
the newest of an entity's BASE statements of one origin. Roles and fragments are not part of that: rows that differ in
nothing else become one, with the earliest first_seen and the latest last_seen.

This is not the definition of Tarn's own live rows (`tarn.lake.live`): the other format has no order of events, so times
decide what is newest, and its deletes, fragments and roles have no counterpart in Tarn.
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
    """The columns of the source's tables, which show how it deletes rows."""

    columns: frozenset[str]
    translog: bool

    @property
    def described(self) -> str:
        if self.translog:
            return "statements and translog"
        return "statements with deleted_at" if "deleted_at" in self.columns else "statements, none deleted"


def detect_layout(where: str, columns: list[str], translog: list[str] | None) -> SourceLayout:
    """Return the layout of tables with these columns. Raises Misuse if it is not a known one."""
    present = frozenset(columns)
    absent = [name for name in NEEDED if name not in present]
    if absent:
        raise Misuse(f"{where} is not a table of statements: it lacks the columns {', '.join(absent)}")
    if unknown := sorted(present - KNOWN):
        raise Misuse(f"{where} has an unknown layout: it has the additional columns {', '.join(unknown)}")
    if translog is not None and frozenset(translog) != TRANSLOG:
        raise Misuse(f"the translog of {where} has an unknown layout: it has the columns {', '.join(translog)}")
    return SourceLayout(present, translog is not None)


def live(layout: SourceLayout, hidden: bool) -> str:
    """Return SQL for the live statements of one origin (`$origin`) from the relations `raw` and, if any, `log`."""
    return f"""
WITH source_rows AS ({_source_rows(layout)}),
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
    """Return SQL for the live statements of one origin, with the columns that Tarn reads."""
    return f"""
SELECT entity_id, rest.canonical_id AS canonical_id, rest.schema AS "schema", prop, value, lang,
    rest.original_value AS original_value, external, $name AS origin,
    make_timestamp(first) AS first_seen, make_timestamp(last) AS last_seen
FROM ({live(layout, hidden)})"""


def counted(live: str) -> str:
    """Return SQL for the entities of live statements, with the number of each.

    It reads every column that the import will read, because pages of any column may be damaged.
    """
    return (
        f"SELECT entity_id, count(*) AS rows, count(hash(rest, value, lang)) AS read FROM ({live}) GROUP BY entity_id"
    )


def hidden_rows() -> str:
    """Return SQL for the number of hidden statements of one origin: without a translog row, and written again."""
    source_rows = "SELECT id FROM raw WHERE origin IS NOT DISTINCT FROM $origin"
    return f"""
SELECT count(*) FILTER (log.id IS NULL), count(*) FILTER (log.id IS NOT NULL AND NOT live AND last > ended)
FROM ({source_rows}) LEFT JOIN ({_LINES}) log USING (id)"""


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
    FROM source_rows
    WINDOW one AS (PARTITION BY bucket, role, fragment, id)
) WHERE newest AND NOT state.dead"""


def _from_translog(hidden: bool) -> str:
    shown = "log.live" if not hidden else "log.id IS NULL OR log.live OR log.last > log.ended"
    return f"""
SELECT source_rows.* REPLACE (
    coalesce(log.first, source_rows.first) AS first, coalesce(log.last, source_rows.last) AS last
)
FROM source_rows LEFT JOIN ({_LINES}) log ON source_rows.id = log.id
WHERE {shown}"""
