"""Fork server and parser child processes: `tarn.journal.parsing.parser_process MEMORY CPU`.

The fork server imports everything that parsing needs, then forks a child whenever its parent
(`tarn.journal.parsing.parser_pool`) requests one. It stays single-threaded except for an allocator's own thread. It
reaps a child only on request, so that no pid is reused before the parent knows the child's exit status.

A child parses one body after the other until its connection is closed, and keeps its caches of schemata and values
between bodies. Its memory and CPU time are limited; the CPU limit grows with the body. It opens neither the database
nor the lake.
"""

import ctypes
import gc
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from tarn.child_process import MessageConnection, connect_to_parent
from tarn.errors import TarnError
from tarn.journal.parsing.event_buffer import Events
from tarn.journal.parsing.event_chunks import BodyReader, ReadOptions
from tarn.journal.parsing.parser_pool import FORK, OUT_OF_MEMORY, MessageType, cpu_allowance, receive, send
from tarn.model.ftm.entity import Exploder, warm_up

PR_SET_PDEATHSIG = 1


class ParserLimits(NamedTuple):
    """Limits of a child: bytes of memory in addition to those at fork, and base CPU seconds per body."""

    memory: int
    cpu: int


class BodyCancelled(Exception):
    """The parent cancelled this body."""


class BodySource:
    """Body source that requests bytes from the parent and raises the CPU limit as they arrive."""

    def __init__(self, connection: MessageConnection, first: bytearray, cpu: int) -> None:
        self._connection = connection
        self._cpu = cpu
        self._rest = memoryview(first)
        self._over = not first
        self._used = _cpu_seconds()
        self._received = self._chunks = 0
        self._allow(len(first))

    def read(self, size: int, /) -> bytes:
        if not self._rest and not self._over:
            send(self._connection, MessageType.MORE)
            self._rest = receive_data(self._connection)
            self._over = not self._rest
            self._allow(len(self._rest))
        data, self._rest = self._rest[:size], self._rest[size:]
        return bytes(data)

    def await_go_on(self) -> None:
        """Wait until the parent has taken a chunk. Raises BodyCancelled if it cancelled the body."""
        receive_data(self._connection)
        self._chunks += 1
        self._allow(0)

    def _allow(self, size: int) -> None:
        """Raise the CPU limit for this many more bytes of the body; the kernel kills the process beyond it."""
        self._received += size
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(self._used) + 1 + cpu_allowance(self._cpu, self._received, self._chunks)
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def receive_data(connection: MessageConnection) -> memoryview:
    """Receive the parent's next message and return its data (empty for GO_ON).

    Raises BodyCancelled, and EOFError if the parent is gone.
    """
    message = receive(connection)
    if message.type is MessageType.DROP:
        raise BodyCancelled
    return memoryview(message.data)


def parse(connection: MessageConnection, options: ReadOptions, first: bytearray, exploder: Exploder, cpu: int) -> None:
    """Parse one body and send its chunks, the last one with the row count and the report."""
    reader, source = BodyReader(options, exploder), BodySource(connection, first, cpu)
    for chunk in reader.chunks(source):
        send(connection, MessageType.CHUNK, _counts(chunk, reader, reader.over), _arrow_stream(chunk))
        if reader.over:
            return
        del chunk  # release its memory before the next one is gathered
        source.await_go_on()
    send(connection, MessageType.CHUNK, _counts(Events(), reader, over=True))


def _counts(chunk: Events, reader: BodyReader, over: bool) -> dict[str, Any]:
    counts = {"entities": chunk.entities, "statements": chunk.statements, "size": chunk.size, "over": over}
    if not over:
        return counts
    return counts | {"rows": reader.rows, "report": reader.report.model_dump()}


def _arrow_stream(chunk: Events) -> pa.Buffer:
    rows = chunk.table(0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def _error_detail(error: TarnError) -> dict[str, Any]:
    """Return an error as JSON-compatible values; its faults are the only members that need conversion."""
    members = dict(error.members)
    if "errors" in members:
        members["errors"] = [fault.model_dump() for fault in members["errors"]]
    return {"slug": error.slug, "detail": error.detail, "members": members}


def serve(connection: MessageConnection, exploder: Exploder, limits: ParserLimits) -> None:
    """Parse bodies until the parent closes the connection or a body exceeds the memory limit."""
    while True:
        try:
            request = receive(connection)
            parse(connection, ReadOptions(**request.detail["options"]), request.data, exploder, limits.cpu)
        except BodyCancelled:
            pass
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except TarnError as error:
            send(connection, MessageType.PROBLEM, _error_detail(error))
        except Exception:  # noqa: BLE001 - reported to the parent
            send(connection, MessageType.FAILURE, {"trace": traceback.format_exc()})


def run_child(connection: MessageConnection, exploder: Exploder, limits: ParserLimits, server: int) -> NoReturn:
    """Run as a child: set limits, die with the fork server, and never return into the fork server's code."""
    try:
        with suppress(AttributeError):  # prctl exists on Linux only
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            _limit_memory(limits.memory)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            serve(connection, exploder, limits)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(0)


def _limit_memory(memory: int) -> None:
    """Limit this process's private memory to its current size plus `memory` bytes. Mapped files do not count."""
    with suppress(OSError):  # neither this file nor this limit exists outside Linux
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        limit = int(status["VmData"].split()[0]) * 1024 + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def listen(control: MessageConnection, exploder: Exploder, limits: ParserLimits) -> None:
    """Fork and reap children as the parent requests. Raises EOFError when the parent is gone."""
    children: set[int] = set()
    while True:
        (kind, pid), _ = control.receive()
        if kind == FORK:
            with control.receive_connection() as connection:
                server = os.getpid()
                pid = os.fork()
                if not pid:
                    control.close()
                    run_child(connection, exploder, limits, server)
            children.add(pid)
            control.send(pid)
        elif pid in children:
            children.discard(pid)
            # If the child has exited already, the signal does not change its exit status.
            os.kill(pid, signal.SIGKILL)
            _, status, used = os.wait4(pid, 0)
            control.send((status, used.ru_utime + used.ru_stime))


def main(limits: ParserLimits) -> None:
    control = connect_to_parent()
    exploder = Exploder()
    warm_up(exploder)
    # Same garbage collector settings as the API: parsing creates hardly any cycles. Frozen objects stay shared with
    # the children (no copy-on-write by the collector).
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    with control, suppress(EOFError, OSError):
        send(control, MessageType.READY)
        listen(control, exploder, limits)
    os._exit(0)  # the children are killed with it


if __name__ == "__main__":
    main(ParserLimits(*map(int, sys.argv[1:])))
