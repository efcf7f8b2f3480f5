"""A file of FtM data into a dataset, whatever it holds."""

import json
import os
from typing import Annotated, Any

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.completion import dataset_names
from tarn.cli.failures import Misuse, ProblemAnswered
from tarn.cli.input.files import STATEMENT_TYPES, STDIN, InputFile, entity_type, opened, statement_type
from tarn.cli.input.upload import load as send
from tarn.cli.options import Commit, OnError, Origin, Quiet, Strict, Values
from tarn.cli.paths import at as path_of
from tarn.cli.session import CommandSession

COLUMNS = frozenset({"csv", "pack", "parquet", "arrow", "arrows"})
"""Names of files that hold statements only."""


def load(
    session: CommandSession,
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE]", help="Entities or statements, also with gzip or zstd; - is standard input."),
    ] = STDIN,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            metavar="DATASET",
            help="Where to; else the dataset that the file is named for.",
            autocompletion=dataset_names,
        ),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the dataset if there is none.")] = False,
    origin: Origin = None,
    on_error: OnError = "abort",
    values: Values = "as_is",
    strict: Strict = False,
    commit: Commit = "auto",
    quiet: Quiet = False,
) -> None:
    """Load a file as FtM's tools write them: entities, changes or statements. All of it is taken, or nothing.

    Values are stored as they are, since FtM's tools have cleaned them; --values clean cleans them again.

    Example: tarn load donations.ftm.json --create

    Example: ftm aggregate -i entities.ijson | tarn load -d donations --origin crawl
    """
    name = dataset or _named_for(file)
    params = {"origin": origin, "on_error": on_error, "values": values, "strict": strict, "commit": commit}
    with opened(file) as source:
        records, kind = _content(source)
        if create:
            _create(session, name)
        session.output.note(f"loading {records} into {name}")
        send(session, path_of(BASE, name, records), source, kind, params, quiet)


def _named_for(file: str) -> str:
    """`donations` for `…/donations.ftm.json.gz`."""
    if file == STDIN:
        raise Misuse("standard input has no name that says where to: give --dataset")
    return os.path.basename(file).partition(".")[0]


def _content(source: InputFile) -> tuple[str, str]:
    """Whether these are entities or statements, and their media type. Raises Misuse if nothing tells."""
    if source.suffix.removeprefix(".") in COLUMNS:
        return "statements", STATEMENT_TYPES[source.suffix.removeprefix(".")]
    begin = source.beginning()
    if begin[:1] not in (b"{", b"["):
        return "statements", statement_type(source)
    kind = entity_type(source)
    return ("statements" if "prop" in _first(begin) else "entities"), kind


def _first(begin: bytes) -> dict[str, Any]:
    """The first record of JSON, if the beginning holds all of it."""
    text = begin.decode(errors="replace").lstrip("[ \r\n\t")
    try:
        first, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        first = {}
    return first if isinstance(first, dict) else {}


def _create(session: CommandSession, name: str) -> None:
    try:
        session.client.document("POST", BASE, {"name": name})
    except ProblemAnswered as problem:
        if problem.slug != "already-exists":
            raise
