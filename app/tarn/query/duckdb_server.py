"""The process that answers queries: `python -m tarn.query.duckdb_server`, with a socket as its standard input.

It is DuckDB and nothing else: it opens neither the database nor the lake, but for the files that a query names. Each
session has a thread and a socket of its own, and does what `tarn.query.duckdb_process` asks for, one thing after the
other. It ends with its parent.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Thread
from typing import Any

import duckdb
import pyarrow as pa

from tarn.child_process import exactly
from tarn.memory import PeriodicTrim
from tarn.query.duckdb_process import INTERRUPT, SESSION, THREADS, WORD, receive, send

ANSWER_BYTES = 1 << 20
"""Bytes of rows after which an answer is sent; what was not asked for yet stays in DuckDB, which spills it."""


class SessionHandler:
    """A connection of DuckDB's, and what it was asked for last."""

    def __init__(self, duck: duckdb.DuckDBPyConnection) -> None:
        self._duck = duck
        self._batches: pa.RecordBatchReader | None = None
        self.found: bytes | pa.Buffer = b""
        """Bytes that go with the answer."""
        self.answers: dict[str, Callable[..., Any]] = {
            "execute": self._execute,
            "fetchmany": duck.fetchmany,
            "fetchone": duck.fetchone,
            "description": lambda: [column[:1] for column in duck.description or ()],
            "register": self._register,
            "list_filesystems": duck.list_filesystems,
            "register_filesystem": duck.register_filesystem,
            "begin": self._begin,
            "more": self._more,
            "end": self._end,
        }

    def _execute(self, query: str, parameters: Any) -> None:
        self._duck.execute(query) if parameters is None else self._duck.execute(query, parameters)

    def _register(self, name: str, file: str) -> None:
        self._duck.register(name, pa.ipc.open_file(pa.memory_map(file)).read_all())

    def _begin(self, rows: int) -> None:
        self._batches = self._duck.to_arrow_reader(rows)

    def _more(self) -> None:
        """The next rows, as a stream of Arrow's; nothing if there are none."""
        assert self._batches is not None
        sink, any_yet = pa.BufferOutputStream(), False
        with pa.ipc.new_stream(sink, self._batches.schema) as stream:
            for batch in self._batches:
                stream.write_batch(batch)
                any_yet = True
                if sink.tell() >= ANSWER_BYTES:
                    break
        self.found = sink.getvalue() if any_yet else b""

    def _end(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def close(self) -> None:
        """Let go of what it holds: rows that nobody took are memory that the next query needs."""
        self._end()
        self.answers.clear()


def serve(peer: socket.socket, duck: duckdb.DuckDBPyConnection) -> None:
    """Do what one session asks for, until it is closed."""
    with peer, duck, closing(SessionHandler(duck)) as session, suppress(EOFError, OSError):
        while True:
            (asked, *given), _ = receive(peer)
            try:
                answer = True, session.answers[asked](*given)
            except Exception as error:  # noqa: BLE001 - its parent must hear of it
                answer = False, (type(error).__name__, str(error))
            send(peer, answer, session.found)
            session.found = b""


def main() -> None:
    # Ctrl-C reaches the whole group of processes; this one ends when its parent closes the socket, and not before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with PeriodicTrim(), suppress(EOFError, OSError):
        listen(socket.socket(fileno=sys.stdin.fileno()))
    # Whatever is running, nobody waits for it any more.
    os._exit(0)


def listen(control: socket.socket) -> None:
    """Begin sessions, and do what is said beside them. Raises EOFError when the parent is gone."""
    root = duckdb.connect(config=receive(control)[0])
    send(control, None)
    sessions: dict[int, duckdb.DuckDBPyConnection] = {}
    while True:
        begun, given, *_ = socket.recv_fds(control, 1, 1)
        if not begun:
            raise EOFError
        says, number = WORD.unpack(begun + exactly(control, WORD.size - 1))
        if says == SESSION:
            sessions[number] = root.cursor()
            peer = socket.socket(fileno=given[0])
            Thread(target=_serve_session, args=(peer, sessions, number), daemon=True).start()
        elif says == THREADS:
            root.execute(f"SET GLOBAL threads = {number}")
        elif says == INTERRUPT:
            with suppress(KeyError, duckdb.ConnectionException):  # it is over already
                sessions[number].interrupt()


def _serve_session(peer: socket.socket, sessions: dict[int, duckdb.DuckDBPyConnection], number: int) -> None:
    serve(peer, sessions[number])
    del sessions[number]


if __name__ == "__main__":
    main()
