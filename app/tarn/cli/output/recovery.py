"""Output of backup, restore and reconcile: what was saved, restored and lost."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from tarn.cli.output.tables import CommandOutput, printable

if TYPE_CHECKING:
    from tarn.model.datasets.recovery import BackupManifest, Losses, Reconciled, Reconciliation, RecordedBatch

SHOWN = 10
"""Maximum number of items of each kind in text output; JSON has all of them."""


def show_backup(backup: "BackupManifest", out: CommandOutput) -> None:
    if out.as_json:
        out.json(backup.model_dump(mode="json"))
        return
    typer.echo(
        f"backup {backup.id}: {backup.objects} objects, {backup.size} bytes, of which {backup.copied} were copied"
    )
    for missing in backup.lacking[:SHOWN]:
        typer.echo(printable(f"  the lake lacks {missing.path}: {missing.detail}"))
    _more(len(backup.lacking))


def show_restored(restored: "BackupManifest", result: "Reconciliation", out: CommandOutput) -> None:
    if out.as_json:
        out.json({"backup": restored.id, "at": restored.at.isoformat(), **result.model_dump(mode="json")})
        return
    typer.echo(f"restored {restored.id}: the state of {restored.at:%Y-%m-%d %H:%M:%S} UTC")
    _show(result)


def show_reconciled(result: "Reconciliation", out: CommandOutput) -> None:
    if out.as_json:
        out.json(result.model_dump(mode="json"))
        return
    if not result.datasets:
        typer.echo("database and lake are consistent")
        return
    _show(result)
    if not result.applied:
        typer.echo("nothing was changed: run it with --apply to do this")


def _show(result: "Reconciliation") -> None:
    for item in result.datasets:
        typer.echo(printable(f"{item.dataset}: {item.found}, {_heads(item)}"))
        for line in (*_done(item), *_lost(item.lost)):
            typer.echo(printable(f"  {line}"))
        for finding in item.findings[:SHOWN]:
            typer.echo(printable(f"  found: {finding.kind}: {finding.detail}"))
        _more(len(item.findings))


def _heads(item: "Reconciled") -> str:
    before = "none" if item.head_before is None else str(item.head_before)
    after = "none" if item.head is None else str(item.head)
    return f"head {before}" if before == after else f"head {before} becomes {after}"


def _done(item: "Reconciled") -> Iterator[str]:
    if item.recorded:
        yield f"recorded: snapshots {item.recorded[0]} to {item.recorded[-1]}"
    if item.aside:
        yield f"moved out of the history: {len(item.aside)} manifests"
    yield from _batches("flushed again", item.again)
    yield from _listed("restored", [f"file {file.path}" for file in item.returned])


def _lost(losses: "Losses") -> Iterator[str]:
    yield from _listed(
        "lost", [f"snapshot {item.seq} of {item.created:%Y-%m-%d %H:%M:%S}: {item.lacks}" for item in losses.snapshots]
    )
    yield from _listed("lost", [f"commits {item.first} to {item.last}" for item in losses.commits])
    yield from _batches("lost", losses.batches)
    yield from _listed("lost", [f"file {file.path} of {file.tenant}, {file.size} bytes" for file in losses.files])
    yield from _listed("lost", [f"ref {name}" for name in losses.refs])
    yield from _listed("to be exported again", losses.exports)
    yield from _listed("to be sent again", [f"parts of the upload {upload}" for upload in losses.uploads])
    if losses.history_below is not None:
        yield f"lost: history below snapshot {losses.history_below}"
    if losses.rejected:
        yield f"lost: {losses.rejected} events that were rejected earlier"
    if losses.configuration:
        yield "lost: its configuration; it has the defaults of a new dataset"
    if losses.everything:
        yield "lost: the unflushed journal of the previous dataset of this name"


def _batches(label: str, batches: "list[RecordedBatch]") -> Iterator[str]:
    for item in batches[:SHOWN]:
        message = f", {item.message!r}" if item.message else ""
        of = f" of {item.origin}" if item.origin else ""
        yield f"{label}: commit {item.commit}, {item.rows} rows{of} by {item.tenant}{message} ({item.id})"
    if len(batches) > SHOWN:
        yield f"{label}: {len(batches) - SHOWN} batches more, with {sum(item.rows for item in batches[SHOWN:])} rows"


def _listed(label: str, items: list[str]) -> Iterator[str]:
    for text in items[:SHOWN]:
        yield f"{label}: {text}"
    if len(items) > SHOWN:
        yield f"{label}: {len(items) - SHOWN} more"


def _more(count: int) -> None:
    if count > SHOWN:
        typer.echo(f"  and {count - SHOWN} more: --json has all of them")
