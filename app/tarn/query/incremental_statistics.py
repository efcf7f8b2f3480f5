"""What a small change did to statistics: the entities that it touched, counted as they were and as they are."""

# ruff: noqa: S608 - put together from constants of ours

from typing import NamedTuple

import duckdb

from tarn.model.statistics import Statistics
from tarn.query import live
from tarn.query.diff import Between, select_candidates
from tarn.query.statistics import count_entities
from tarn.storage.store import Store

MAX_IDS = 2_000
"""Ids that are looked up one by one; of more, everything is counted."""

LONGEST_CHAIN = 10


class ChangedStatistics(NamedTuple):
    """A part of the statistics of one snapshot, and the one that took its place in another's."""

    former: Statistics
    present: Statistics


def count_changed(duck: duckdb.DuckDBPyConnection, store: Store, states: Between) -> ChangedStatistics | None:
    """What the entities that differ count for in each of two states; None: they are too many."""
    found = duck.execute(
        f"SELECT DISTINCT entity_id FROM ({select_candidates(store, states)}) LIMIT {MAX_IDS + 1}"
    ).fetchall()
    ids = {entity_id for (entity_id,) in found}
    for _ in range(LONGEST_CHAIN):
        if len(ids) > MAX_IDS:
            return None
        if not ids:
            return ChangedStatistics(Statistics(), Statistics())
        for name, view in (("former_part", states.former), ("present_part", states.latter)):
            live.make_entities(duck, store, view, ids, name)
        # Where entities were merged or divided, what they are part of counts on both sides.
        canonical = duck.execute("SELECT canonical_id FROM former_part UNION SELECT canonical_id FROM present_part")
        wider = ids | {name for (name,) in canonical.fetchall()}
        if wider == ids:
            return ChangedStatistics(count_entities(duck, "former_part"), count_entities(duck, "present_part"))
        ids = wider
    return None
