"""What comes out: records as they arrive, to standard output or a file, and never a part as if it were the whole."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple

from tarn.cli.failures import Misuse, ProblemAnswered, Unreachable
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.progress import progress
from tarn.cli.session import CommandSession

NDJSON = "application/x-ndjson"
STDOUT = "-"

ABOUT = b'{"$'
"""How a line begins that is about the stream. Nothing else has this: records have no such fields, and in a string the
quote has a backslash before it."""


class OutputTarget(NamedTuple):
    """Where records go."""

    write: Callable[[bytes], Any]
    on_terminal: bool


@contextmanager
def sink(name: str) -> Iterator[OutputTarget]:
    """Standard output, or a file that takes its name only when the context is left without an error.

    Raises Misuse for what cannot be written. A reader of standard output that stops early is a BrokenPipeError.
    """
    if name == STDOUT:
        yield _standard_output()
        return
    # A device or a pipe has no other name to be written under first.
    direct = os.path.exists(name) and not os.path.isfile(name)
    written = name if direct else f"{name}.{os.getpid()}.part"
    try:
        with open(written, "wb") as file:
            yield OutputTarget(file.write, on_terminal=file.isatty())
        if not direct:
            os.replace(written, name)
    except OSError as error:
        raise Misuse(f"{name} cannot be written: {error.strerror or error}") from None
    finally:
        if not direct:
            with suppress(OSError):
                os.unlink(written)


def print_records(
    session: CommandSession,
    path: str,
    params: dict[str, Any],
    out: str,
    quiet: bool,
    limit: int | None = None,
    left_out: OmittedEntities | None = None,
) -> None:
    """Print a stream of NDJSON, all of it or up to a limit. Count the invalid entities of it in `left_out`."""
    with (
        printing(session, out, quiet, limit) as write,
        session.client.stream(path, NDJSON, {**params, "end": True}) as chunks,
    ):
        for block in limited(records(chunks, left_out), limit):
            write(block)


def print_bytes(
    session: CommandSession,
    path: str,
    form: str,
    params: dict[str, Any],
    out: str,
    quiet: bool,
    size: int | None = None,
) -> None:
    """Print a stream of another form as it is; `size` is how many bytes it has, if that is known."""
    text = form.startswith("text/")
    with (
        printing(session, out, quiet, text=text, size=size) as write,
        session.client.stream(path, form, params) as chunks,
    ):
        for chunk in chunks:
            write(chunk)


@contextmanager
def printing(
    session: CommandSession, out: str, quiet: bool, limit: int | None = None, text: bool = True, size: int | None = None
) -> Iterator[Callable[[bytes], None]]:
    """What writes the pieces of a result as they come, with progress for whoever does not see them pass."""
    with sink(out) as to:
        if to.on_terminal and not text:
            raise Misuse("this form is not for a terminal: name a file with -o, or pipe it on")
        with progress(session.output, "reading", quiet or to.on_terminal, rows=limit, size=size) as passed:

            def write(piece: bytes) -> None:
                to.write(_escape_controls(piece) if to.on_terminal else piece)
                passed(len(piece), piece.count(b"\n") if text and size is None else 0)

            yield write


def records(chunks: Iterable[bytes], left_out: OmittedEntities | None = None) -> Iterator[bytes]:
    """Blocks of whole lines, each a record. Lines about entities that do not assemble are counted in `left_out`.

    Raises ProblemAnswered for a stream that failed, and Unreachable for one without its last line.
    """
    for block in _whole_lines(chunks):
        if ABOUT not in block:
            yield block
            continue
        kept: list[bytes] = []
        for line in block.splitlines(keepends=True):
            if not line.startswith(ABOUT):
                kept.append(line)
                continue
            ((about, what),) = json.loads(line).items()
            if about == "$invalid":
                if kept:
                    # A reader that has enough with these has left nothing out that comes after them.
                    yield b"".join(kept)
                    kept = []
                if left_out is not None:
                    left_out.add(what)
                continue
            yield b"".join(kept)
            if about == "$end":
                if left_out is not None:
                    # Of a diff, whose records have such entities as null, this line alone has the number.
                    left_out.count = what.get("invalid", left_out.count)
                return
            raise ProblemAnswered(what)
        yield b"".join(kept)
    raise Unreachable("the server's stream ended too early: what came of it is not the whole")


def limited(blocks: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    """The first lines, so many, or all."""
    if limit is None:
        yield from blocks
        return
    left = limit
    for block in blocks:
        lines = block.splitlines(keepends=True)
        yield b"".join(lines[:left])
        left -= len(lines)
        if left <= 0:
            return


def line(record: dict[str, Any]) -> bytes:
    """A record as the server's streams have it."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, cut after line ends. What comes after the last one is not a line, and left out."""
    held: list[bytes] = []
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join([*held, chunk[:cut]])
            held = []
        held.append(chunk[cut:])


def _standard_output() -> OutputTarget:
    out: BinaryIO = sys.stdout.buffer

    def write(data: bytes) -> None:
        out.write(data)
        out.flush()

    sys.stdout.flush()
    return OutputTarget(write, on_terminal=sys.stdout.isatty())


def _escape_controls(block: bytes) -> bytes:
    """The block for a terminal: what could steer it is escaped as JSON does."""
    text = block.decode(errors="replace")
    return "".join(
        char if char.isprintable() or char in "\n\r" else char.encode("unicode_escape").decode() for char in text
    ).encode()
