"""Incremental statistics: count only the entities that a small change affected, before and after the change."""

# ruff: noqa: S608 - SQL is built from constants

from typing import NamedTuple

import duckdb

from tarn.model.ftm.statistics import Statistics
from tarn.query import live
from tarn.query.diff import SnapshotPair, select_candidates
from tarn.query.statistics import count_entities
from tarn.storage.store import Store

MAX_IDS = 2_000
"""Number of ids up to which changed entities are looked up individually; beyond it, everything is counted again."""

LONGEST_CHAIN = 10


class ChangedStatistics(NamedTuple):
    """The statistics of the changed entities in the former snapshot, and in the one that replaces it."""

    former: Statistics
    present: Statistics


def count_changed(duck: duckdb.DuckDBPyConnection, store: Store, pair: SnapshotPair) -> ChangedStatistics | None:
    """Count the entities that differ in each of two states. Return None if there are too many."""
    rows = duck.execute(
        f"SELECT DISTINCT entity_id FROM ({select_candidates(store, pair)}) LIMIT {MAX_IDS + 1}"
    ).fetchall()
    ids = {entity_id for (entity_id,) in rows}
    for _ in range(LONGEST_CHAIN):
        if len(ids) > MAX_IDS:
            return None
        if not ids:
            return ChangedStatistics(Statistics(), Statistics())
        for name, view in (("former_part", pair.former), ("present_part", pair.latter)):
            live.make_entities(duck, store, view, ids, name)
        # If entities were merged or split, include the entities they belong to on both sides, and search again.
        canonical = duck.execute("SELECT canonical_id FROM former_part UNION SELECT canonical_id FROM present_part")
        extended = ids | {name for (name,) in canonical.fetchall()}
        if extended == ids:
            return ChangedStatistics(count_entities(duck, "former_part"), count_entities(duck, "present_part"))
        ids = extended
    return None
