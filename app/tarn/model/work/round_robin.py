"""Round-robin scheduling among tenants, so that many items of one do not delay few of another."""

from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import TypeVar

Item = TypeVar("Item")


def round_robin(waiting: Iterable[tuple[str | None, Item]]) -> list[Item]:
    """Return waiting items, passed with their tenants and oldest first, in round-robin order: the first item of each
    tenant, then the second of each."""
    by_tenant: dict[str | None, list[tuple[Item]]] = {}
    for tenant, item in waiting:
        by_tenant.setdefault(tenant, []).append((item,))
    entries = chain.from_iterable(zip_longest(*by_tenant.values()))
    return [entry[0] for entry in entries if entry is not None]
