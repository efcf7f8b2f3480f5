"""A body on its way from the event loop to the thread that stores it, a few blocks ahead and never more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from anyio import BrokenResourceError, CapacityLimiter, EndOfStream, create_memory_object_stream, from_thread, to_thread
from anyio.lowlevel import RunVar
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from tarn.api.http.limits.tenant_semaphore import FairSemaphore, fair_semaphore, limiter

BLOCK = 1 << 20
"""Bytes that pass from one to the other at once: what the network delivers is too little to be worth the way."""

AHEAD = 4
"""Blocks that may wait between the two."""

AT_ONCE = 32
"""Bodies that are stored at once, and files that are fetched; more wait for their turn."""

Found = TypeVar("Found")
Item = bytes | Exception


async def run_with_body(pieces: AsyncIterator[bytes], work: Callable[[Iterator[bytes]], Found]) -> Found:
    """Let a thread work on a body while it arrives. Whatever reading the body raises, the thread's iterator raises.

    The thread is not taken before the first block is there: a slow client of a small body keeps none waiting.
    """
    blocks = _blocks(pieces)
    first = await anext(blocks, b"")
    send, receive = create_memory_object_stream[Item](AHEAD)
    feeding = asyncio.create_task(_feed(blocks, send))
    try:
        async with fair_semaphore(_files, AT_ONCE).place():
            threads = limiter(_file_threads, AT_ONCE)
            return await to_thread.run_sync(lambda: work(_pulled(first, receive)), limiter=threads)
    finally:
        receive.close()
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding


async def run_fetch(work: Callable[[], Found]) -> Found:
    """Let a thread work on what comes from elsewhere, apart from those that store bodies: a source may be slow."""
    async with fair_semaphore(_fetches, AT_ONCE).place():
        return await to_thread.run_sync(work, limiter=limiter(_fetch_threads, AT_ONCE))


async def _blocks(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, joined to blocks."""
    gathered: list[bytes] = []
    size = 0
    async for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield b"".join(gathered)
            gathered, size = [], 0
    if size:
        yield b"".join(gathered)


async def _feed(blocks: AsyncIterator[bytes], send: MemoryObjectSendStream[Item]) -> None:
    async with send:
        with suppress(BrokenResourceError):  # the thread wants no more
            try:
                async for block in blocks:
                    await send.send(block)
            except BrokenResourceError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the body is read
                await send.send(error)


def _pulled(first: bytes, receive: MemoryObjectReceiveStream[Item]) -> Iterator[bytes]:
    """The blocks, for a thread that waits for each."""
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
