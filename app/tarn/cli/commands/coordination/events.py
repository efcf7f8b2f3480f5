"""`tarn events`: follow the event stream of a dataset or a job."""

import json
from itertools import islice
from typing import Annotated, Any

import typer
from tarn_client.events import follow
from tarn_client.paths import path_of

from tarn.cli.connection import LONG_TIMEOUT
from tarn.cli.output.tables import printable
from tarn.cli.session import CommandSession

COMMON = ("id", "stream", "kind", "dataset", "at")


def events(
    session: CommandSession,
    dataset: Annotated[str, typer.Argument(metavar="DATASET")],
    since: Annotated[
        int | None, typer.Option(min=0, metavar="ID", help="Start after this event; 0 for all events that are kept.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only events of these kinds; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this number of events.")] = None,
) -> None:
    """Follow a dataset: snapshots, exports, files, queue items and your jobs, one line each, until interrupted.

    Example: tarn events donations --since 0 --kind snapshot.published
    """
    path = path_of("/v1/datasets", dataset, "events")
    for event in islice(follow(session.connection, path, since, {"kind": kind}, timeout=LONG_TIMEOUT), limit):
        print_event(session, event)


def print_event(session: CommandSession, event: dict[str, Any]) -> None:
    """Print an event on one line: time, id, kind and other fields; or, with --json, its JSON."""
    if session.output.as_json:
        typer.echo(json.dumps(event, ensure_ascii=False))
        return
    fields = " ".join(
        f"{name}={_plain(value)}" for name, value in event.items() if name not in COMMON and value is not None
    )
    typer.echo(printable(f"{event['at'][:19]}Z  {event['id']}  {event['kind']}  {fields}".rstrip()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
