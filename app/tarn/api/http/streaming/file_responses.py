"""Files of the lake, sent as they are: whole or a part of them, or not at all if the caller has them."""

import re
from dataclasses import replace
from email.utils import format_datetime, parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import quote

from fastapi import Request, Response
from starlette.responses import StreamingResponse

from tarn.api.http.limits.threads import iterate_in_threadpool, run_in_threadpool
from tarn.api.http.problems import Responses
from tarn.errors import RangeNotSatisfiable
from tarn.model.dataset import matches_none_match
from tarn.storage.store import Entry, Missing, Store

ONE_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})$", re.ASCII)
"""No file is larger, and Python refuses to read numbers of thousands of digits."""

UNSAFE = re.compile(r"[^A-Za-z0-9 !#$&+,.;=@^_{}~()\[\]-]")
"""What in a name could end its header, or be taken for something else by who reads it."""

OCTETS = "application/octet-stream"

SENT: Responses = {
    200: {
        "description": "The file",
        # Of the type that the file has; the first one is what generators of clients take it for.
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (OCTETS, "*/*")},
    },
    206: {"description": "The part of it that `Range` asks for"},
    304: {"description": "The caller has it already"},
}


class FileSlice(NamedTuple):
    """Bytes from `start` up to `end` of a file."""

    start: int
    end: int


async def file_response(
    store: Store, request: Request, path: str, media_type: str, name: str, tag: str | None = None
) -> Response:
    """Answer with a file, whose entity tag is the store's unless its content has a name. Raises Missing,
    RangeNotSatisfiable.

    A range is a hint by HTTP's rules: one that is not understood, or several, get the whole file. So does any range of
    a file without bytes: some clients ask for ranges only, and no range of it could be satisfied.
    """
    entry = await run_in_threadpool(store.head, path)
    if entry is None:
        raise Missing(path)
    if tag is not None:
        entry = replace(entry, etag=tag)
    headers = _headers(entry, name)
    if _is_unmodified(request, entry):
        return Response(status_code=304, headers=headers)
    part = _requested_range(request, entry)
    length = entry.size if part is None else part.end - part.start
    headers["Content-Length"] = str(length)
    if request.method == "HEAD":
        return Response(status_code=200 if part is None else 206, headers=headers, media_type=media_type)
    start, end = (0, None) if part is None else part
    opened, chunks = await run_in_threadpool(store.open, path, start, end)
    if tag is None and opened.etag != entry.etag:
        # Another one took its place meanwhile: all of that one, which is an answer to any question.
        opened, chunks = await run_in_threadpool(store.open, path)
        part, headers = None, _headers(opened, name) | {"Content-Length": str(opened.size)}
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{opened.size}"
    return StreamingResponse(iterate_in_threadpool(chunks), 200 if part is None else 206, headers, media_type)


def etag_of(entry: Entry) -> str:
    tag = entry.etag or f"{entry.size:x}-{entry.modified.timestamp():.6f}"
    return tag if tag.startswith('"') else f'"{tag}"'


def _headers(entry: Entry, name: str) -> dict[str, str]:
    return {
        "ETag": etag_of(entry),
        "Last-Modified": format_datetime(entry.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Disposition": _attachment(name),
        # What others have sent is never for a browser to make something of.
        "X-Content-Type-Options": "nosniff",
    }


def _attachment(name: str) -> str:
    """The header that names a file: in plain letters for those who know no others, and quoted for the rest."""
    plain = UNSAFE.sub("_", name)
    quoted = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{quoted}'


def _is_unmodified(request: Request, entry: Entry) -> bool:
    """Whether the caller has this state of the file. An entity tag says so more exactly than a moment."""
    if (named := request.headers.get("If-None-Match")) is not None:
        return matches_none_match(named, etag_of(entry))
    since = request.headers.get("If-Modified-Since")
    try:
        return since is not None and entry.modified.replace(microsecond=0) <= parsedate_to_datetime(since)
    except (ValueError, TypeError):
        return False


def _requested_range(request: Request, entry: Entry) -> FileSlice | None:
    """The part of the file that is asked for; None: all of it. Raises RangeNotSatisfiable."""
    found = ONE_RANGE.match(request.headers.get("Range", ""))
    of = request.headers.get("If-Range")
    if found is None or found.groups() == ("", "") or entry.size == 0 or (of is not None and of != etag_of(entry)):
        return None
    first, last = found.groups()
    if first == "":
        start, end = max(0, entry.size - int(last)), entry.size
    else:
        start, end = int(first), min(entry.size, int(last) + 1) if last else entry.size
        if last and int(last) < start:
            return None
    if start >= entry.size or start >= end:
        raise RangeNotSatisfiable(f"the file has {entry.size} bytes", size=entry.size)
    return FileSlice(start, end)
