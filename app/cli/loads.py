"""Records on their way to the server, as one request: all of them are taken, or none."""

from collections.abc import Iterator
from typing import Any

import typer

from app.cli.failures import fault_line
from app.cli.output import printable
from app.cli.progress import progress
from app.cli.session import Session
from app.cli.sources import TEXT, Source


def load(session: Session, path: str, source: Source, kind: str, params: dict[str, Any], quiet: bool) -> None:
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
    faults = written.pop("errors")
    session.output.record(written)
    for fault in faults:
        typer.echo(printable(f"left out: {fault_line(fault)}"), err=True)
    if written["rejected"] > len(faults):
        session.output.note(f"and {written['rejected'] - len(faults)} more")
    if answer.status_code == 202:
        session.output.note("it is durable; the flush that was waited for is not done yet")
