"""Events: what happens to a dataset or a job, as it happens."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer

from tarn.cli.output.tables import printable
from tarn.cli.paths import at
from tarn.cli.session import CommandSession

FORM = "text/event-stream"

AGAIN = 2.0
"""Seconds after which a stream that the server ended is asked for again."""

COMMON = ("id", "stream", "kind", "dataset", "at")


def events(
    session: CommandSession,
    dataset: Annotated[str, typer.Argument(metavar="DATASET")],
    since: Annotated[
        int | None, typer.Option(min=0, metavar="ID", help="Begin after this event; 0 for all that is kept.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only these kinds; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
) -> None:
    """Follow a dataset: snapshots, exports, files, queue items and your jobs, a line each, until you stop it.

    Example: tarn events donations --since 0 --kind snapshot.published
    """
    left = limit
    for event in followed(session, at("/v1/datasets", dataset, "events"), since, kind=kind):
        tell(session, event)
        left = None if left is None else left - 1
        if left == 0:
            return


def followed(
    session: CommandSession, path: str, since: int | None, over: Callable[[], bool] = lambda: False, **params: Any
) -> Iterator[dict[str, Any]]:
    """The events of a stream, asked for again whenever the server ends it, until there is nothing more to tell."""
    heard = since
    while True:
        with session.client.stream(path, FORM, {**params, "since": heard}) as chunks:
            for event in parsed(chunks):
                yield event
                heard = event["id"]
        if over():
            return
        time.sleep(AGAIN)


def parsed(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON of each event. Comments, and what is cut off at the end, are no events."""
    held = b""
    for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def tell(session: CommandSession, event: dict[str, Any]) -> None:
    """An event on one line: for people its time, number, kind and what else it says; for programs its JSON."""
    if session.output.as_json:
        typer.echo(json.dumps(event, ensure_ascii=False))
        return
    said = " ".join(
        f"{name}={_plain(value)}" for name, value in event.items() if name not in COMMON and value is not None
    )
    typer.echo(printable(f"{event['at'][:19]}Z  {event['id']}  {event['kind']}  {said}".rstrip()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
