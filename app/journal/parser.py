"""The child process that parses bodies: `python -m app.journal.parser`, with a socket as its standard input.

It reads one body after the other, as `app.journal.parsing` asks it to, until its parent closes the socket. It keeps
what it has learned of schemata and values, and opens neither the database nor the lake.
"""

import gc
import signal
import socket
import sys
import traceback
from typing import Any

import pyarrow as pa

from app.errors import TarnError
from app.journal.events import Events
from app.journal.intake import Intake, Terms
from app.journal.parsing import Says, receive, send
from app.model.entity import Exploder, warm_up


class Dropped(Exception):
    """Nobody wants the rest of this body."""


class Fed:
    """The body, of which the parent gives a piece when it is asked."""

    def __init__(self, peer: socket.socket, first: memoryview) -> None:
        self._peer = peer
        self._rest = first
        self._over = not first

    def read(self, size: int, /) -> bytes:
        if not self._rest and not self._over:
            send(self._peer, Says.MORE)
            self._rest = heard(self._peer)
            self._over = not self._rest
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)


def heard(peer: socket.socket) -> memoryview:
    """The parent's next word: bytes, or leave to go on. Raises Dropped, and EOFError if it is gone."""
    answer = receive(peer)
    if answer.says is Says.DROP:
        raise Dropped
    return answer.data


def parse(peer: socket.socket, terms: Terms, first: memoryview, exploder: Exploder) -> None:
    """Read one body: chunk after chunk, the last one with all that is known of the body then."""
    intake = Intake(terms, exploder)
    for chunk in intake.chunks(Fed(peer, first)):
        send(peer, Says.CHUNK, _counted(chunk, intake, intake.over), _packed(chunk))
        if intake.over:
            return
        del chunk  # or it would be kept while the next one is gathered
        heard(peer)
    send(peer, Says.CHUNK, _counted(Events(), intake, over=True))


def _counted(chunk: Events, intake: Intake, over: bool) -> dict[str, Any]:
    counted = {"entities": chunk.entities, "statements": chunk.statements, "size": chunk.size, "over": over}
    if not over:
        return counted
    faults = [fault.model_dump() for fault in intake.rejected.faults]
    return counted | {"rejected": intake.rejected.count, "faults": faults}


def _packed(chunk: Events) -> pa.Buffer:
    rows = chunk.table(0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue()


def _said(error: TarnError) -> dict[str, Any]:
    """A problem as it is sent: its faults are all that is not plain already."""
    members = dict(error.members)
    if "errors" in members:
        members["errors"] = [fault.model_dump() for fault in members["errors"]]
    return {"slug": error.slug, "detail": error.detail, "members": members}


def main() -> None:
    # Ctrl-C reaches the whole group of processes; this one ends when its parent closes the socket, and not before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exploder = Exploder()
    warm_up(exploder)
    # As the API does: what is made here is dropped without cycles.
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    with socket.socket(fileno=sys.stdin.fileno()) as peer:
        send(peer, Says.READY)
        while True:
            try:
                asked = receive(peer)
                parse(peer, Terms(**asked.detail["terms"]), asked.data, exploder)
            except Dropped:
                continue
            except (EOFError, ConnectionError):
                return
            except TarnError as error:
                send(peer, Says.PROBLEM, _said(error))
            except Exception:  # noqa: BLE001 - its parent must hear of it
                send(peer, Says.FAILURE, {"trace": traceback.format_exc()})


if __name__ == "__main__":
    main()
