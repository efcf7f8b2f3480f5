"""Shards: a stable hash partition of entities, so that one task gets all statements of an entity."""

import zlib
from collections.abc import Iterable

ALL_SHARDS = (0, 0xFFFF)


def shard_of(entity_id: str) -> int:
    """Return the shard of an entity id: a 16-bit hash, stored with every event in the journal."""
    return zlib.crc32(entity_id.encode()) & 0xFFFF


def shards_of(entity_ids: Iterable[str]) -> list[int]:
    """Return the shards of many entity ids."""
    crc32 = zlib.crc32
    return [crc32(entity_id.encode()) & 0xFFFF for entity_id in entity_ids]
