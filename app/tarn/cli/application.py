"""The `tarn` command: commands that run server processes, and commands that call the API.

Neither this module nor the client's modules import server code, so that a command starts fast.
"""

from typing import Annotated

import typer

from tarn.cli.commands.administration import audit, grants, keys, status, tenants, top, webhooks, whoami
from tarn.cli.commands.coordination import events, jobs, locks, operations, queue, tags
from tarn.cli.commands.datasets import (
    catalog,
    datasets,
    diff,
    entities,
    exports,
    files,
    load,
    mappings,
    refs,
    snapshots,
    statements,
)
from tarn.cli.commands.processes import add_processes
from tarn.cli.importing.command import import_data
from tarn.cli.session import client_command

LAKE, MAINTENANCE, ADMINISTRATION = "The lake", "Maintenance", "Administration"
COORDINATION = "Coordination"

app = typer.Typer(
    name="tarn",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A lakehouse for FollowTheMoney data.",
    epilog="Exit codes: 0 success, 1 refused by the server, 2 wrong usage or settings, 3 server not reachable.",
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"tarn {version('tarn')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Declare the options of `tarn` itself."""


add_processes(app)
client_command(app, "whoami", LAKE)(whoami.whoami)
client_command(app, "load", LAKE)(load.load)
client_command(app, "import", LAKE)(import_data)
app.add_typer(catalog.app, name="catalog", rich_help_panel=LAKE)
app.add_typer(datasets.app, name="datasets", rich_help_panel=LAKE)
app.add_typer(entities.app, name="entities", rich_help_panel=LAKE)
app.add_typer(statements.app, name="statements", rich_help_panel=LAKE)
app.add_typer(files.app, name="files", rich_help_panel=LAKE)
client_command(app, "crawl", LAKE)(operations.crawl)
client_command(app, "log", LAKE)(snapshots.log)
app.add_typer(snapshots.app, name="snapshot", rich_help_panel=LAKE)
client_command(app, "diff", LAKE)(diff.diff)
app.add_typer(refs.app, name="refs", rich_help_panel=LAKE)
app.add_typer(mappings.app, name="mapping", rich_help_panel=LAKE)
app.add_typer(tags.app, name="tags", rich_help_panel=COORDINATION)
app.add_typer(queue.app, name="queue", rich_help_panel=COORDINATION)
app.add_typer(locks.app, name="locks", rich_help_panel=COORDINATION)
client_command(app, "flush", LAKE)(operations.flush)
client_command(app, "make", LAKE)(exports.make)
client_command(app, "export", LAKE)(exports.export)
client_command(app, "exports", LAKE)(exports.exports)
client_command(app, "events", LAKE)(events.events)
client_command(app, "compact", MAINTENANCE)(operations.compact)
client_command(app, "optimize", MAINTENANCE)(operations.optimize)
client_command(app, "vacuum", MAINTENANCE)(operations.vacuum)
client_command(app, "verify", MAINTENANCE)(operations.verify)
client_command(app, "revert", MAINTENANCE)(operations.revert)
client_command(app, "purge", MAINTENANCE)(operations.purge)
app.add_typer(jobs.app, name="jobs", rich_help_panel=LAKE)
app.add_typer(tenants.app, name="tenants", rich_help_panel=ADMINISTRATION)
app.add_typer(keys.app, name="keys", rich_help_panel=ADMINISTRATION)
app.add_typer(grants.app, name="grants", rich_help_panel=ADMINISTRATION)
app.add_typer(webhooks.app, name="webhooks", rich_help_panel=ADMINISTRATION)
client_command(app, "audit", ADMINISTRATION)(audit.audit)
client_command(app, "status", ADMINISTRATION)(status.status)
client_command(app, "top", ADMINISTRATION)(top.top)


def main() -> None:
    """Run the command."""
    app(prog_name="tarn")
