"""Rotation: whose turn it is among tenants, so that many of one do not keep few of another waiting."""

from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import TypeVar

Item = TypeVar("Item")


def round_robin(waiting: Iterable[tuple[str | None, Item]]) -> list[Item]:
    """What waits, each with its tenant and oldest first: of each tenant its first one, then of each its second."""
    by_tenant: dict[str | None, list[tuple[Item]]] = {}
    for tenant, item in waiting:
        by_tenant.setdefault(tenant, []).append((item,))
    turns = chain.from_iterable(zip_longest(*by_tenant.values()))
    return [turn[0] for turn in turns if turn is not None]
