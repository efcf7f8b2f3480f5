"""Webhook commands: show, set and remove the URL that a tenant's events are sent to."""

from pathlib import Path
from typing import Annotated

import typer
from tarn_client.paths import path_of

from tarn.cli.failures import Misuse
from tarn.cli.session import CommandSession, Yes, client_command

app = typer.Typer(no_args_is_help=True, help="Show, set and remove the URL that a tenant's events are sent to.")

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]


def webhook_path(tenant: str) -> str:
    return path_of("/v1/admin/tenants", tenant, "webhooks")


@client_command(app, "show")
def show(session: CommandSession, tenant: Tenant) -> None:
    """Show a tenant's webhook and the state of its deliveries."""
    session.output.record(session.connection.read(webhook_path(tenant)))


@client_command(app, "set")
def set_webhook(
    session: CommandSession,
    tenant: Tenant,
    address: Annotated[str, typer.Argument(metavar="URL", help="URL that events are sent to.")],
    secret_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            allow_dash=True,
            help="A file with the secret that deliveries are signed with, - for standard input. "
            "Required for a new webhook; without it, the current secret is kept.",
        ),
    ] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only events of these kinds; repeatable.")] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", help="Only these datasets, with * for any run of characters; repeatable."),
    ] = None,
) -> None:
    """Send a tenant's events to a URL; a webhook that was disabled after failures is enabled again.

    Example: openssl rand -hex 32 | tarn webhooks set alice https://alice.example.org/tarn --secret-file -
    """
    new: dict[str, object] = {"url": address, "kinds": kind or []}
    if dataset:
        new["datasets"] = dataset
    if secret_file is not None:
        new["secret"] = _secret(secret_file)
    session.output.record(session.connection.write("PUT", webhook_path(tenant), new))


@client_command(app, "remove")
def remove(session: CommandSession, tenant: Tenant, yes: Yes = False) -> None:
    """Remove a tenant's webhook."""
    session.confirm(f"Remove the webhook of {tenant}?", yes)
    session.connection.write("DELETE", webhook_path(tenant))
    session.output.note(f"the webhook of {tenant} is removed")


def _secret(path: Path) -> str:
    try:
        text = typer.get_text_stream("stdin").read() if str(path) == "-" else path.read_text()
    except (OSError, ValueError) as error:
        raise Misuse(f"the secret in {path} cannot be read: {error}") from None
    return text.strip()
