"""Upload of records in one request: all of them are stored, or none."""

from collections.abc import Iterator
from typing import Any

import typer

from tarn.cli.connection import LONG_TIMEOUT
from tarn.cli.failures import invalid_line
from tarn.cli.input.files import TEXT, InputFile
from tarn.cli.output.progress import progress
from tarn.cli.output.tables import printable
from tarn.cli.session import CommandSession

UNUSUAL = frozenset({"nested", "deleted"})
"""Counts that are shown only if they are not zero."""

MOST_SHOWN = 10
"""Maximum number of omitted values that are shown individually."""


def load(session: CommandSession, path: str, source: InputFile, kind: str, params: dict[str, Any], quiet: bool) -> None:
    """Upload a source of this media type and show the server's result."""
    headers = {"Content-Type": kind} | ({} if source.encoding is None else {"Content-Encoding": source.encoding})
    counts_lines = source.encoding is None and kind in TEXT
    with progress(session.output, "sending", quiet, size=source.size) as advance:

        def pieces() -> Iterator[bytes]:
            for piece in source.pieces():
                yield piece
                advance(len(piece), piece.count(b"\n") if counts_lines else 0)

        response = session.connection.request(
            "POST", path, params=params, content=pieces, headers=headers, timeout=LONG_TIMEOUT
        )
    written: dict[str, Any] = response.json()
    if session.output.as_json:
        session.output.json(written)
        return
    invalid, omitted, ignored = (written.pop(name) for name in ("errors", "omitted", "ignored"))
    session.output.record({name: value for name, value in written.items() if value or name not in UNUSUAL})
    for each in invalid:
        typer.echo(printable(f"left out: {invalid_line(each)}"), err=True)
    if written["rejected"] > len(invalid):
        session.output.note(f"and {written['rejected'] - len(invalid)} more")
    show_omissions(omitted, ignored)
    if response.status_code == 202:
        session.output.note("the records are durable; the requested flush has not finished yet")


def show_omissions(omitted: dict[str, Any], ignored: dict[str, int]) -> None:
    """Print on standard error which values were left out of what was stored, and which fields were ignored."""
    for value in omitted["first"][:MOST_SHOWN]:
        shown = f"left out: line {value['line']}, {value['property']}: {value['value']!r} ({value['reason']})"
        typer.echo(printable(shown), err=True)
    if omitted["count"]:
        counts = ", ".join(f"{name} {count}" for name, count in omitted["by_property"].items())
        typer.echo(printable(f"values left out: {omitted['count']} ({counts})"), err=True)
    if ignored:
        counts = ", ".join(f"{name} {count}" for name, count in ignored.items())
        typer.echo(printable(f"fields ignored: {counts}"), err=True)
