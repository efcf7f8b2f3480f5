"""`tarn catalog`: show the lake's metadata and datasets, and update the metadata."""

import typer
from typer.core import TyperGroup

from tarn.cli.commands.datasets.metadata import Assignments, Description, File, Summary, Title, read_metadata
from tarn.cli.failures import Misuse
from tarn.cli.session import CommandSession, client_command

PATH = "/v1/catalog"


class ShowByDefault(TyperGroup):
    """Command group that runs `show`, with its options, when no subcommand is given."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # Typer's context is a class of its own, and what is passed
        asks_for_help = args[:1] == ["--help"]
        named = bool(args) and not args[0].startswith("-")
        return super().parse_args(ctx, args if named or asks_for_help else ["show", *args])


app = typer.Typer(cls=ShowByDefault, help="Show the lake's metadata and its datasets, or update the metadata.")


@client_command(app, "show")
def show(session: CommandSession) -> None:
    """Show the lake's metadata and the datasets you may read. The default of `tarn catalog`."""
    catalog = session.connection.read(PATH)
    if session.output.as_json:
        session.output.json(catalog)
        return
    datasets = catalog.pop("datasets")
    if catalog:
        session.output.record(catalog)
        typer.echo()
    session.output.table(datasets, "name", "title")


@client_command(app, "update")
def update(
    session: CommandSession,
    title: Title = None,
    summary: Summary = None,
    description: Description = None,
    file: File = None,
    assignments: Assignments = None,
) -> None:
    """Update the lake's metadata; fields left out are unchanged.

    Example: tarn catalog update --title 'Our lake' --set publisher.name=Us
    """
    metadata = read_metadata(file, assignments, title=title, summary=summary, description=description)
    if not metadata:
        raise Misuse("there is nothing to change: give --title, --summary, --description, --set or --file")
    current = session.connection.read(PATH) if metadata.extends else None
    session.output.record(session.connection.write("PATCH", PATH, metadata.body(current)))
