"""Streams of events (server-sent events) of a dataset or a job."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tarn_client.connection import Connection, Params

EVENT_STREAM = "text/event-stream"

RECONNECT_SECONDS = 2.0
"""Wait before reconnecting to a stream that the server ended."""


def follow(
    connection: "Connection",
    path: str,
    since: int | None = None,
    params: "Params | None" = None,
    *,
    finished: Callable[[], bool] = lambda: False,
    timeout: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream after the event `since`, or from now on.

    Reconnects whenever the server ends the stream, until `finished()` is true.
    """
    while True:
        with connection.stream(path, EVENT_STREAM, {**(params or {}), "since": since}, timeout=timeout) as response:
            for event in parse_events(response.iter_bytes()):
                yield event
                since = event["id"]
        if finished():
            return
        time.sleep(RECONNECT_SECONDS)


def parse_events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each event. Skips comments and an incomplete last line."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
