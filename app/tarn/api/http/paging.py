"""Cursor pagination. A cursor is valid only for the list (path, filters, tenant) that it came from."""

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import orjson
from fastapi import Depends, Query, Request
from pydantic import BaseModel

from tarn.errors import FieldError, SchemaViolation

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """One page of a list. `next` is the cursor of the next page, or null."""

    results: list[Item]
    next: str | None


@dataclass(frozen=True)
class Paging:
    """The start and the maximum length of a page."""

    after: str | None
    limit: int
    _list: str

    @property
    def after_number(self) -> int | None:
        """The start of a page in a list that is sorted by number. Raises SchemaViolation."""
        if self.after is None:
            return None
        if not self.after.isdecimal() or len(self.after) > 18:
            raise foreign_cursor()
        return int(self.after)

    @property
    def fetch(self) -> int:
        """The number of rows to fetch: one more than the page holds, to find out whether there is a next page."""
        return self.limit + 1

    def cut(self, rows: Sequence[Item], key: Callable[[Item], str]) -> tuple[list[Item], str | None]:
        """Return the rows of the page, and the cursor of the next page."""
        results = list(rows[: self.limit])
        return results, self.cursor(key(results[-1]) if len(rows) > self.limit else None)

    def cursor(self, position: str | None) -> str | None:
        """Return the cursor for the page after a position; None without a position."""
        if position is None:
            return None
        return base64.urlsafe_b64encode(orjson.dumps([self._list, position])).decode().rstrip("=")


async def _paging(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=10_000)] = None,
) -> Paging:
    return paging(request, limit, cursor)


PagingDep = Annotated[Paging, Depends(_paging)]


def paging(request: Request, limit: int, cursor: str | None, query: object = None) -> Paging:
    """Return the page that this request asks for. `query` is what in its body identifies the list."""
    this = _fingerprint(request, query)
    return Paging(None if cursor is None else _position(cursor, this), limit, this)


def _fingerprint(request: Request, query: object) -> str:
    """Return the hash that identifies a list: path, filters, tenant, and query body."""
    filters = sorted((k, v) for k, v in request.query_params.multi_items() if k not in ("limit", "cursor"))
    listed = orjson.dumps([request.url.path, filters, request.state.caller.identity.tenant, query])
    return hashlib.sha256(listed).hexdigest()[:16]


def _position(cursor: str, this: str) -> str:
    try:
        made_for, position = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error):
        made_for, position = None, None
    if made_for != this or not isinstance(position, str) or "\x00" in position:
        raise foreign_cursor()
    return position


def foreign_cursor() -> SchemaViolation:
    """Return the error for a cursor that is invalid or belongs to another list."""
    reason = "is not a cursor of this list"
    return SchemaViolation(f"the cursor {reason}", errors=[FieldError(field="query.cursor", reason=reason)])
