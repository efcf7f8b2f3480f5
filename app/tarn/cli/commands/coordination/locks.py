"""Locks: names that one process at a time holds, for a while."""

from typing import Annotated

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.commands.datasets.entities import Dataset
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Locks: names that one process at a time holds, for a while.")

ADMIN = "/v1/admin/locks"

Name = Annotated[str, typer.Argument(metavar="NAME", help="The lock's name.")]
Token = Annotated[str, typer.Argument(metavar="TOKEN", help="What you got when you took it.")]
Ttl = Annotated[float, typer.Option(metavar="SECONDS", help="For how long, unless it is refreshed.")]


@client_command(app, "list")
def list_locks(session: CommandSession, dataset: Dataset) -> None:
    """List your locks on a dataset that were not given back."""
    locks = session.client.each(at(BASE, dataset, "locks"))
    session.output.table(locks, "name", "holder", "fence", "taken", "expires")


@client_command(app, "take")
def take(
    session: CommandSession,
    dataset: Dataset,
    name: Name,
    ttl: Ttl = 60,
    holder: Annotated[str, typer.Option(help="Who others are told holds it.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the token alone.")] = False,
) -> None:
    """Take a lock that is free or has expired; exits with 1 if somebody else holds it.

    Example: TOKEN=$(tarn locks take donations nightly --ttl 600 --quiet)
    """
    held = session.client.document("PUT", at(BASE, dataset, "locks", name), {"ttl": ttl, "holder": holder})
    if quiet:
        typer.echo(held["token"])
    else:
        session.output.record(held)


@client_command(app, "refresh")
def refresh(session: CommandSession, dataset: Dataset, name: Name, token: Token, ttl: Ttl = 60) -> None:
    """Hold a lock on; exits with 1 if it was lost."""
    held = session.client.document("PUT", at(BASE, dataset, "locks", name), {"ttl": ttl, "token": token})
    session.output.record(held)


@client_command(app, "release")
def release(session: CommandSession, dataset: Dataset, name: Name, token: Token) -> None:
    """Give a lock back."""
    session.client.request("DELETE", at(BASE, dataset, "locks", name), params={"token": token})
    session.output.note(f"the lock {name} is free")


@client_command(app, "all")
def all_locks(session: CommandSession) -> None:
    """List everybody's locks; for the lake's administrator."""
    session.output.table(session.client.each(ADMIN), "id", "dataset", "tenant", "name", "holder", "fence", "expires")


@client_command(app, "force")
def force(
    session: CommandSession, lock_id: Annotated[str, typer.Argument(metavar="ID", help="As `all` lists it.")]
) -> None:
    """Free a lock, whoever holds it; for the lake's administrator."""
    session.output.record(session.client.document("DELETE", at(ADMIN, lock_id)))
