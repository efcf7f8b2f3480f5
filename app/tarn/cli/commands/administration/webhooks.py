"""Webhooks: where tenants' events are sent."""

from pathlib import Path
from typing import Annotated

import typer

from tarn.cli.failures import Misuse
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, Yes, client_command

app = typer.Typer(no_args_is_help=True, help="Webhooks: where tenants' events are sent.")

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]


def place(tenant: str) -> str:
    return at("/v1/admin/tenants", tenant, "webhooks")


@client_command(app, "show")
def show(session: CommandSession, tenant: Tenant) -> None:
    """Show a tenant's webhook and how its deliveries go."""
    session.output.record(session.client.document("GET", place(tenant)))


@client_command(app, "set")
def set_webhook(
    session: CommandSession,
    tenant: Tenant,
    address: Annotated[str, typer.Argument(metavar="URL", help="Where events are sent.")],
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            allow_dash=True,
            help="A file with the secret that deliveries are signed with, - for standard input. "
            "Needed the first time; without it the one that is there stays.",
        ),
    ] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only these kinds; repeatable.")] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", help="Only these datasets, with * for any run of characters; repeatable."),
    ] = None,
) -> None:
    """Send a tenant's events to a URL, from now on; one that was given up is tried again.

    Example: openssl rand -hex 32 | tarn webhooks set alice https://alice.example.org/tarn --secret-file -
    """
    new: dict[str, object] = {"url": address, "kinds": kind or []}
    if dataset:
        new["datasets"] = dataset
    if secret_file is not None:
        new["secret"] = _secret(secret_file)
    session.output.record(session.client.document("PUT", place(tenant), new))


@client_command(app, "remove")
def remove(session: CommandSession, tenant: Tenant, yes: Yes = False) -> None:
    """Send a tenant nothing any more."""
    session.confirm(f"Remove the webhook of {tenant}?", yes)
    session.client.request("DELETE", place(tenant))
    session.output.note(f"the webhook of {tenant} is removed")


def _secret(path: Path) -> str:
    try:
        text = typer.get_text_stream("stdin").read() if str(path) == "-" else path.read_text()
    except (OSError, ValueError) as error:
        raise Misuse(f"the secret in {path} cannot be read: {error}") from None
    return text.strip()
