"""Output of streams: records as they arrive, to standard output or a file, which appears when it is complete."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple

from tarn_client.ndjson import NDJSON, record_blocks

from tarn.cli.connection import LONG_TIMEOUT
from tarn.cli.failures import Misuse
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.progress import progress
from tarn.cli.session import CommandSession

STDOUT = "-"


class OutputTarget(NamedTuple):
    """Standard output, or a file."""

    write: Callable[[bytes], Any]
    on_terminal: bool


@contextmanager
def open_output(name: str) -> Iterator[OutputTarget]:
    """Open standard output, or a file that gets its name only when the context is left without an error.

    Raises Misuse if the file cannot be written, and BrokenPipeError if the reader of standard output stops early.
    """
    if name == STDOUT:
        yield _standard_output()
        return
    # A device or a pipe cannot be written under another name first.
    direct = os.path.exists(name) and not os.path.isfile(name)
    temporary = name if direct else f"{name}.{os.getpid()}.part"
    try:
        with open(temporary, "wb") as file:
            yield OutputTarget(file.write, on_terminal=file.isatty())
        if not direct:
            os.replace(temporary, name)
    except OSError as error:
        raise Misuse(f"{name} cannot be written: {error.strerror or error}") from None
    finally:
        if not direct:
            with suppress(OSError):
                os.unlink(temporary)


def print_records(
    session: CommandSession,
    path: str,
    params: dict[str, Any],
    out: str,
    quiet: bool,
    limit: int | None = None,
    omitted: OmittedEntities | None = None,
) -> None:
    """Print a stream of NDJSON, all of it or up to a limit. Count its invalid entities in `omitted`."""
    stream = session.connection.stream(path, NDJSON, {**params, "end": True}, timeout=LONG_TIMEOUT)
    with printing(session, out, quiet, limit) as write, stream as response:
        chunks = response.iter_bytes()
        blocks = record_blocks(chunks) if omitted is None else record_blocks(chunks, omitted.add, omitted.end)
        for block in limited(blocks, limit):
            write(block)


def print_bytes(
    session: CommandSession,
    path: str,
    media_type: str,
    params: dict[str, Any],
    out: str,
    quiet: bool,
    size: int | None = None,
) -> None:
    """Print a stream of another media type unchanged; `size` is its number of bytes, if known."""
    text = media_type.startswith("text/")
    stream = session.connection.stream(path, media_type, params, timeout=LONG_TIMEOUT)
    with printing(session, out, quiet, text=text, size=size) as write, stream as response:
        for chunk in response.iter_bytes():
            write(chunk)


@contextmanager
def printing(
    session: CommandSession, out: str, quiet: bool, limit: int | None = None, text: bool = True, size: int | None = None
) -> Iterator[Callable[[bytes], None]]:
    """Yield the function that writes a result's pieces; show progress unless they are printed on the terminal."""
    with open_output(out) as target:
        if target.on_terminal and not text:
            raise Misuse("this format is binary: write it to a file with -o, or to a pipe")
        with progress(session.output, "reading", quiet or target.on_terminal, rows=limit, size=size) as advance:

            def write(piece: bytes) -> None:
                target.write(_escape_controls(piece) if target.on_terminal else piece)
                advance(len(piece), piece.count(b"\n") if text and size is None else 0)

            yield write


def limited(blocks: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    """Yield the first lines, up to a limit if there is one."""
    if limit is None:
        yield from blocks
        return
    remaining = limit
    for block in blocks:
        lines = block.splitlines(keepends=True)
        yield b"".join(lines[:remaining])
        remaining -= len(lines)
        if remaining <= 0:
            return


def line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of NDJSON, as the server writes it."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _standard_output() -> OutputTarget:
    out: BinaryIO = sys.stdout.buffer

    def write(data: bytes) -> None:
        out.write(data)
        out.flush()

    sys.stdout.flush()
    return OutputTarget(write, on_terminal=sys.stdout.isatty())


def _escape_controls(block: bytes) -> bytes:
    """Return the block for a terminal: control characters are escaped as in JSON."""
    text = block.decode(errors="replace")
    return "".join(
        char if char.isprintable() or char in "\n\r" else char.encode("unicode_escape").decode() for char in text
    ).encode()
