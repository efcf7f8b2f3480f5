"""`tarn statements`: load, get, query and delete statements."""

import os
from typing import Annotated, Any, Literal

import typer
from tarn_client.ndjson import NDJSON
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS
from tarn.cli.input.files import STATEMENT_TYPES, open_input, statement_type
from tarn.cli.input.upload import load as send
from tarn.cli.options import (
    At,
    Commit,
    Dataset,
    Fresh,
    Ids,
    InputPath,
    OneOrigin,
    OnError,
    Origin,
    Origins,
    Out,
    Quiet,
    Schema,
    Schemata,
    Values,
)
from tarn.cli.output.streams import print_bytes, print_records
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Load, get, query and delete statements.")

Form = Annotated[
    Literal["ndjson", "csv", "parquet", "arrow"] | None,
    typer.Option("--format", help="Output format; default: by the file's extension, or NDJSON."),
]
Props = Annotated[list[str] | None, typer.Option("--prop", help="Properties; repeatable.")]


@client_command(app, "load")
def load(
    session: CommandSession,
    dataset: Dataset,
    file: InputPath,
    form: Annotated[
        Literal["ndjson", "csv", "pack", "parquet", "arrow"] | None,
        typer.Option("--format", help="Its format, if neither the file's name nor its first bytes show it."),
    ] = None,
    origin: Origin = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse a statement whose id or dataset field differs from the computed one."),
    ] = False,
    on_error: OnError = "abort",
    values: Values = None,
    commit: Commit = "auto",
    quiet: Quiet = False,
) -> None:
    """Load statements as FtM writes them: all of them or none. They are durable when the command succeeds.

    Ids are computed for the dataset, so that statements of another dataset can be loaded.

    Example: tarn statements load donations statements.csv.gz --origin crawl
    """
    params = {"origin": origin, "strict": strict, "on_error": on_error, "values": values, "commit": commit}
    with open_input(file) as source:
        kind = STATEMENT_TYPES[form] if form else statement_type(source)
        send(session, _path(dataset), source, kind, params, quiet)


@client_command(app, "get")
def get(
    session: CommandSession,
    dataset: Dataset,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Entity ids, canonical ids or referents.")],
    origin: Origins = None,
    prop: Props = None,
    at: At = None,
    fresh: Fresh = None,
    form: Form = None,
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the statements of entities, with origins and the times at which they were seen.

    Example: tarn statements get donations jane --prop name
    """
    _print(session, dataset, {"id": ids, "origin": origin, "prop": prop, "at": at, "fresh": fresh}, form, out, quiet)


@client_command(app, "query")
def query(
    session: CommandSession,
    dataset: Dataset,
    id_: Ids = None,
    canonical_id: Annotated[list[str] | None, typer.Option(help="Canonical ids; repeatable.")] = None,
    schema: Schema = None,
    schemata: Schemata = None,
    origin: Origins = None,
    prop: Props = None,
    at: At = None,
    fresh: Fresh = None,
    form: Form = None,
    out: Out = "-",
    quiet: Quiet = False,
) -> None:
    """Print the statements that match the filters; all of them without filters.

    Example: tarn statements query donations --prop name --format csv

    Example: tarn statements query donations --at 12 -o statements.parquet
    """
    params = {
        "id": id_,
        "canonical_id": canonical_id,
        "schema": schema,
        "schemata": schemata,
        "origin": origin,
        "prop": prop,
        "at": at,
        "fresh": fresh,
    }
    _print(session, dataset, params, form, out, quiet)


@client_command(app, "delete")
def delete(
    session: CommandSession,
    dataset: Dataset,
    statement: Annotated[str, typer.Argument(metavar="ID", help="The statement's id.")],
    origin: OneOrigin = None,
) -> None:
    """Delete a statement, of one origin or all. Existing snapshots keep it."""
    session.output.record(session.connection.write("DELETE", _path(dataset, statement), params={"origin": origin}))


def _path(dataset: str, *below: str) -> str:
    return path_of(DATASETS, dataset, "statements", *below)


def _print(
    session: CommandSession, dataset: str, params: dict[str, Any], form: str | None, out: str, quiet: bool
) -> None:
    named = STATEMENT_TYPES.get(os.path.splitext(out)[1].removeprefix(".").lower(), NDJSON)
    kind = STATEMENT_TYPES[form] if form else named
    if kind == NDJSON:
        print_records(session, _path(dataset, "stream"), params, out, quiet)
    else:
        print_bytes(session, _path(dataset, "stream"), kind, params, out, quiet)
