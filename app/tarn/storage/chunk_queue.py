"""Bounded queue of chunks between the thread that produces them and the one that uploads them."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event

AHEAD = 4
"""Maximum number of chunks in the queue."""


class SourceAborted(Exception):
    """The source failed: the upload must be aborted and not become an object."""


def pump(chunks: Iterable[bytes], send: Callable[[Iterator[bytes]], object]) -> int:
    """Read `chunks` in this thread while `send` consumes them in another; return the number of bytes.

    obstore reads an iterator inside its event loop, where any other obstore call panics, and a source may itself be
    such a call. If the source raises, `send` gets SourceAborted from its iterator, and the source's error is raised
    once `send` has returned; if `send` raises, the source is read no further.
    """
    queued: Queue[bytes | None] = Queue(AHEAD)
    is_aborted, ended = Event(), Event()

    def received() -> Iterator[bytes]:
        while (chunk := queued.get()) is not None:
            yield chunk
        if is_aborted.is_set():
            raise SourceAborted

    def sending() -> None:
        try:
            send(received())
        finally:
            ended.set()
            # The source may be blocked on a full queue; it checks `ended` before it puts another chunk.
            while not queued.empty():
                queued.get_nowait()

    size = 0
    with ThreadPoolExecutor(1, thread_name_prefix="put") as pool:
        sent = pool.submit(sending)
        try:
            for chunk in chunks:
                if ended.is_set():
                    break
                queued.put(chunk)
                size += len(chunk)
        except BaseException:
            is_aborted.set()
            raise
        finally:
            queued.put(None)
        sent.result()
    return size
