"""`tarn refs`: list, set, show and delete names of snapshots."""

from typing import Annotated

import typer
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS
from tarn.cli.options import Dataset
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(
    no_args_is_help=True,
    help="List, set, show and delete refs: names of snapshots, which do not expire while they have one.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The ref's name.")]


@client_command(app, "list")
def list_refs(session: CommandSession, dataset: Dataset) -> None:
    """List a dataset's refs."""
    refs = session.connection.each(path_of(DATASETS, dataset, "refs"))
    session.output.table(refs, "name", "seq", "snapshot", "tenant", "updated")


@client_command(app, "set")
def set_ref(
    session: CommandSession,
    dataset: Dataset,
    name: Name,
    snapshot: Annotated[str, typer.Argument(metavar="[SNAPSHOT]", help="The snapshot's id or number.")] = "latest",
) -> None:
    """Set a ref to a snapshot, by default the latest; an existing ref is moved.

    Example: tarn refs set donations published 12
    """
    session.output.record(
        session.connection.write("PUT", path_of(DATASETS, dataset, "refs", name), {"snapshot": snapshot})
    )


@client_command(app, "show")
def show(session: CommandSession, dataset: Dataset, name: Name) -> None:
    """Show a ref."""
    session.output.record(session.connection.read(path_of(DATASETS, dataset, "refs", name)))


@client_command(app, "delete")
def delete(session: CommandSession, dataset: Dataset, name: Name) -> None:
    """Delete a ref. The snapshot then expires by the dataset's retention policy."""
    session.connection.write("DELETE", path_of(DATASETS, dataset, "refs", name))
    session.output.note(f"the ref {name} is deleted")
