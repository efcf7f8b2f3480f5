"""Records on their way to the server, as one request: all of them are taken, or none."""

from collections.abc import Iterator
from typing import Any

import typer

from tarn.cli.failures import invalid_line
from tarn.cli.input.files import TEXT, InputFile
from tarn.cli.output.progress import progress
from tarn.cli.output.tables import printable
from tarn.cli.session import CommandSession

UNUSUAL = frozenset({"nested", "deleted"})
"""Counts that are shown only if there is something to count."""

MOST_SHOWN = 10
"""Values that were left out which are shown one by one."""


def load(session: CommandSession, path: str, source: InputFile, kind: str, params: dict[str, Any], quiet: bool) -> None:
    """Send a source, which is of this media type, and show what the server took of it."""
    headers = {"Content-Type": kind} | ({} if source.encoding is None else {"Content-Encoding": source.encoding})
    counts_lines = source.encoding is None and kind in TEXT
    with progress(session.output, "sending", quiet, size=source.size) as passed:

        def pieces() -> Iterator[bytes]:
            for piece in source.pieces():
                yield piece
                passed(len(piece), piece.count(b"\n") if counts_lines else 0)

        answer = session.client.upload(path, pieces(), headers, params)
    written: dict[str, Any] = answer.json()
    if session.output.as_json:
        session.output.json(written)
        return
    faults, omitted, ignored = (written.pop(name) for name in ("errors", "omitted", "ignored"))
    session.output.record({name: value for name, value in written.items() if value or name not in UNUSUAL})
    for fault in faults:
        typer.echo(printable(f"left out: {invalid_line(fault)}"), err=True)
    if written["rejected"] > len(faults):
        session.output.note(f"and {written['rejected'] - len(faults)} more")
    show_omissions(omitted, ignored)
    if answer.status_code == 202:
        session.output.note("it is durable; the flush that was waited for is not done yet")


def show_omissions(omitted: dict[str, Any], ignored: dict[str, int]) -> None:
    """Say on standard error which values were left out of what was stored, and which fields were ignored."""
    for value in omitted["first"][:MOST_SHOWN]:
        shown = f"left out: line {value['line']}, {value['property']}: {value['value']!r} ({value['reason']})"
        typer.echo(printable(shown), err=True)
    if omitted["count"]:
        counts = ", ".join(f"{name} {count}" for name, count in omitted["by_property"].items())
        typer.echo(printable(f"values left out: {omitted['count']} ({counts})"), err=True)
    if ignored:
        counts = ", ".join(f"{name} {count}" for name, count in ignored.items())
        typer.echo(printable(f"fields ignored: {counts}"), err=True)
