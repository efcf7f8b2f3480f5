"""File responses: range requests, conditional requests and download headers."""

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
from tarn.model.entity_tags import matches_none_match
from tarn.storage.store import Entry, ObjectMissing, Store

ONE_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})$", re.ASCII)
"""At most 18 digits: no file is larger, and Python refuses to parse numbers of thousands of digits."""

UNSAFE = re.compile(r"[^A-Za-z0-9 !#$&+,.;=@^_{}~()\[\]-]")
"""Characters of a file name that could end its header or be misread by a client."""

OCTETS = "application/octet-stream"

SENT: Responses = {
    200: {
        "description": "The file",
        # The media type is the file's; client generators use the first one.
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (OCTETS, "*/*")},
    },
    206: {"description": "The part of the file that `Range` asks for"},
    304: {"description": "Not modified: the caller has this version"},
}


class FileSlice(NamedTuple):
    """Bytes from `start` up to `end` of a file."""

    start: int
    end: int


async def file_response(
    store: Store, request: Request, path: str, media_type: str, name: str, tag: str | None = None
) -> Response:
    """Respond with a file. Its entity tag is `tag`, or else the store's. Raises ObjectMissing, RangeNotSatisfiable.

    HTTP allows to ignore a range: an invalid range, or several, get the whole file. So does any range of an empty file:
    some clients always ask for a range, and an empty file has none that could be satisfied.
    """
    entry = await run_in_threadpool(store.head, path)
    if entry is None:
        raise ObjectMissing(path)
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
        # The file was replaced since `head`: send all of the new one, which is a valid response to any range.
        opened, chunks = await run_in_threadpool(store.open, path)
        part, headers = None, _headers(opened, name) | {"Content-Length": str(opened.size)}
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{opened.size}"
    return StreamingResponse(iterate_in_threadpool(chunks), 200 if part is None else 206, headers, media_type)


def etag_of(entry: Entry) -> str:
    """Return the quoted entity tag of a file: the store's, or one of size and modification time."""
    tag = entry.etag or f"{entry.size:x}-{entry.modified.timestamp():.6f}"
    return tag if tag.startswith('"') else f'"{tag}"'


def _headers(entry: Entry, name: str) -> dict[str, str]:
    return {
        "ETag": etag_of(entry),
        "Last-Modified": format_datetime(entry.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Disposition": _attachment(name),
        # Browsers must not guess the type of uploaded files.
        "X-Content-Type-Options": "nosniff",
    }


def _attachment(name: str) -> str:
    """Return the `Content-Disposition` header: an ASCII name for old clients, and a percent-encoded one for others."""
    plain = UNSAFE.sub("_", name)
    quoted = "" if plain == name else f"; filename*=UTF-8''{quote(name, safe='')}"
    return f'attachment; filename="{plain}"{quoted}'


def _is_unmodified(request: Request, entry: Entry) -> bool:
    """Return whether the caller has this version of the file. `If-None-Match` takes precedence: it is more exact."""
    if (named := request.headers.get("If-None-Match")) is not None:
        return matches_none_match(named, etag_of(entry))
    since = request.headers.get("If-Modified-Since")
    try:
        return since is not None and entry.modified.replace(microsecond=0) <= parsedate_to_datetime(since)
    except (ValueError, TypeError):
        return False


def _requested_range(request: Request, entry: Entry) -> FileSlice | None:
    """Return the part of the file that `Range` asks for, or None for all of it. Raises RangeNotSatisfiable."""
    match = ONE_RANGE.match(request.headers.get("Range", ""))
    if_range = request.headers.get("If-Range")
    if (
        match is None
        or match.groups() == ("", "")
        or entry.size == 0
        or (if_range is not None and if_range != etag_of(entry))
    ):
        return None
    first, last = match.groups()
    if first == "":
        start, end = max(0, entry.size - int(last)), entry.size
    else:
        start, end = int(first), min(entry.size, int(last) + 1) if last else entry.size
        if last and int(last) < start:
            return None
    if start >= entry.size or start >= end:
        raise RangeNotSatisfiable(f"the range is outside of the file, which has {entry.size} bytes", size=entry.size)
    return FileSlice(start, end)
