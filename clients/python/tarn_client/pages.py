"""Lists, a page at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

from tarn_client.connection import Connection, Params

LARGEST = 1000


def pages(
    connection: Connection,
    path: str,
    params: Params | None = None,
    query: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The pages of a list, or of what a query finds, up to so many records."""
    cursor, left = None, limit
    while left is None or left > 0:
        window = {"limit": LARGEST if left is None else min(LARGEST, left), "cursor": cursor}
        if query is None:
            page = connection.read(path, {**(params or {}), **window})
        else:
            page = connection.read(path, params, {**query, **window})
        yield page
        cursor, left = page["next"], None if left is None else left - len(page["results"])
        if cursor is None:
            return
