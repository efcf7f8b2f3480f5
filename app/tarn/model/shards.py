"""Shards: a stable division of entities, so that all that is said of one meets in one task."""

import zlib
from collections.abc import Iterable

ALL_SHARDS = (0, 0xFFFF)


def shard_of(entity_id: str) -> int:
    """A 16-bit hash of the entity id, kept with every event in the journal."""
    return zlib.crc32(entity_id.encode()) & 0xFFFF


def shards_of(entity_ids: Iterable[str]) -> list[int]:
    """The same of many."""
    crc32 = zlib.crc32
    return [crc32(entity_id.encode()) & 0xFFFF for entity_id in entity_ids]
