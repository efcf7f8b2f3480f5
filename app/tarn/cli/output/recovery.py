"""What was backed up, restored and lost, for people and for programs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from tarn.cli.output.tables import CommandOutput, printable

if TYPE_CHECKING:
    from tarn.model.recovery import BackupManifest, KnownBatch, Losses, Reconciled, Reconciliation

SHOWN = 10
"""Things of one kind that people are shown; programs see all of them."""


def show_backup(made: "BackupManifest", out: CommandOutput) -> None:
    if out.as_json:
        out.json(made.model_dump(mode="json"))
        return
    typer.echo(f"backup {made.id}: {made.objects} objects, {made.size} bytes, of which {made.copied} were copied now")
    for lacking in made.lacking[:SHOWN]:
        typer.echo(printable(f"  the lake lacks {lacking.path}: {lacking.detail}"))
    _more(len(made.lacking))


def show_restored(restored: "BackupManifest", found: "Reconciliation", out: CommandOutput) -> None:
    if out.as_json:
        out.json({"backup": restored.id, "at": restored.at.isoformat(), **found.model_dump(mode="json")})
        return
    typer.echo(f"restored {restored.id}: everything is as it was at {restored.at:%Y-%m-%d %H:%M:%S} UTC")
    _show(found)


def show_reconciled(found: "Reconciliation", out: CommandOutput) -> None:
    if out.as_json:
        out.json(found.model_dump(mode="json"))
        return
    if not found.datasets:
        typer.echo("database and lake fit together")
        return
    _show(found)
    if not found.applied:
        typer.echo("nothing was changed: run it with --apply to do this")


def _show(found: "Reconciliation") -> None:
    for one in found.datasets:
        typer.echo(printable(f"{one.dataset}: {one.found}, {_heads(one)}"))
        for line in (*_done(one), *_lost(one.lost)):
            typer.echo(printable(f"  {line}"))
        for finding in one.findings[:SHOWN]:
            typer.echo(printable(f"  found: {finding.kind}: {finding.detail}"))
        _more(len(one.findings))


def _heads(one: "Reconciled") -> str:
    before = "none" if one.head_before is None else str(one.head_before)
    after = "none" if one.head is None else str(one.head)
    return f"head {before}" if before == after else f"head {before} becomes {after}"


def _done(one: "Reconciled") -> Iterator[str]:
    if one.recorded:
        yield f"recorded: snapshots {one.recorded[0]} to {one.recorded[-1]}"
    if one.aside:
        yield f"put aside: {len(one.aside)} manifests that are no part of history"
    yield from _batches("flushed again", one.again)
    yield from _some("come back", [f"file {file.path}" for file in one.returned])


def _lost(lost: "Losses") -> Iterator[str]:
    yield from _some(
        "lost", [f"snapshot {one.seq} of {one.created:%Y-%m-%d %H:%M:%S}: {one.lacks}" for one in lost.snapshots]
    )
    yield from _some("lost", [f"commits {one.first} to {one.last}" for one in lost.commits])
    yield from _batches("lost", lost.batches)
    yield from _some("lost", [f"file {file.path} of {file.tenant}, {file.size} bytes" for file in lost.files])
    yield from _some("lost", [f"ref {name}" for name in lost.refs])
    yield from _some("to be made again", lost.exports)
    yield from _some("to be sent again", [f"parts of the upload {upload}" for upload in lost.uploads])
    if lost.history_below is not None:
        yield f"lost: history below snapshot {lost.history_below}"
    if lost.rejected:
        yield f"lost: {lost.rejected} events that were set aside"
    if lost.configuration:
        yield "lost: its configuration; it has that of a new dataset"
    if lost.everything:
        yield "lost: what waited in the journal of the dataset that had this name before"


def _batches(word: str, batches: "list[KnownBatch]") -> Iterator[str]:
    for one in batches[:SHOWN]:
        said = f", {one.message!r}" if one.message else ""
        of = f" of {one.origin}" if one.origin else ""
        yield f"{word}: commit {one.commit}, {one.rows} rows{of} by {one.tenant}{said} ({one.id})"
    if len(batches) > SHOWN:
        yield f"{word}: {len(batches) - SHOWN} batches more, with {sum(one.rows for one in batches[SHOWN:])} rows"


def _some(word: str, things: list[str]) -> Iterator[str]:
    for thing in things[:SHOWN]:
        yield f"{word}: {thing}"
    if len(things) > SHOWN:
        yield f"{word}: {len(things) - SHOWN} more"


def _more(count: int) -> None:
    if count > SHOWN:
        typer.echo(f"  and {count - SHOWN} more: --json has all of them")
