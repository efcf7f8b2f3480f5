"""`tarn locks`: take, refresh and release named locks that expire."""

from typing import Annotated

import typer
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS
from tarn.cli.options import Dataset
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Take, refresh and release named locks that expire.")

ADMIN = "/v1/admin/locks"

Name = Annotated[str, typer.Argument(metavar="NAME", help="The lock's name.")]
Token = Annotated[str, typer.Argument(metavar="TOKEN", help="The token returned by `tarn locks take`.")]
Ttl = Annotated[float, typer.Option(metavar="SECONDS", help="Seconds until the lock expires unless refreshed.")]


@client_command(app, "list")
def list_locks(session: CommandSession, dataset: Dataset) -> None:
    """List your locks on a dataset that were not released."""
    locks = session.connection.each(path_of(DATASETS, dataset, "locks"))
    session.output.table(locks, "name", "holder", "fence", "taken", "expires")


@client_command(app, "take")
def take(
    session: CommandSession,
    dataset: Dataset,
    name: Name,
    ttl: Ttl = 60,
    holder: Annotated[str, typer.Option(help="Name of the holder, shown to others.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the token.")] = False,
) -> None:
    """Take a lock that is free or has expired; exits with 1 if another holder has it.

    Example: TOKEN=$(tarn locks take donations nightly --ttl 600 --quiet)
    """
    lock = session.connection.write("PUT", path_of(DATASETS, dataset, "locks", name), {"ttl": ttl, "holder": holder})
    if quiet:
        typer.echo(lock["token"])
    else:
        session.output.record(lock)


@client_command(app, "refresh")
def refresh(session: CommandSession, dataset: Dataset, name: Name, token: Token, ttl: Ttl = 60) -> None:
    """Extend a lock; exits with 1 if the lock expired or another holder has it."""
    lock = session.connection.write("PUT", path_of(DATASETS, dataset, "locks", name), {"ttl": ttl, "token": token})
    session.output.record(lock)


@client_command(app, "release")
def release(session: CommandSession, dataset: Dataset, name: Name, token: Token) -> None:
    """Release a lock."""
    session.connection.write("DELETE", path_of(DATASETS, dataset, "locks", name), params={"token": token})
    session.output.note(f"the lock {name} is free")


@client_command(app, "all")
def all_locks(session: CommandSession) -> None:
    """List the locks of all tenants; for the lake's administrator."""
    session.output.table(
        session.connection.each(ADMIN), "id", "dataset", "tenant", "name", "holder", "fence", "expires"
    )


@client_command(app, "force")
def force(
    session: CommandSession,
    lock_id: Annotated[str, typer.Argument(metavar="ID", help="The lock's id, from `tarn locks all`.")],
) -> None:
    """Release a lock regardless of its holder; for the lake's administrator."""
    session.output.record(session.connection.write("DELETE", path_of(ADMIN, lock_id)))
