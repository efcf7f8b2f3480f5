"""Fold of a slice of the journal that only adds statements to an empty dataset, as most first loads do.

This is an optimisation of `lake.live.sql`, which is correct for all cases and is used whenever this module cannot
decide. It halves the CPU time of such a flush task (decision 046). `tests/pipeline/test_fold.py` checks that both
write the same rows.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT

NEEDED = ("kind", "id", "entity_id", "schema", "prop", "value", "origin", "first_seen", "last_seen")

Numbers = npt.NDArray[np.int64]


def fold(events: pa.Table, buckets: dict[str, str], is_origin: Callable[[str], bool]) -> pa.Table | None:
    """Return the live rows after these events, sorted by bucket, key and id; None if the general fold is needed.

    Requires: only valid adds, of one origin, under their own entity's id, each entity in one bucket, and
    with one BASE statement or all in one commit.
    """
    if not _is_append_only(events, buckets, is_origin):
        return None
    entities = _codes(events.column("entity_id"))
    families = sorted(set(buckets.values()))
    schema = events.column("schema").combine_chunks().dictionary_encode()
    of_schema = np.array([families.index(buckets[name]) for name in schema.dictionary.to_pylist()], np.int64)
    bucket = of_schema[schema.indices.to_numpy()]
    if not _one_bucket_each(entities, bucket):
        return None
    ids = _bytes(events.column("id"))
    keys = _keys(bucket * (entities.max() + 1) + entities, ids)
    order = _sorted(keys, events.column("ord").to_numpy())
    is_first = np.append(True, np.diff(keys[order]) != 0)
    repeated = np.flatnonzero(~is_first)
    if not np.array_equal(ids[order[repeated]], ids[order[repeated - 1]]):
        return None
    begins = np.flatnonzero(is_first)
    newest = order[np.append(begins[1:], len(order)) - 1]
    ended = _ended_bases(newest, entities, events)
    if len(ended) and not _one_commit(events):
        return None
    remaining = np.delete(np.arange(len(newest)), ended)
    newest = newest[remaining]
    first = np.minimum.reduceat(events.column("first_seen").to_numpy()[order], begins)[remaining]
    last = np.maximum.reduceat(events.column("last_seen").to_numpy()[order], begins)[remaining]
    rows = events.take(pa.array(newest))
    names = pa.DictionaryArray.from_arrays(pa.array(bucket[newest], pa.int32()), pa.array(families))
    replaced = {
        "bucket": names.cast(pa.string()),
        "canonical_id": rows.column("entity_id"),
        "first_seen": pa.array(first),
        "last_seen": pa.array(last),
        "deleted_at": pa.nulls(len(rows), pa.int64()),
    }
    others = {name: rows.column(name) for name in rows.column_names if name not in replaced}
    return pa.table(others | replaced)


def _is_append_only(events: pa.Table, buckets: dict[str, str], is_origin: Callable[[str], bool]) -> bool:
    if "invalid_columns" in events.column_names or not len(events):
        return False
    if any(events.column(name).null_count for name in NEEDED):
        return False
    if events.column("canonical_id").null_count < len(events) or not pc.all(pc.equal(events.column("kind"), 1)).as_py():
        return False
    lengths = pc.min_max(pc.binary_length(events.column("id"))).as_py()
    moments = [pc.min_max(events.column(name)).as_py() for name in ("first_seen", "last_seen")]
    origins = pc.unique(events.column("origin")).to_pylist()
    return (
        lengths == {"min": 20, "max": 20}
        and all(bound["min"] >= FIRST_MOMENT and bound["max"] <= LAST_MOMENT for bound in moments)
        and len(origins) == 1
        and is_origin(origins[0])
        and buckets.keys() >= set(pc.unique(events.column("schema")).to_pylist())
    )


def _codes(column: pa.ChunkedArray) -> Numbers:
    """Return numbers that sort as the strings do, by their bytes."""
    encoded = column.combine_chunks().dictionary_encode()
    rank = np.empty(len(encoded.dictionary), np.int64)
    rank[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    codes: Numbers = rank[encoded.indices.to_numpy()]
    return codes


def _keys(entities: Numbers, ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return one number per statement that sorts by entity and id: as many bits of the id as fit."""
    width = max(1, int(entities.max()).bit_length())
    beginnings = np.ascontiguousarray(ids[:, :8]).view(">u8").ravel().astype(np.uint64)
    return (entities.astype(np.uint64) << np.uint64(64 - width)) | (beginnings >> np.uint64(width))


def _sorted(keys: npt.NDArray[np.uint64], ords: Numbers) -> Numbers:
    """Return the positions sorted by key; events of the same key stay in their order."""
    if np.all(ords[1:] > ords[:-1]):
        return np.argsort(keys, kind="stable")
    order: Numbers = np.lexsort((ords, keys))
    return order


def _bytes(ids: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    fixed = ids.combine_chunks().cast(pa.binary(20))
    raw: npt.NDArray[np.uint8] = np.frombuffer(fixed.buffers()[1], np.uint8)
    return raw[fixed.offset * 20 : (fixed.offset + len(fixed)) * 20].reshape(-1, 20)


def _one_bucket_each(entities: Numbers, bucket: Numbers) -> bool:
    of_entity = np.empty(entities.max() + 1, np.int64)
    of_entity[entities] = bucket
    return bool(np.all(of_entity[entities] == bucket))


def _ended_bases(newest: Numbers, entities: Numbers, events: pa.Table) -> Numbers:
    """Return the positions in `newest` of BASE statements that a later one of the same entity ends."""
    is_base = pc.equal(events.column("prop"), "id").to_numpy()[newest]
    positions = np.flatnonzero(is_base)
    entity, ord_ = entities[newest[positions]], events.column("ord").to_numpy()[newest[positions]]
    order = np.lexsort((ord_, entity))
    followed = np.zeros(len(positions), bool)
    followed[:-1] = entity[order][1:] == entity[order][:-1]
    ended: Numbers = positions[order][followed]
    return ended


def _one_commit(events: pa.Table) -> bool:
    commits = events.column("ord").to_numpy() >> 32
    return bool(commits.min() == commits.max())
