"""Snapshots: a dataset's log, and what is in one of them."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from tarn.cli.commands.datasets.datasets import BASE, Dataset
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Snapshots: what a dataset was at one moment.")

COLUMNS = ("seq", "id", "created", "operation", "added", "seen", "ended", "live", "message")

Snapshot = Annotated[str, typer.Argument(metavar="ID", help="The snapshot's id or number.")]


def log(
    session: CommandSession,
    name: Dataset,
    limit: Annotated[int, typer.Option(min=1, help="At most so many snapshots.")] = 100,
) -> None:
    """List a dataset's snapshots, newest first.

    Example: tarn log donations --limit 10
    """
    entries = session.client.each(at(BASE, name, "snapshots"), limit)
    session.output.table(entries if session.output.as_json else map(_line, entries), *COLUMNS)


@client_command(app, "show")
def show(session: CommandSession, name: Dataset, snapshot: Snapshot = "latest") -> None:
    """Show a snapshot, or the latest: its manifest as JSON, or what people want to know of it.

    Example: tarn snapshot show donations 12 --json
    """
    manifest = session.client.document("GET", at(BASE, name, "snapshots", snapshot))
    session.output.record(manifest if session.output.as_json else dict(_summary(manifest)))


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the log with its counts side by side; one that cannot be read says why."""
    if "problem" in entry:
        return {"seq": entry["seq"], "id": entry["id"], "message": entry["problem"]["detail"]}
    return {**entry, **entry["rows"]}


def _summary(manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A manifest with the number of its batches and files for the lists of them."""
    for field, value in manifest.items():
        if field in ("statements", "translog"):
            counts = {part: len(value[part]) for part in ("files", "added", "removed")}
            yield field, {**value, **counts, "size": sum(file["size"] for file in value["files"])}
        else:
            yield field, len(value) if field == "batches" else value
