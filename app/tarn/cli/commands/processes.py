"""Server commands: serve, api, worker, migrate, backup, restore, reconcile. Imported late: clients start fast."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tarn.cli.output import recovery as recovery_output
from tarn.cli.output import tables as output

if TYPE_CHECKING:
    from tarn.settings import Settings

PANEL = "Processes"
RECOVERY = "Backup and recovery"

Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Location = Annotated[
    str, typer.Argument(metavar="LOCATION", help="Location of the backups: a folder, s3://, gs:// or az://.")
]


def add_processes(app: typer.Typer) -> None:
    """Register the server commands."""
    for process in (serve, api, worker, migrate, executor, settings):
        app.command(rich_help_panel=PANEL)(process)
    for command in (backup, restore, reconcile):
        app.command(rich_help_panel=RECOVERY)(command)


def serve() -> None:
    """Run everything on this machine: API and worker, migrating the database first."""
    with _report_refusals():
        known = _settings()
        from tarn.main import run_serve

        run_serve(known)


def api() -> None:
    """Run the API alone."""
    with _report_refusals():
        known = _settings()
        from tarn.main import run_api

        run_api(known)


def worker(until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False) -> None:
    """Run a worker alone."""
    with _report_refusals():
        known = _settings()
        from tarn.main import run_worker

        run_worker(known, until_stdin_closes)


def migrate() -> None:
    """Migrate the database to the schema of this version."""
    with _report_refusals():
        known = _settings()
        from tarn.main import run_migrate

        run_migrate(known)


def backup(
    location: Location,
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, metavar="N", help="Remove all but the newest N backups afterwards.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the existing backups instead of creating one.")] = False,
    as_json: Json = False,
) -> None:
    """Back up database and lake in one consistent state, while the server runs.

    Exits with 1 if the lake lacks objects: the backup is created and lists them.
    """
    with _report_refusals():
        known = _settings()
        from tarn.main import list_backups, run_backup

        if list_:
            output.CommandOutput(as_json).table(
                [manifest.model_dump(mode="json") for manifest in list_backups(known, location)],
                *("id", "at", "tarn", "objects", "size", "copied", "copied_size"),
            )
            return
        created = run_backup(known, location, keep)
        recovery_output.show_backup(created, output.CommandOutput(as_json))
        if created.lacking:
            raise typer.Exit(1)


def restore(
    location: Location,
    at: Annotated[
        str | None, typer.Option("--at", metavar="BACKUP", help="The backup to restore; default: the newest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Restore a backup into an empty database and an empty lake: those that the settings name.

    After a crash, run it again to continue. Exits with 1 if data is lost, and lists it.
    """
    with _report_refusals():
        known = _settings()
        from tarn.main import run_restore

        restored, reconciliation = run_restore(known, location, at)
        recovery_output.show_restored(restored, reconciliation, output.CommandOutput(as_json))
        if reconciliation.is_lossy:
            raise typer.Exit(1)


def reconcile(
    apply: Annotated[bool, typer.Option("--apply", help="Apply the changes. Without this, only list them.")] = False,
    as_json: Json = False,
) -> None:
    """Reconcile a database and a lake that were restored separately, from different points in time.

    No API or worker may run. Exits with 1 if data is lost, and lists it.
    """
    with _report_refusals():
        known = _settings()
        from tarn.main import run_reconcile

        reconciliation = run_reconcile(known, apply)
        recovery_output.show_reconciled(reconciliation, output.CommandOutput(as_json))
        if reconciliation.is_lossy:
            raise typer.Exit(1)


def executor() -> None:
    """Run an executor of Spark on Kubernetes: Spark starts it, in a pod of its own."""
    with _report_refusals():
        # Its environment is Spark's, without Tarn's settings: restrict its files to this user.
        os.umask(0o077)
        from tarn.main import run_executor

        run_executor()


def settings() -> None:
    """Print every setting, as a Markdown table."""
    from tarn.settings import settings_table

    typer.echo(settings_table(), nl=False)


def _settings() -> "Settings":
    """Load the settings and set the umask, before what takes seconds to import: a wrong setting is reported at once.

    Deprecated names of settings are reported on standard error.

    Every process of the server passes here before it writes a file, and its child processes inherit the umask: the
    worker, parsers, loaders, the query process, Spark's JVM and its Python workers. Raises StartRefused.
    """
    from tarn.settings import deprecation_warnings, load_settings

    known = load_settings()
    for warning in deprecation_warnings():
        typer.echo(f"tarn: {warning}", err=True)
    os.umask(int(known.umask, 8))
    return known


@contextmanager
def _report_refusals() -> Iterator[None]:
    """Print StartRefused and TarnError as one line and exit with 2."""
    from tarn.errors import StartRefused, TarnError

    try:
        yield
    except (StartRefused, TarnError) as error:
        typer.echo(f"tarn: {error}", err=True)
        raise typer.Exit(2) from None
