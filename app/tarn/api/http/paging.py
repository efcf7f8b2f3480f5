"""Lists: a page at a time, with a cursor that fits only the list it came from."""

import base64
import binascii
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import orjson
from fastapi import Depends, Query, Request
from pydantic import BaseModel

from tarn.errors import Fault, SchemaViolation

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """A part of a list; `next` is the cursor of the part after it, or null."""

    results: list[Item]
    next: str | None


@dataclass(frozen=True)
class Paging:
    """Where a page begins and how long it may be."""

    after: str | None
    limit: int
    _list: str

    @property
    def after_number(self) -> int | None:
        """Where a page of a list begins that is in the order of numbers."""
        if self.after is None:
            return None
        if not self.after.isdecimal() or len(self.after) > 18:
            raise foreign_cursor()
        return int(self.after)

    @property
    def fetch(self) -> int:
        """One more than fits, which tells whether there is a next page."""
        return self.limit + 1

    def cut(self, found: Sequence[Item], key: Callable[[Item], str]) -> tuple[list[Item], str | None]:
        """The page, and the cursor of the next one."""
        results = list(found[: self.limit])
        return results, self.cursor(key(results[-1]) if len(found) > self.limit else None)

    def cursor(self, position: str | None) -> str | None:
        """The cursor of what comes after a position, if there is one."""
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


def paging(request: Request, limit: int, cursor: str | None, asked: object = None) -> Paging:
    """A page of the list that this request asks for, with whatever its body says of it."""
    this = _fingerprint(request, asked)
    return Paging(None if cursor is None else _position(cursor, this), limit, this)


def _fingerprint(request: Request, asked: object) -> str:
    """Which list this is: the path, the filters, and whose it is."""
    filters = sorted((k, v) for k, v in request.query_params.multi_items() if k not in ("limit", "cursor"))
    what = orjson.dumps([request.url.path, filters, request.state.caller.identity.tenant, asked])
    return hashlib.sha256(what).hexdigest()[:16]


def _position(cursor: str, this: str) -> str:
    try:
        made_for, position = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error):
        made_for, position = None, None
    if made_for != this or not isinstance(position, str) or "\x00" in position:
        raise foreign_cursor()
    return position


def foreign_cursor() -> SchemaViolation:
    reason = "is not a cursor of this list"
    return SchemaViolation(f"the cursor {reason}", errors=[Fault(field="query.cursor", reason=reason)])
