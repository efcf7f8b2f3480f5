"""Refs: names for snapshots, which then stay readable."""

from typing import Annotated

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.commands.datasets.entities import Dataset
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Refs: names for snapshots, which are kept for them.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The ref's name.")]


@client_command(app, "list")
def list_refs(session: CommandSession, dataset: Dataset) -> None:
    """List a dataset's refs."""
    refs = session.client.each(at(BASE, dataset, "refs"))
    session.output.table(refs, "name", "seq", "snapshot", "tenant", "updated")


@client_command(app, "set")
def set_ref(
    session: CommandSession,
    dataset: Dataset,
    name: Name,
    snapshot: Annotated[str, typer.Argument(metavar="[SNAPSHOT]", help="Its id or number.")] = "latest",
) -> None:
    """Name a snapshot, the latest unless another is given; a ref that is there already is moved.

    Example: tarn refs set donations published 12
    """
    session.output.record(session.client.document("PUT", at(BASE, dataset, "refs", name), {"snapshot": snapshot}))


@client_command(app, "show")
def show(session: CommandSession, dataset: Dataset, name: Name) -> None:
    """Show a ref."""
    session.output.record(session.client.document("GET", at(BASE, dataset, "refs", name)))


@client_command(app, "delete")
def delete(session: CommandSession, dataset: Dataset, name: Name) -> None:
    """Delete a ref. The snapshot is then kept only as long as the dataset's policy says."""
    session.client.request("DELETE", at(BASE, dataset, "refs", name))
    session.output.note(f"the ref {name} is deleted")
