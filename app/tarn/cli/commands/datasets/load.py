"""`tarn load`: load a file of entities or statements into a dataset, detecting its format."""

import json
import os
from typing import Annotated, Any

import typer
from tarn_client.errors import Problem
from tarn_client.paths import path_of

from tarn.cli.completion import dataset_names
from tarn.cli.connection import DATASETS
from tarn.cli.failures import Misuse
from tarn.cli.input.files import STATEMENT_TYPES, STDIN, InputFile, entity_type, open_input, statement_type
from tarn.cli.input.upload import load as send
from tarn.cli.options import Commit, OnError, Origin, Quiet, Strict, Values
from tarn.cli.session import CommandSession

COLUMNS = frozenset({"csv", "pack", "parquet", "arrow", "arrows"})
"""File extensions of formats that contain statements only."""


def load(
    session: CommandSession,
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE]", help="Entities or statements, optionally gzip or zstd; - is standard input."),
    ] = STDIN,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            "-d",
            metavar="DATASET",
            help="Target dataset; default: the file name up to its first dot.",
            autocompletion=dataset_names,
        ),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the dataset if it does not exist.")] = False,
    origin: Origin = None,
    on_error: OnError = "abort",
    values: Values = "as_is",
    strict: Strict = False,
    commit: Commit = "auto",
    quiet: Quiet = False,
) -> None:
    """Load a file written by FtM tools: entities, changes or statements. All of it is stored, or nothing.

    Values are stored unchanged, since FtM tools have cleaned them; --values clean cleans them again.

    Example: tarn load donations.ftm.json --create

    Example: ftm aggregate -i entities.ijson | tarn load -d donations --origin crawl
    """
    name = dataset or _named_for(file)
    params = {"origin": origin, "on_error": on_error, "values": values, "strict": strict, "commit": commit}
    with open_input(file) as source:
        records, kind = _content(source)
        if create:
            _create(session, name)
        session.output.note(f"loading {records} into {name}")
        send(session, path_of(DATASETS, name, records), source, kind, params, quiet)


def _named_for(file: str) -> str:
    """Return the dataset name for a file: `donations` for `…/donations.ftm.json.gz`."""
    if file == STDIN:
        raise Misuse("the dataset cannot be derived from standard input: give --dataset")
    return os.path.basename(file).partition(".")[0]


def _content(source: InputFile) -> tuple[str, str]:
    """Return `entities` or `statements`, and the media type. Raises Misuse if they cannot be detected."""
    if source.suffix.removeprefix(".") in COLUMNS:
        return "statements", STATEMENT_TYPES[source.suffix.removeprefix(".")]
    begin = source.beginning()
    if begin[:1] not in (b"{", b"["):
        return "statements", statement_type(source)
    kind = entity_type(source)
    return ("statements" if "prop" in _first(begin) else "entities"), kind


def _first(begin: bytes) -> dict[str, Any]:
    """Return the first JSON record, or an empty one if the first bytes do not contain all of it."""
    text = begin.decode(errors="replace").lstrip("[ \r\n\t")
    try:
        first, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        first = {}
    return first if isinstance(first, dict) else {}


def _create(session: CommandSession, name: str) -> None:
    try:
        session.connection.write("POST", DATASETS, {"name": name})
    except Problem as problem:
        if problem.slug != "already-exists":
            raise
