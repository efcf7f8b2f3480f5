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

from app.errors import Fault, SchemaViolation

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
    def fetch(self) -> int:
        """One more than fits, which tells whether there is a next page."""
        return self.limit + 1

    def cut(self, found: Sequence[Item], key: Callable[[Item], str]) -> tuple[list[Item], str | None]:
        """The page, and the cursor of the next one."""
        results = list(found[: self.limit])
        if len(found) <= self.limit:
            return results, None
        position = orjson.dumps([self._list, key(results[-1])])
        return results, base64.urlsafe_b64encode(position).decode().rstrip("=")


async def _paging(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=2000)] = None,
) -> Paging:
    this = _fingerprint(request)
    return Paging(None if cursor is None else _position(cursor, this), limit, this)


PagingDep = Annotated[Paging, Depends(_paging)]


def _fingerprint(request: Request) -> str:
    """Which list this is: the path, the filters, and whose it is."""
    filters = sorted((k, v) for k, v in request.query_params.multi_items() if k not in ("limit", "cursor"))
    what = orjson.dumps([request.url.path, filters, request.state.caller.identity.tenant])
    return hashlib.sha256(what).hexdigest()[:16]


def _position(cursor: str, this: str) -> str:
    try:
        made_for, position = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, binascii.Error):
        made_for, position = None, None
    if made_for != this or not isinstance(position, str) or "\x00" in position:
        reason = "is not a cursor of this list"
        raise SchemaViolation(f"the cursor {reason}", errors=[Fault(field="query.cursor", reason=reason)])
    return position
