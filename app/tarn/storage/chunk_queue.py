"""Chunks handed from the thread that makes them to one that sends them."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event

AHEAD = 4
"""Chunks that wait between the two at most."""


class Abandoned(Exception):
    """The source failed: what was sent so far must not become an object."""


def pump(chunks: Iterable[bytes], send: Callable[[Iterator[bytes]], object]) -> int:
    """Read `chunks` here while `send` consumes them in a thread of its own; return how many bytes passed.

    obstore reads an iterator from inside its event loop, where any other call of obstore panics; a source may well
    be such a call. If the source raises, `send` gets Abandoned from its iterator, and the source's error is raised
    when it is done; if `send` raises, the source is read no further.
    """
    handed: Queue[bytes | None] = Queue(AHEAD)
    abandoned, ended = Event(), Event()

    def received() -> Iterator[bytes]:
        while (chunk := handed.get()) is not None:
            yield chunk
        if abandoned.is_set():
            raise Abandoned

    def sending() -> None:
        try:
            send(received())
        finally:
            ended.set()
            # The source may be waiting for room; it looks at `ended` before it hands over another chunk.
            while not handed.empty():
                handed.get_nowait()

    size = 0
    with ThreadPoolExecutor(1, thread_name_prefix="put") as pool:
        sent = pool.submit(sending)
        try:
            for chunk in chunks:
                if ended.is_set():
                    break
                handed.put(chunk)
                size += len(chunk)
        except BaseException:
            abandoned.set()
            raise
        finally:
            handed.put(None)
        sent.result()
    return size
