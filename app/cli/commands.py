"""The `tarn` command and its processes; what speaks HTTP is in modules of its own."""

import sys
from typing import Annotated

import typer

from app.errors import StartRefused, TarnError
from app.settings import load_settings, settings_table

app = typer.Typer(
    name="tarn", no_args_is_help=True, pretty_exceptions_enable=False, help="A lakehouse for FollowTheMoney data."
)


@app.command()
def serve() -> None:
    """Run everything on this machine: API and worker, migrating the database first."""
    from app.main import run_serve

    run_serve(load_settings())


@app.command()
def api() -> None:
    """Run the API alone."""
    from app.main import run_api

    run_api(load_settings())


@app.command()
def worker(until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False) -> None:
    """Run a worker alone."""
    from app.main import run_worker

    run_worker(load_settings(), until_stdin_closes)


@app.command()
def migrate() -> None:
    """Bring the database to the schema of this version."""
    from app.main import run_migrate

    run_migrate(load_settings())


@app.command()
def settings() -> None:
    """Print every setting, as a Markdown table."""
    typer.echo(settings_table(), nl=False)


def main() -> None:
    """Run the command. What cannot start says so in one sentence."""
    try:
        app()
    except (StartRefused, TarnError) as error:
        sys.stderr.write(f"tarn: {error}\n")
        sys.exit(2)
