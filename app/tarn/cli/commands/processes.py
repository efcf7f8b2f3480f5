"""Commands that are processes of the server. What they run is imported when they run: clients start without it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tarn.cli.output import recovery
from tarn.cli.output import tables as output

if TYPE_CHECKING:
    from tarn.settings import Settings

PANEL = "Processes"
RECOVERY = "Backup and recovery"

Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Place = Annotated[str, typer.Argument(metavar="PLACE", help="Where backups are: a folder, s3://, gs:// or az://.")]


def add_processes(app: typer.Typer) -> None:
    """Give the command its processes."""
    for process in (serve, api, worker, migrate, executor, settings):
        app.command(rich_help_panel=PANEL)(process)
    for command in (backup, restore, reconcile):
        app.command(rich_help_panel=RECOVERY)(command)


def serve() -> None:
    """Run everything on this machine: API and worker, migrating the database first."""
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import run_serve

        run_serve(known)


def api() -> None:
    """Run the API alone."""
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import run_api

        run_api(known)


def worker(until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False) -> None:
    """Run a worker alone."""
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import run_worker

        run_worker(known, until_stdin_closes)


def migrate() -> None:
    """Bring the database to the schema of this version."""
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import run_migrate

        run_migrate(known)


def backup(
    place: Place,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, metavar="N", help="Remove all but the newest N backups afterwards.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the backups there are, and make none.")] = False,
    as_json: Json = False,
) -> None:
    """Back up database and lake as they are at one moment, while everything runs.

    Exits with 1 if the lake itself lacks something: the backup is there, and says what it is without.
    """
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import list_backups, run_backup

        if list_:
            output.CommandOutput(as_json).table(
                [one.model_dump(mode="json") for one in list_backups(known, place)],
                *("id", "at", "tarn", "objects", "size", "copied", "copied_size"),
            )
            return
        made = run_backup(known, place, keep)
        recovery.show_backup(made, output.CommandOutput(as_json))
        if made.lacking:
            raise typer.Exit(1)


def restore(
    place: Place,
    at: Annotated[str | None, typer.Option("--at", metavar="BACKUP", help="Which one; without it the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Restore a backup into an empty database and an empty lake: those that the settings name.

    Run again after a crash, it goes on. Exits with 1 if something is lost, and says what.
    """
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import run_restore

        restored, found = run_restore(known, place, at)
        recovery.show_restored(restored, found, output.CommandOutput(as_json))
        if found.is_lossy:
            raise typer.Exit(1)


def reconcile(
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Without this, only tell what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Make a database and a lake one that were restored from different moments, each by its own means.

    Nobody may be at work. Exits with 1 if something is lost, and says what.
    """
    with _refusals_in_a_sentence():
        known = _settings()
        from tarn.main import run_reconcile

        found = run_reconcile(known, apply)
        recovery.show_reconciled(found, output.CommandOutput(as_json))
        if found.is_lossy:
            raise typer.Exit(1)


def executor() -> None:
    """Run an executor of Spark on Kubernetes: Spark starts it, in a pod of its own."""
    with _refusals_in_a_sentence():
        # Its environment is Spark's, without the settings of Tarn: nobody but this user may read its files.
        os.umask(0o077)
        from tarn.main import run_executor

        run_executor()


def settings() -> None:
    """Print every setting, as a Markdown table."""
    from tarn.settings import settings_table

    typer.echo(settings_table(), nl=False)


def _settings() -> "Settings":
    """Load the settings and set the umask, before what takes seconds to import: a wrong setting is reported at once.

    Every process of the server passes here before it writes a file, and its child processes inherit the umask: the
    worker, parsers, loaders, the query process, Spark's JVM and its Python workers. Raises StartRefused.
    """
    from tarn.settings import load_settings

    known = load_settings()
    os.umask(int(known.umask, 8))
    return known


@contextmanager
def _refusals_in_a_sentence() -> Iterator[None]:
    """What cannot start says so in one sentence, and exits with 2."""
    from tarn.errors import StartRefused, TarnError

    try:
        yield
    except (StartRefused, TarnError) as error:
        typer.echo(f"tarn: {error}", err=True)
        raise typer.Exit(2) from None
