"""Commands that are processes of the server. What they run is imported when they run: clients start without it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

PANEL = "Processes"


def add_processes(app: typer.Typer) -> None:
    """Give the command its processes."""
    for process in (serve, api, worker, migrate, executor, settings):
        app.command(rich_help_panel=PANEL)(process)


def serve() -> None:
    """Run everything on this machine: API and worker, migrating the database first."""
    with _refusals_in_a_sentence():
        from app.main import run_serve
        from app.settings import load_settings

        run_serve(load_settings())


def api() -> None:
    """Run the API alone."""
    with _refusals_in_a_sentence():
        from app.main import run_api
        from app.settings import load_settings

        run_api(load_settings())


def worker(until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False) -> None:
    """Run a worker alone."""
    with _refusals_in_a_sentence():
        from app.main import run_worker
        from app.settings import load_settings

        run_worker(load_settings(), until_stdin_closes)


def migrate() -> None:
    """Bring the database to the schema of this version."""
    with _refusals_in_a_sentence():
        from app.main import run_migrate
        from app.settings import load_settings

        run_migrate(load_settings())


def executor() -> None:
    """Run an executor of Spark on Kubernetes: Spark starts it, in a pod of its own."""
    with _refusals_in_a_sentence():
        from app.main import run_executor

        run_executor()


def settings() -> None:
    """Print every setting, as a Markdown table."""
    from app.settings import settings_table

    typer.echo(settings_table(), nl=False)


@contextmanager
def _refusals_in_a_sentence() -> Iterator[None]:
    """What cannot start says so in one sentence, and exits with 2."""
    from app.errors import StartRefused, TarnError

    try:
        yield
    except (StartRefused, TarnError) as error:
        typer.echo(f"tarn: {error}", err=True)
        raise typer.Exit(2) from None
