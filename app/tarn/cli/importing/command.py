"""`tarn import`: what others wrote, into datasets of a server."""

import os
from typing import Annotated, Literal

import typer

from tarn.cli.failures import Misuse
from tarn.cli.input.files import STATEMENT_TYPES, STDIN
from tarn.cli.options import OnError, Quiet
from tarn.cli.session import CommandSession


def import_data(
    session: CommandSession,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory of ftm-lakehouse: a dataset's, or that of a whole lake. Or FtM statements as CSV, pack "
            "or NDJSON, also with gzip or zstd; - is standard input.",
        ),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            metavar="NAME",
            help="Of a lake, only this dataset; repeatable. Of a file, the dataset that it goes to.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="What the dataset is to be called here.")
    ] = None,
    into: Annotated[
        bool, typer.Option("--into", help="Add to a dataset that has data already; nothing of it is taken away.")
    ] = False,
    origin: Annotated[
        str | None, typer.Option("--origin", help="Of a file: who says it, whatever the statements tell themselves.")
    ] = None,
    rename_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="Of a directory: what an origin is to be called here; repeatable."),
    ] = None,
    hidden: Annotated[
        bool,
        typer.Option(
            "--hidden",
            help="Of a directory: also statements that the source holds and, by its translog, does not show.",
        ),
    ] = False,
    form: Annotated[
        Literal["csv", "pack", "ndjson"] | None,
        typer.Option("--format", help="Of a file: what it is, where neither its name nor its beginning tells."),
    ] = None,
    on_error: OnError = "abort",
    compare: Annotated[bool, typer.Option(help="Read everything back, and compare the counts.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at everything, say what is there, change nothing.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Import a directory of ftm-lakehouse, or a file of FtM statements.

    Statements become visible all at once, with their origins and times, when everything is there; an import that broke
    off is completed by running the command again.

    Example: tarn import ./lakehouse --dry-run

    Example: tarn import ./lakehouse/donations --as donations_2030

    Example: ftm statements entities.ftm.json -f pack -o - | tarn import - -d donations --format pack
    """
    if os.path.isdir(source):
        _reject({"--origin": origin, "--format": form}, "files")
        from tarn.cli.importing.dataset import ImportOptions
        from tarn.cli.importing.directory import import_directory, renames

        renamed = renames(rename_origin or [])
        choices = ImportOptions(into, hidden, on_error == "skip", compare, quiet, renamed)
        import_directory(session, source, dataset or [], name, choices, dry_run)
        return
    if source != STDIN and not os.path.exists(source):
        raise Misuse(f"there is no file and no directory {source}")
    _reject({"--rename-origin": rename_origin, "--hidden": hidden}, "directories")
    if len(dataset or []) > 1:
        raise Misuse("a file goes to one dataset: give --dataset once")
    from tarn.cli.importing.statement_file import import_file

    kind = None if form is None else STATEMENT_TYPES[form]
    wanted = name or next(iter(dataset or ()), None)
    import_file(
        session,
        source,
        wanted,
        kind,
        origin,
        into=into,
        on_error=on_error,
        compare=compare,
        dry_run=dry_run,
        quiet=quiet,
    )


def _reject(options: dict[str, object], what: str) -> None:
    for option, given in options.items():
        if given:
            raise Misuse(f"{option} is for {what}")
