"""The definition of live rows in SQL (DuckDB): what `tarn.lake.live.reference` defines, for many entities at once.

`stored_live` selects the live rows of a store. The fold applies events to them, in temporary tables. Each task has its
own, with entities that no other task has:

    events    the slice of the journal; `adds` is the view of those that add
    families  schemata with their buckets
    stored    live statements of the affected entities in the store, before these events
    known     identities that an erase or a newer BASE statement may end
    endings   what ends an identity, by commit
    ended     identities that were ended at the end of some commit, and the last event that ended them
    run       live statements afterwards, from the adds since then
"""

# ruff: noqa: S608 - composed from constants of this module

ADDS = """
CREATE OR REPLACE TEMP VIEW adds AS
SELECT * REPLACE (coalesce(canonical_id, entity_id) AS canonical_id), ord >> 32 AS commit
FROM events WHERE kind = 1
"""

TABLES = (
    "CREATE TEMP TABLE families (schema VARCHAR, bucket VARCHAR)",
    """
    CREATE TEMP TABLE events (
        ord BIGINT, kind SMALLINT, id BLOB, entity_id VARCHAR, canonical_id VARCHAR, schema VARCHAR, prop VARCHAR,
        value VARCHAR, lang VARCHAR, original_value VARCHAR, external BOOLEAN, origin VARCHAR, first_seen BIGINT,
        last_seen BIGINT, invalid_columns VARCHAR
    )
    """,
    ADDS,
    """
    CREATE TEMP TABLE stored (
        id BLOB, origin VARCHAR, entity_id VARCHAR, canonical_id VARCHAR, bucket VARCHAR, schema VARCHAR,
        prop VARCHAR, original_value VARCHAR, first_seen BIGINT, last_seen BIGINT
    )
    """,
)

SLICE_STATISTICS = """
SELECT count(*) FILTER (kind = 1), count(*) FILTER (kind <> 1 AND (entity_id IS NOT NULL OR $is_first)),
    count(*) FILTER (kind <> 1), coalesce(avg(strlen(value)) FILTER (kind = 1), 0),
    coalesce(list_sort(list(DISTINCT origin) FILTER (kind = 1 AND origin IS NOT NULL)), []),
    coalesce(list(DISTINCT schema) FILTER (kind = 1 AND schema IS NOT NULL), []),
    coalesce(bool_or(
        invalid_columns IS NOT NULL OR kind IS NULL OR kind NOT IN (1, 2, 3)
        OR (kind <> 3 AND (id IS NULL OR octet_length(id) <> 20 OR entity_id IS NULL OR origin IS NULL))
        OR (kind = 1 AND (schema IS NULL OR prop IS NULL OR value IS NULL OR first_seen IS NULL OR last_seen IS NULL
            OR first_seen NOT BETWEEN $first AND $last OR last_seen NOT BETWEEN $first AND $last))
    ), false)
FROM events
"""
"""Statistics of a slice, and whether any of its events may have to be rejected."""

FAULTS = """
SELECT ord, CASE
    WHEN invalid_columns IS NOT NULL THEN invalid_columns || ': cannot be read'
    WHEN kind IS NULL OR kind NOT IN (1, 2, 3) THEN 'is of an unknown kind'
    WHEN kind <> 3 AND (id IS NULL OR octet_length(id) <> 20) THEN 'id: is not a SHA-1'
    WHEN kind <> 3 AND entity_id IS NULL THEN 'entity_id: is missing'
    WHEN kind = 2 AND origin IS NULL THEN 'origin: is missing'
    WHEN kind = 1 AND (origin IS NULL OR list_contains($bad, origin)) THEN 'origin: is not a valid origin'
    WHEN kind = 1 AND (schema IS NULL OR list_contains($unknown, schema)) THEN 'schema: is not known'
    WHEN kind = 1 AND prop IS NULL THEN 'prop: is missing'
    WHEN kind = 1 AND value IS NULL THEN 'value: is missing'
    WHEN kind = 1 AND (first_seen IS NULL OR first_seen NOT BETWEEN $first AND $last)
        THEN 'first_seen: is not a valid time'
    WHEN kind = 1 AND (last_seen IS NULL OR last_seen NOT BETWEEN $first AND $last)
        THEN 'last_seen: is not a valid time'
END AS reason FROM events WHERE reason IS NOT NULL ORDER BY ord
"""


def stored_live(rows: str, marks: str | None, identities: str | None = None, *, each_once: bool = False) -> str:
    """Return a query for the live rows of a store: `tarn.lake.live.reference.stored_live` for many identities at once.

    The result has the columns of `rows`. `first_seen`, `last_seen` and `ord` include the marks after the row.

    - `rows` is a query for rows of the table `statements`, with at least id, origin, ord and both times.
    - `marks` is a query for the columns id, origin, kind, both times and ord of the translog; None: there are none.
    - `identities` is a query for id, origin and ord of the same rows. With it, `rows` is streamed; without it, `rows`
      is evaluated once and materialized, which is faster where few rows of large files are selected.
    - `each_once` says that every identity has exactly one row, so that rows need not be grouped.
    """
    if each_once and marks is None:
        return rows
    marked = "SELECT DISTINCT id, origin, true AS is_marked FROM marks"
    if each_once:
        decided = "SELECT id, origin, ord FROM identities SEMI JOIN marks USING (id, origin)"
    else:
        decided = (
            f"SELECT id, origin, max(ord) AS ord FROM identities LEFT JOIN ({marked}) USING (id, origin) "
            "GROUP BY id, origin HAVING count(*) > 1 OR bool_or(is_marked)"
        )
    return f"""
WITH rows AS {"MATERIALIZED" if identities is None else "NOT MATERIALIZED"} ({rows}),
identities AS NOT MATERIALIZED ({identities or "SELECT id, origin, ord FROM rows"}),
marks AS MATERIALIZED (SELECT id, origin, kind, first_seen, last_seen, ord FROM ({marks or _NO_MARKS})),
-- Most identities have one row and no mark. Only the newest rows of the others have to be joined.
newest AS MATERIALIZED ({decided}),
verdict AS MATERIALIZED (
    SELECT newest.id, newest.origin, newest.ord, bool_or(marks.kind = 'delete') AS is_deleted,
        min(marks.first_seen) AS first_seen, max(marks.last_seen) AS last_seen, max(marks.ord) AS last_ord
    FROM newest LEFT JOIN marks ON (marks.id, marks.origin) = (newest.id, newest.origin) AND marks.ord > newest.ord
    GROUP BY ALL
)
SELECT rows.* REPLACE (
    least(rows.first_seen, verdict.first_seen) AS first_seen, greatest(rows.last_seen, verdict.last_seen) AS last_seen,
    greatest(rows.ord, verdict.last_ord) AS ord
)
FROM rows LEFT JOIN verdict USING (id, origin)
WHERE verdict.ord IS NULL OR (verdict.ord = rows.ord AND verdict.is_deleted IS NOT TRUE)
"""


_NO_MARKS = (
    "SELECT NULL::BLOB AS id, NULL::VARCHAR AS origin, NULL::VARCHAR AS kind, NULL::BIGINT AS first_seen, "
    "NULL::BIGINT AS last_seen, NULL::BIGINT AS ord WHERE false"
)

STORED_COLUMNS = (
    "id",
    "origin",
    "entity_id",
    "canonical_id",
    "bucket",
    "schema",
    "prop",
    "original_value",
    "first_seen",
    "last_seen",
    "ord",
)
"""Columns of statement rows that `insert_stored` reads."""


def insert_stored(rows: str, marks: str | None) -> str:
    """Return the statement that fills the table `stored`. `rows` has STORED_COLUMNS."""
    return f"INSERT INTO stored BY NAME SELECT * EXCLUDE (ord) FROM ({stored_live(rows, marks)})"


ENDINGS = (
    # What an erase or a newer BASE statement may end: statements added here, and those live in the store.
    """
    CREATE OR REPLACE TEMP TABLE known AS
    SELECT id, origin, entity_id, prop = 'id' AS is_base FROM adds
    WHERE prop = 'id' OR EXISTS (FROM events WHERE kind <> 1)
    UNION SELECT id, origin, entity_id, prop = 'id' FROM stored
    """,
    """
    CREATE OR REPLACE TEMP TABLE endings AS
    SELECT id, origin, max(ord) AS ord, commit FROM (
        SELECT id, origin, ord, ord >> 32 AS commit FROM events WHERE kind = 2
        UNION ALL
        SELECT known.id, known.origin, erased.ord, erased.ord >> 32
        FROM known JOIN events erased ON erased.entity_id = known.entity_id
        WHERE erased.kind = 3 AND (erased.origin IS NULL OR erased.origin = known.origin)
        UNION ALL
        SELECT known.id, known.origin, erased.ord, erased.ord >> 32
        FROM known JOIN events erased ON erased.entity_id IS NULL
        WHERE erased.kind = 3 AND (erased.origin IS NULL OR erased.origin = known.origin)
        UNION ALL
        SELECT known.id, known.origin, newer.ord, newer.commit
        FROM known JOIN adds newer ON newer.entity_id = known.entity_id AND newer.origin = known.origin
        WHERE known.is_base AND newer.prop = 'id' AND newer.id <> known.id
    ) GROUP BY id, origin, commit
    """,
    # An ending counts unless its own commit adds the statement again: readers never see it ended in that case.
    """
    CREATE OR REPLACE TEMP TABLE ended AS
    SELECT id, origin, max(endings.ord) AS ord
    FROM endings LEFT JOIN (
        SELECT id, origin, commit, max(ord) AS ord FROM adds SEMI JOIN endings USING (id, origin) GROUP BY ALL
    ) readded USING (id, origin, commit)
    WHERE readded.ord IS NULL OR readded.ord < endings.ord
    GROUP BY id, origin
    """,
)

LATEST = """
SELECT id, origin, max(adds.ord) AS ord, min(first_seen) AS first_seen, max(last_seen) AS last_seen,
    any_value(ended.ord) IS NOT NULL AS was_ended
FROM adds LEFT JOIN ended USING (id, origin) WHERE ended.ord IS NULL OR adds.ord > ended.ord
GROUP BY id, origin
"""

AFTER = f"""
WITH latest AS ({LATEST})
SELECT adds.canonical_id, adds.entity_id, adds.id, adds.schema, adds.prop, adds.value, adds.lang, adds.original_value,
    adds.external, adds.origin,
    CASE WHEN was_ended THEN latest.first_seen ELSE least(latest.first_seen, stored.first_seen) END AS first_seen,
    CASE WHEN was_ended THEN latest.last_seen ELSE greatest(latest.last_seen, stored.last_seen) END AS last_seen
FROM latest JOIN adds USING (ord)
LEFT JOIN stored ON stored.id = latest.id AND stored.origin = latest.origin
UNION ALL
SELECT canonical_id, entity_id, id, schema, prop, value, lang, original_value, external, origin, first_seen, last_seen
FROM stored ANTI JOIN ended USING (id, origin) ANTI JOIN latest USING (id, origin)
"""
"""The live statements for readers: what a flush of these events would leave if it happened now."""

FIRST_RUN = f"""
CREATE OR REPLACE TEMP TABLE run AS
SELECT latest.* EXCLUDE (was_ended), true AS is_new, true AS full_row,
    NULL::VARCHAR AS former_id, NULL::VARCHAR AS former_bucket
FROM ({LATEST}) AS latest
"""
"""`run` where no statement of these entities was stored before."""

RUN = f"""
CREATE OR REPLACE TEMP TABLE run AS
SELECT latest.id, latest.origin, latest.ord,
    stored.id IS NOT NULL AND (stored.canonical_id <> adds.canonical_id OR stored.bucket <> families.bucket) AS moved,
    CASE WHEN was_ended THEN latest.first_seen ELSE least(latest.first_seen, stored.first_seen) END AS first_seen,
    CASE WHEN was_ended THEN latest.last_seen ELSE greatest(latest.last_seen, stored.last_seen) END AS last_seen,
    stored.id IS NULL AS is_new,
    stored.id IS NULL OR was_ended OR moved OR stored.schema <> adds.schema
        OR stored.original_value IS DISTINCT FROM adds.original_value AS full_row,
    CASE WHEN moved THEN stored.canonical_id END AS former_id,
    CASE WHEN moved THEN stored.bucket END AS former_bucket
FROM ({LATEST}) AS latest JOIN adds USING (ord) JOIN families USING (schema)
LEFT JOIN stored ON stored.id = latest.id AND stored.origin = latest.origin
"""
"""`run` in general. A full row is written where anything but first and last seen differs from the stored one."""

SORTED = "ORDER BY bucket, canonical_id, id"

ROWS = """
SELECT bucket, coalesce(canonical_id, entity_id) AS canonical_id, events.id, entity_id, schema, prop, value, lang,
    original_value, external, run.first_seen, run.last_seen, NULL::BIGINT AS deleted_at, ord, events.origin
FROM run JOIN events USING (ord) JOIN families USING (schema) WHERE full_row
"""

SEEN = f"""
SELECT bucket, coalesce(canonical_id, entity_id) AS canonical_id, events.id, entity_id, events.origin,
    run.first_seen, run.last_seen, NULL::BIGINT AS deleted_at, ord
FROM run JOIN events USING (ord) JOIN families USING (schema) WHERE NOT full_row {SORTED}
"""

DELETES = f"""
SELECT * FROM (
    SELECT stored.bucket, stored.canonical_id, id, stored.entity_id, origin, stored.first_seen, stored.last_seen,
        ?::BIGINT AS deleted_at, ended.ord
    FROM stored JOIN ended USING (id, origin) ANTI JOIN run USING (id, origin)
    UNION ALL
    -- A statement that moved is deleted under its former key.
    SELECT former_bucket, former_id, events.id, entity_id, events.origin, run.first_seen, run.last_seen, ?::BIGINT, ord
    FROM run JOIN events USING (ord) WHERE former_id IS NOT NULL
) {SORTED}
"""
