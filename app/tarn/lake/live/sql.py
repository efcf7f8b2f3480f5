"""The fold, set by set: what `tarn.lake.live.reference` says one event at a time.

Tables that it works on, all of one task and so of entities that no other task has:

    events    the slice of the journal, `adds` those of them that add
    families  schemata with their buckets
    stored    what is live in the store of the entities concerned, before
    known     identities that an erase or a newer BASE statement may end
    endings   what ends an identity, by commit
    dead      identities that were gone at the end of some commit, and what ended them last
    run       what is live after, by the adds since then
"""

# ruff: noqa: S608 - put together from constants of this module

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
        last_seen BIGINT, poison VARCHAR
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
        poison IS NOT NULL OR kind IS NULL OR kind NOT IN (1, 2, 3)
        OR (kind <> 3 AND (id IS NULL OR octet_length(id) <> 20 OR entity_id IS NULL OR origin IS NULL))
        OR (kind = 1 AND (schema IS NULL OR prop IS NULL OR value IS NULL OR first_seen IS NULL OR last_seen IS NULL
            OR first_seen NOT BETWEEN $first AND $last OR last_seen NOT BETWEEN $first AND $last))
    ), false)
FROM events
"""
"""What a slice is like, and whether anything in it may have to be set aside."""

FAULTS = """
SELECT ord, CASE
    WHEN poison IS NOT NULL THEN poison || ': cannot be read'
    WHEN kind IS NULL OR kind NOT IN (1, 2, 3) THEN 'is of an unknown kind'
    WHEN kind <> 3 AND (id IS NULL OR octet_length(id) <> 20) THEN 'id: is not a SHA-1'
    WHEN kind <> 3 AND entity_id IS NULL THEN 'entity_id: is missing'
    WHEN kind = 2 AND origin IS NULL THEN 'origin: is missing'
    WHEN kind = 1 AND (origin IS NULL OR list_contains($bad, origin)) THEN 'origin: is no origin'
    WHEN kind = 1 AND (schema IS NULL OR list_contains($unknown, schema)) THEN 'schema: is not known'
    WHEN kind = 1 AND prop IS NULL THEN 'prop: is missing'
    WHEN kind = 1 AND value IS NULL THEN 'value: is missing'
    WHEN kind = 1 AND (first_seen IS NULL OR first_seen NOT BETWEEN $first AND $last) THEN 'first_seen: is no moment'
    WHEN kind = 1 AND (last_seen IS NULL OR last_seen NOT BETWEEN $first AND $last) THEN 'last_seen: is no moment'
END AS reason FROM events WHERE reason IS NOT NULL ORDER BY ord
"""

NO_MARKS = (
    "SELECT NULL::BLOB AS id, NULL::VARCHAR AS origin, NULL::VARCHAR AS kind, NULL::TIMESTAMPTZ AS first_seen, "
    "NULL::TIMESTAMPTZ AS last_seen, NULL::BIGINT AS ord WHERE false"
)

STORED = """
WITH rows AS {materialized} ({rows}),
newest AS (SELECT id, origin, max(ord) AS ord FROM rows GROUP BY ALL),
marks AS MATERIALIZED (SELECT id, origin, kind, first_seen, last_seen, ord FROM ({marks})),
after AS (
    SELECT id, origin, bool_or(marks.kind = 'delete') AS ended,
        min(marks.first_seen) AS first_seen, max(marks.last_seen) AS last_seen
    FROM newest JOIN marks USING (id, origin) WHERE marks.ord > newest.ord GROUP BY ALL
)
SELECT rows.* REPLACE (
    least(rows.first_seen, after.first_seen) AS first_seen, greatest(rows.last_seen, after.last_seen) AS last_seen
)
FROM rows JOIN newest USING (id, origin, ord) LEFT JOIN after USING (id, origin)
WHERE after.ended IS NOT TRUE
"""
"""The newest row of an identity, unless something later deletes it; seen over all that came since that row."""

STORED_ONCE = """
WITH rows AS ({rows}),
marks AS MATERIALIZED (SELECT id, origin, kind, first_seen, last_seen, ord FROM ({marks})),
after AS (
    SELECT id, origin, bool_or(marks.kind = 'delete') AS ended,
        min(marks.first_seen) AS first_seen, max(marks.last_seen) AS last_seen
    FROM rows JOIN marks USING (id, origin) WHERE marks.ord > rows.ord GROUP BY ALL
)
SELECT rows.* REPLACE (
    least(rows.first_seen, after.first_seen) AS first_seen, greatest(rows.last_seen, after.last_seen) AS last_seen
)
FROM rows LEFT JOIN after USING (id, origin)
WHERE after.ended IS NOT TRUE
"""
"""The same, where every identity has one row: there is no newest one to be found."""

STORED_WHOLE = """
WITH marks AS MATERIALIZED (SELECT id, origin, kind, first_seen, last_seen, ord FROM ({marks})),
newest AS MATERIALIZED (
    SELECT id, origin, max(ord) AS ord
    FROM ({identities}) LEFT JOIN (SELECT DISTINCT id, origin, true AS marked FROM marks) USING (id, origin)
    GROUP BY id, origin HAVING count(*) > 1 OR bool_or(marked)
),
verdict AS MATERIALIZED (
    SELECT newest.id, newest.origin, newest.ord, bool_or(marks.kind = 'delete') AS ended,
        min(marks.first_seen) AS first_seen, max(marks.last_seen) AS last_seen
    FROM newest LEFT JOIN marks ON (marks.id, marks.origin) = (newest.id, newest.origin) AND marks.ord > newest.ord
    GROUP BY ALL
)
SELECT rows.* REPLACE (
    least(rows.first_seen, verdict.first_seen) AS first_seen, greatest(rows.last_seen, verdict.last_seen) AS last_seen
)
FROM ({rows}) AS rows LEFT JOIN verdict USING (id, origin)
WHERE verdict.ord IS NULL OR (verdict.ord = rows.ord AND verdict.ended IS NOT TRUE)
"""
"""The same of a whole store: most identities have one row and no mark, and those rows only pass by."""

LIVE = f"""
INSERT INTO stored
SELECT id, origin, entity_id, canonical_id, bucket, schema, prop, original_value,
    epoch_us(first_seen), epoch_us(last_seen)
FROM ({STORED.replace("{materialized}", "MATERIALIZED")})
"""

ENDINGS = (
    # Whatever an erase or a newer BASE statement may end: what is said here, and what is live in the store.
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
    # An ending counts if the commit it is in does not say the statement again: readers never see it gone otherwise.
    """
    CREATE OR REPLACE TEMP TABLE dead AS
    SELECT id, origin, max(endings.ord) AS ord
    FROM endings LEFT JOIN (
        SELECT id, origin, commit, max(ord) AS ord FROM adds SEMI JOIN endings USING (id, origin) GROUP BY ALL
    ) said USING (id, origin, commit)
    WHERE said.ord IS NULL OR said.ord < endings.ord
    GROUP BY id, origin
    """,
)

LATEST = """
SELECT id, origin, max(adds.ord) AS ord, min(first_seen) AS first_seen, max(last_seen) AS last_seen,
    any_value(dead.ord) IS NOT NULL AS was_dead
FROM adds LEFT JOIN dead USING (id, origin) WHERE dead.ord IS NULL OR adds.ord > dead.ord
GROUP BY id, origin
"""

AFTER = f"""
WITH latest AS ({LATEST})
SELECT adds.canonical_id, adds.entity_id, adds.id, adds.schema, adds.prop, adds.value, adds.lang, adds.original_value,
    adds.external, adds.origin,
    CASE WHEN was_dead THEN latest.first_seen ELSE least(latest.first_seen, stored.first_seen) END AS first_seen,
    CASE WHEN was_dead THEN latest.last_seen ELSE greatest(latest.last_seen, stored.last_seen) END AS last_seen
FROM latest JOIN adds USING (ord)
LEFT JOIN stored ON stored.id = latest.id AND stored.origin = latest.origin
UNION ALL
SELECT canonical_id, entity_id, id, schema, prop, value, lang, original_value, external, origin, first_seen, last_seen
FROM stored ANTI JOIN dead USING (id, origin) ANTI JOIN latest USING (id, origin)
"""
"""What is live after, for readers: what a flush of these events would leave, were it to happen now."""

FIRST_RUN = f"""
CREATE OR REPLACE TEMP TABLE run AS
SELECT latest.* EXCLUDE (was_dead), true AS is_new, true AS full_row,
    NULL::VARCHAR AS former_id, NULL::VARCHAR AS former_bucket
FROM ({LATEST}) AS latest
"""
"""What is live after, where nothing was before."""

RUN = f"""
CREATE OR REPLACE TEMP TABLE run AS
SELECT latest.id, latest.origin, latest.ord,
    stored.id IS NOT NULL AND (stored.canonical_id <> adds.canonical_id OR stored.bucket <> families.bucket) AS moved,
    CASE WHEN was_dead THEN latest.first_seen ELSE least(latest.first_seen, stored.first_seen) END AS first_seen,
    CASE WHEN was_dead THEN latest.last_seen ELSE greatest(latest.last_seen, stored.last_seen) END AS last_seen,
    stored.id IS NULL AS is_new,
    stored.id IS NULL OR was_dead OR moved OR stored.schema <> adds.schema
        OR stored.original_value IS DISTINCT FROM adds.original_value AS full_row,
    CASE WHEN moved THEN stored.canonical_id END AS former_id,
    CASE WHEN moved THEN stored.bucket END AS former_bucket
FROM ({LATEST}) AS latest JOIN adds USING (ord) JOIN families USING (schema)
LEFT JOIN stored ON stored.id = latest.id AND stored.origin = latest.origin
"""
"""What is live after. A full row is written where anything but first and last seen differs from the stored one."""

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
        ?::BIGINT AS deleted_at, dead.ord
    FROM stored JOIN dead USING (id, origin) ANTI JOIN run USING (id, origin)
    UNION ALL
    -- Under its former key a statement that moved is no more.
    SELECT former_bucket, former_id, events.id, entity_id, events.origin, run.first_seen, run.last_seen, ?::BIGINT, ord
    FROM run JOIN events USING (ord) WHERE former_id IS NOT NULL
) {SORTED}
"""
