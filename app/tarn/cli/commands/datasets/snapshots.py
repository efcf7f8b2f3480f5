"""`tarn log` and `tarn snapshot`: list a dataset's snapshots, and show one."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from tarn_client.paths import path_of

from tarn.cli.commands.datasets.datasets import Dataset
from tarn.cli.connection import DATASETS
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Show a snapshot of a dataset.")

COLUMNS = ("seq", "id", "created", "operation", "added", "seen", "ended", "live", "message")

Snapshot = Annotated[str, typer.Argument(metavar="ID", help="The snapshot's id or number.")]


def log(
    session: CommandSession,
    name: Dataset,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of snapshots.")] = 100,
) -> None:
    """List a dataset's snapshots, newest first.

    Example: tarn log donations --limit 10
    """
    entries = session.connection.each(path_of(DATASETS, name, "snapshots"), limit=limit)
    session.output.table(entries if session.output.as_json else map(_line, entries), *COLUMNS)


@client_command(app, "show")
def show(session: CommandSession, name: Dataset, snapshot: Snapshot = "latest") -> None:
    """Show a snapshot, by default the latest: its manifest with --json, otherwise a summary.

    Example: tarn snapshot show donations 12 --json
    """
    manifest = session.connection.read(path_of(DATASETS, name, "snapshots", snapshot))
    session.output.record(manifest if session.output.as_json else dict(_summary(manifest)))


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the log with its counts as columns, or with the problem if it cannot be read."""
    if "problem" in entry:
        return {"seq": entry["seq"], "id": entry["id"], "message": entry["problem"]["detail"]}
    return {**entry, **entry["rows"]}


def _summary(manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a manifest's fields, with counts instead of the lists of batches and files."""
    for field, value in manifest.items():
        if field in ("statements", "translog"):
            counts = {part: len(value[part]) for part in ("files", "added", "removed")}
            yield field, {**value, **counts, "size": sum(file["size"] for file in value["files"])}
        else:
            yield field, len(value) if field == "batches" else value
