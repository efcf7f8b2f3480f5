"""The processes that parse bodies: `python -m tarn.journal.parser_process MEMORY CPU`, with a socket as its standard
input.

This process is a fork server: it imports all that parsing needs, and then forks a child whenever its parent
(`tarn.journal.parser_pool`) asks for one. It stays single-threaded but for an allocator's own thread, and reaps a child
only when it is asked to, so that the number of none is used again before its parent knows how it ended.

A child reads one body after the other until its socket is closed. It keeps what it has learned of schemata and values.
It has so many bytes of memory and seconds of CPU time, and more of those the larger the body is, and opens neither the
database nor the lake.
"""

import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from tarn.child_process import exactly
from tarn.errors import TarnError
from tarn.journal.event_buffer import Events
from tarn.journal.event_chunks import BodyReader, ReadOptions
from tarn.journal.parser_pool import FORK, OUT_OF_MEMORY, REPLY, REQUEST, MessageType, cpu_allowance, receive, send
from tarn.model.entity import Exploder, warm_up

PR_SET_PDEATHSIG = 1


class ParserLimits(NamedTuple):
    """What a child may take: bytes of memory beyond what it has when it is forked, and seconds for any body."""

    memory: int
    cpu: int


class Dropped(Exception):
    """Nobody wants the rest of this body."""


class BodySource:
    """The body, of which the parent gives a piece when it is asked."""

    def __init__(self, peer: socket.socket, first: memoryview, cpu: int) -> None:
        self._peer = peer
        self._cpu = cpu
        self._rest = first
        self._over = not first
        self._used = _cpu_seconds()
        self._received = self._chunks = 0
        self._allow(len(first))

    def read(self, size: int, /) -> bytes:
        if not self._rest and not self._over:
            send(self._peer, MessageType.MORE)
            self._rest = heard(self._peer)
            self._over = not self._rest
            self._allow(len(self._rest))
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)

    def goes_on(self) -> None:
        """Wait until the parent has a chunk."""
        heard(self._peer)
        self._chunks += 1
        self._allow(0)

    def _allow(self, size: int) -> None:
        """Allow the CPU time that so much more of the body may take; past it the kernel ends this process."""
        self._received += size
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = int(self._used) + 1 + cpu_allowance(self._cpu, self._received, self._chunks)
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def heard(peer: socket.socket) -> memoryview:
    """The parent's next word: bytes, or leave to go on. Raises Dropped, and EOFError if it is gone."""
    answer = receive(peer)
    if answer.says is MessageType.DROP:
        raise Dropped
    return answer.data


def parse(peer: socket.socket, terms: ReadOptions, first: memoryview, exploder: Exploder, cpu: int) -> None:
    """Read one body: chunk after chunk, the last one with all that is known of the body then."""
    intake, fed = BodyReader(terms, exploder), BodySource(peer, first, cpu)
    for chunk in intake.chunks(fed):
        send(peer, MessageType.CHUNK, _counts(chunk, intake, intake.over), _arrow_stream(chunk))
        if intake.over:
            return
        del chunk  # or it would be kept while the next one is gathered
        fed.goes_on()
    send(peer, MessageType.CHUNK, _counts(Events(), intake, over=True))


def _counts(chunk: Events, intake: BodyReader, over: bool) -> dict[str, Any]:
    counted = {"entities": chunk.entities, "statements": chunk.statements, "size": chunk.size, "over": over}
    if not over:
        return counted
    return counted | {"rows": intake.rows, "report": intake.report.model_dump()}


def _arrow_stream(chunk: Events) -> pa.Buffer:
    rows = chunk.table(0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def _error_detail(error: TarnError) -> dict[str, Any]:
    """A problem as it is sent: its faults are all that is not plain already."""
    members = dict(error.members)
    if "errors" in members:
        members["errors"] = [fault.model_dump() for fault in members["errors"]]
    return {"slug": error.slug, "detail": error.detail, "members": members}


def serve(peer: socket.socket, exploder: Exploder, limits: ParserLimits) -> None:
    """Read bodies until the parent closes the socket, or one takes more memory than there is."""
    while True:
        try:
            asked = receive(peer)
            parse(peer, ReadOptions(**asked.detail["terms"]), asked.data, exploder, limits.cpu)
        except Dropped:
            pass
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except TarnError as error:
            send(peer, MessageType.PROBLEM, _error_detail(error))
        except Exception:  # noqa: BLE001 - its parent must hear of it
            send(peer, MessageType.FAILURE, {"trace": traceback.format_exc()})


def run_child(peer: socket.socket, exploder: Exploder, limits: ParserLimits, server: int) -> NoReturn:
    """Be a child: limited, and ending with the fork server. Whatever happens, nothing of that one's is run."""
    try:
        with suppress(AttributeError):  # Linux has it
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            _limit_memory(limits.memory)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            serve(peer, exploder, limits)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(0)


def _limit_memory(memory: int) -> None:
    """Let this process have so much private memory more than it has now. Files that are mapped do not count."""
    with suppress(OSError):  # there is no such file on other systems than Linux, nor this limit
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        limit = int(status["VmData"].split()[0]) * 1024 + memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def listen(control: socket.socket, exploder: Exploder, limits: ParserLimits) -> None:
    """Fork and reap as the parent asks. Raises EOFError when it is gone."""
    children: set[int] = set()
    while True:
        begun, given, *_ = socket.recv_fds(control, 1, 1)
        if not begun:
            raise EOFError
        says, pid = REQUEST.unpack(begun + exactly(control, REQUEST.size - 1))
        if says == FORK:
            with socket.socket(fileno=given[0]) as peer:
                server = os.getpid()
                pid = os.fork()
                if not pid:
                    control.close()
                    run_child(peer, exploder, limits, server)
            children.add(pid)
            control.sendall(REPLY.pack(pid, 0, 0.0))
        elif pid in children:
            children.discard(pid)
            # Of one that has ended, the signal changes nothing: how it ended is settled.
            os.kill(pid, signal.SIGKILL)
            _, status, used = os.wait4(pid, 0)
            control.sendall(REPLY.pack(pid, status, used.ru_utime + used.ru_stime))


def main(limits: ParserLimits) -> None:
    # Ctrl-C reaches the whole group of processes; this one ends when its parent closes the socket, and not before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exploder = Exploder()
    warm_up(exploder)
    # As the API does: what is made here is dropped without cycles. What is frozen stays shared with the children.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    with socket.socket(fileno=sys.stdin.fileno()) as control, suppress(EOFError, OSError):
        send(control, MessageType.READY)
        listen(control, exploder, limits)
    os._exit(0)  # its children end with it


if __name__ == "__main__":
    main(ParserLimits(*map(int, sys.argv[1:])))
