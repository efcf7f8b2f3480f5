"""Import of an FtM statement file into a dataset, as one commit."""

import os
from collections.abc import Iterator
from typing import Any

import typer
from tarn_client.errors import Problem

from tarn.cli.failures import Misuse, invalid_line
from tarn.cli.importing.dataset_metadata import checked_name
from tarn.cli.importing.split_records import STATEMENT_FORMATS, parts
from tarn.cli.importing.stage import ImportStage, StagePart
from tarn.cli.importing.target_dataset import ImportTarget
from tarn.cli.input.files import STDIN, InputFile, open_input, statement_type
from tarn.cli.input.upload import show_omissions
from tarn.cli.output.progress import progress
from tarn.cli.output.tables import printable
from tarn.cli.session import CommandSession


def import_file(
    session: CommandSession,
    path: str,
    dataset: str | None,
    kind: str | None,
    origin: str | None,
    *,
    into: bool,
    on_error: str,
    compare: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Send a file in parts and make them visible at once. Raises Misuse, LakeError."""
    target = ImportTarget(session.connection, checked_name(dataset or _named_for(path)))
    exists = target.exists()
    if exists and not into:
        target.require_empty()
    with open_input(path) as source:
        form = kind or statement_type(source)
        if form not in STATEMENT_FORMATS:
            raise Misuse(f"{source.name} is neither CSV nor pack nor NDJSON: use tarn statements load")
        result = (
            _read(session, source, form, quiet)
            if dry_run
            else _send(session, target, exists, source, form, origin, on_error, quiet)
        )
    if compare and not dry_run:
        # A file may contain a statement twice, so a difference is only reported.
        counts = target.count()
        result["there"] = {"statements": counts.statements, "entities": counts.entities}
    invalid, ignored = result.pop("errors", []), result.pop("ignored", {})
    if session.output.as_json:
        session.output.json(result | {"errors": invalid, "ignored": ignored})
        return
    session.output.record(result)
    for each in invalid:
        typer.echo(printable(f"left out: {invalid_line(each)}"), err=True)
    show_omissions({"count": 0, "first": []}, ignored)


def _named_for(path: str) -> str:
    if path == STDIN:
        raise Misuse("the dataset cannot be derived from standard input: give --dataset")
    return os.path.basename(path).partition(".")[0]


def _read(session: CommandSession, source: InputFile, form: str, quiet: bool) -> dict[str, Any]:
    lines = sum(part.rows for part in _with_progress(session, source, form, "reading", quiet))
    return {"source": source.name, "state": "planned", "format": form, "lines": lines}


def _send(
    session: CommandSession,
    target: ImportTarget,
    exists: bool,
    source: InputFile,
    form: str,
    origin: str | None,
    on_error: str,
    quiet: bool,
) -> dict[str, Any]:
    if not exists:
        target.create({})
    stage, lines = ImportStage(session.connection, target.name, origin, source.name, on_error), 0
    try:
        for part in _with_progress(session, source, form, "sending", quiet):
            try:
                stage.send(part)
            except Problem as problem:
                problem.add_note(f"nothing is imported; lines are counted from line {lines + 1} of the file on")
                raise
            lines += part.rows
        written = stage.commit()
    except BaseException:
        stage.abort()
        raise
    return {
        "source": source.name,
        "dataset": target.name,
        "state": "imported",
        "format": form,
        "lines": lines,
        "statements": written["statements"],
        "rejected": stage.rejected,
        "commit": written["commit"],
        "errors": stage.invalid[:100],
        "ignored": stage.ignored,
    }


def _with_progress(
    session: CommandSession, source: InputFile, form: str, doing: str, quiet: bool
) -> Iterator[StagePart]:
    with progress(session.output, doing, quiet) as advance:
        for part in parts(source, form):
            yield part
            advance(len(part.body), part.rows)
