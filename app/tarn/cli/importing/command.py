"""`tarn import`: import ftm-lakehouse directories and FtM statement files into datasets of a server."""

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
            help="A directory of ftm-lakehouse (a dataset, or a lake with several), or a file of FtM statements as "
            "CSV, pack or NDJSON, optionally with gzip or zstd; - is standard input.",
        ),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            "-d",
            metavar="NAME",
            help="Of a lake: import only this dataset; repeatable. Of a file: the target dataset.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="New name of the dataset.")] = None,
    into: Annotated[
        bool, typer.Option("--into", help="Add to a dataset that has data; nothing in it is deleted.")
    ] = False,
    origin: Annotated[
        str | None, typer.Option("--origin", help="Of a file: the origin of all statements, instead of their own.")
    ] = None,
    rename_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="Of a directory: rename an origin; repeatable."),
    ] = None,
    hidden: Annotated[
        bool,
        typer.Option(
            "--hidden",
            help="Of a directory: also import statements that the source has stored but hides by its translog.",
        ),
    ] = False,
    form: Annotated[
        Literal["csv", "pack", "ndjson"] | None,
        typer.Option("--format", help="Of a file: its format, if neither its name nor its first bytes show it."),
    ] = None,
    on_error: OnError = "abort",
    compare: Annotated[bool, typer.Option(help="Read everything back and compare the counts.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check everything and print what would be imported.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Import a directory of ftm-lakehouse, or a file of FtM statements.

    All statements become visible at once, with their origins and times, when everything has been sent. To resume an
    import that failed, run the command again.

    Example: tarn import ./lakehouse --dry-run

    Example: tarn import ./lakehouse/donations --as donations_2030

    Example: ftm statements entities.ftm.json -f pack -o - | tarn import - -d donations --format pack
    """
    if os.path.isdir(source):
        _reject({"--origin": origin, "--format": form}, "files")
        from tarn.cli.importing.dataset import ImportOptions
        from tarn.cli.importing.directory import import_directory, renames

        renamed = renames(rename_origin or [])
        options = ImportOptions(into, hidden, on_error == "skip", compare, quiet, renamed)
        import_directory(session, source, dataset or [], name, options, dry_run)
        return
    if source != STDIN and not os.path.exists(source):
        raise Misuse(f"there is no file and no directory {source}")
    _reject({"--rename-origin": rename_origin, "--hidden": hidden}, "directories")
    if len(dataset or []) > 1:
        raise Misuse("a file is imported into one dataset: give --dataset once")
    from tarn.cli.importing.statement_file import import_file

    kind = None if form is None else STATEMENT_TYPES[form]
    target = name or next(iter(dataset or ()), None)
    import_file(
        session,
        source,
        target,
        kind,
        origin,
        into=into,
        on_error=on_error,
        compare=compare,
        dry_run=dry_run,
        quiet=quiet,
    )


def _reject(options: dict[str, object], subject: str) -> None:
    for option, value in options.items():
        if value:
            raise Misuse(f"{option} is for {subject}")
