"""Streams of records as NDJSON, whose last line is the server's status of the stream.

Lines that begin with `{"$` are control lines, not records: `$invalid` is an entity that is left out because its
statements do not assemble, `$error` the problem that ended the stream, and `$end` its last line if it is complete.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tarn_client.errors import IncompleteResponse, Problem

NDJSON = "application/x-ndjson"

CONTROL = b'{"$'
"""The first bytes of a control line. No record has them: their fields do not begin with $, and quotes are escaped."""


def record_blocks(
    chunks: Iterable[bytes],
    on_invalid: Callable[[dict[str, Any]], None] = lambda _: None,
    on_end: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Iterator[bytes]:
    """Yield blocks of complete lines, each a record.

    Raises the Problem that ended the stream, or IncompleteResponse if its last line is missing.

    `on_invalid` gets each entity that is left out, with its id, reason and schemata; `on_end` gets the last line.
    """
    for block in _complete_lines(chunks):
        if CONTROL not in block:
            yield block
            continue
        records: list[bytes] = []
        for line in block.splitlines(keepends=True):
            if not line.startswith(CONTROL):
                records.append(line)
                continue
            # Yield first: a reader that stops here gets only the invalid entities before this block.
            if records:
                yield b"".join(records)
                records = []
            ((control, value),) = json.loads(line).items()
            if control == "$end":
                on_end(value)
                return
            if control == "$error":
                raise Problem(value)
            if control == "$invalid":
                on_invalid(value)
        if records:
            yield b"".join(records)
    raise IncompleteResponse("the stream ended without its last line: the data received is incomplete")


def _complete_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, split after line ends. What follows the last line end is dropped."""
    pending: list[bytes] = []
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*pending, chunk[:end]])
            pending = []
        pending.append(chunk[end:])
