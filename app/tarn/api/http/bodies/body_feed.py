"""Bounded buffer that feeds a body from the event loop to the thread that stores it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from anyio import BrokenResourceError, CapacityLimiter, EndOfStream, create_memory_object_stream, from_thread, to_thread
from anyio.lowlevel import RunVar
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from tarn.api.http.limits.tenant_semaphore import FairSemaphore, fair_semaphore, limiter

BLOCK = 1 << 20
"""Bytes passed to the thread at once: network reads are too small to pass each one."""

AHEAD = 4
"""Blocks that the buffer holds."""

MAX_CONCURRENT = 32
"""Maximum number of bodies that are stored concurrently, and of files that are fetched; others wait for a slot."""

Result = TypeVar("Result")
Item = bytes | Exception


async def run_with_body(pieces: AsyncIterator[bytes], work: Callable[[Iterator[bytes]], Result]) -> Result:
    """Run work on a thread that reads a body while it arrives. Errors of reading the body are raised by the iterator.

    The thread is taken only once the first block is complete: a slow client with a small body occupies no thread.
    """
    blocks = _blocks(pieces)
    first = await anext(blocks, b"")
    send, receive = create_memory_object_stream[Item](AHEAD)
    feeding = asyncio.create_task(_feed(blocks, send))
    try:
        async with fair_semaphore(_files, MAX_CONCURRENT).slot():
            threads = limiter(_file_threads, MAX_CONCURRENT)
            return await to_thread.run_sync(lambda: work(_pulled(first, receive)), limiter=threads)
    finally:
        receive.close()
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding


async def run_fetch(work: Callable[[], Result]) -> Result:
    """Run a fetch from a remote source on a thread. Sources may be slow, so bodies are stored on other threads."""
    async with fair_semaphore(_fetches, MAX_CONCURRENT).slot():
        return await to_thread.run_sync(work, limiter=limiter(_fetch_threads, MAX_CONCURRENT))


async def _blocks(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join the pieces to blocks of at least `BLOCK` bytes."""
    buffer: list[bytes] = []
    size = 0
    async for piece in pieces:
        buffer.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield b"".join(buffer)
            buffer, size = [], 0
    if size:
        yield b"".join(buffer)


async def _feed(blocks: AsyncIterator[bytes], send: MemoryObjectSendStream[Item]) -> None:
    async with send:
        with suppress(BrokenResourceError):  # the thread has stopped reading
            try:
                async for block in blocks:
                    await send.send(block)
            except BrokenResourceError:
                raise
            except Exception as error:  # noqa: BLE001 - raised on the thread that reads the body
                await send.send(error)


def _pulled(first: bytes, receive: MemoryObjectReceiveStream[Item]) -> Iterator[bytes]:
    """Yield the blocks on the thread, which waits for each."""
    if first:
        yield first
    while True:
        try:
            item = from_thread.run(receive.receive)
        except EndOfStream:
            return
        if isinstance(item, Exception):
            raise item
        yield item


_files: RunVar[FairSemaphore] = RunVar("files")
_file_threads: RunVar[CapacityLimiter] = RunVar("file threads")
_fetches: RunVar[FairSemaphore] = RunVar("fetches")
_fetch_threads: RunVar[CapacityLimiter] = RunVar("fetch threads")
