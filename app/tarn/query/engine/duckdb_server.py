"""The DuckDB child process: `tarn.query.engine.duckdb_process` starts it and has the connection to it.

It runs DuckDB and nothing else: it does not open the database, and of the lake only the files that a query names. Each
session has a thread and a connection of its own, and serves the requests of its client one after the other. The process
ends with its parent.
"""

import os
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Thread
from typing import Any

import duckdb
import pyarrow as pa

from tarn.child_process import PICKLE, MessageConnection, connect_to_parent
from tarn.memory import PeriodicTrim
from tarn.query.engine.duckdb_process import INTERRUPT, SESSION, THREADS

ANSWER_BYTES = 1 << 20
"""Bytes of rows after which an answer is sent; rows not requested yet stay in DuckDB, which spills them."""


class SessionHandler:
    """A DuckDB connection with the state of its current query."""

    def __init__(self, duck: duckdb.DuckDBPyConnection) -> None:
        self._duck = duck
        self._batches: pa.RecordBatchReader | None = None
        self.data: bytes | pa.Buffer = b""
        """Raw bytes to send with the next answer."""
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
        """Set `data` to the next rows as an Arrow stream, or to no bytes if there are none."""
        assert self._batches is not None
        sink, has_rows = pa.BufferOutputStream(), False
        with pa.ipc.new_stream(sink, self._batches.schema) as stream:
            for batch in self._batches:
                stream.write_batch(batch)
                has_rows = True
                if sink.tell() >= ANSWER_BYTES:
                    break
        self.data = sink.getvalue() if has_rows else b""

    def _end(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def close(self) -> None:
        """Release unread rows: the next query needs their memory."""
        self._end()
        self.answers.clear()


def serve(connection: MessageConnection, duck: duckdb.DuckDBPyConnection) -> None:
    """Serve the requests of one session until it is closed."""
    with connection, duck, closing(SessionHandler(duck)) as session, suppress(EOFError, OSError):
        while True:
            (method, *arguments), _ = connection.receive()
            try:
                answer = True, session.answers[method](*arguments)
            except Exception as error:  # noqa: BLE001 - every error is passed to the parent
                answer = False, (type(error).__name__, str(error))
            connection.send(answer, session.data)
            session.data = b""


def main() -> None:
    with PeriodicTrim(), suppress(EOFError, OSError):
        listen(connect_to_parent(PICKLE))
    # Do not wait for running queries: their results are not needed.
    os._exit(0)


def listen(control: MessageConnection) -> None:
    """Handle the control messages: start sessions, interrupt queries, set the number of threads.

    Raises EOFError when the parent has closed the connection.
    """
    root = duckdb.connect(config=control.receive()[0])
    control.send(None)
    sessions: dict[int, duckdb.DuckDBPyConnection] = {}
    while True:
        (kind, number), _ = control.receive()
        if kind == SESSION:
            connection = control.receive_connection()
            sessions[number] = root.cursor()
            Thread(target=_serve_session, args=(connection, sessions, number), daemon=True).start()
        elif kind == THREADS:
            root.execute(f"SET GLOBAL threads = {number}")
        elif kind == INTERRUPT:
            with suppress(KeyError, duckdb.ConnectionException):  # the session has ended already
                sessions[number].interrupt()


def _serve_session(connection: MessageConnection, sessions: dict[int, duckdb.DuckDBPyConnection], number: int) -> None:
    serve(connection, sessions[number])
    del sessions[number]


if __name__ == "__main__":
    main()
