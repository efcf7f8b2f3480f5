"""API keys of tenants."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from tarn.cli.failures import Misuse
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="API keys of tenants.")

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]

UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def moment(text: str) -> str:
    """When a key expires: a moment in ISO 8601, in UTC unless it says otherwise, or a time from now such as 30d."""
    span = re.fullmatch(r"(\d+)([hdw])", text)
    try:
        when = datetime.now(UTC) + timedelta(**{UNITS[span[2]]: int(span[1])}) if span else datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a moment such as 2030-01-31 nor a time such as 12h, 30d or 8w"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).isoformat()


@client_command(app, "list")
def list_keys(session: CommandSession, tenant: Tenant) -> None:
    """List a tenant's keys, without their secrets."""
    keys = session.client.each(at("/v1/admin/tenants", tenant, "keys"))
    session.output.table(keys, "id", "label", "created", "expires", "revoked")


@client_command(app, "create")
def create(
    session: CommandSession,
    tenant: Tenant,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    expires: Annotated[
        str | None,
        typer.Option(metavar="WHEN", parser=moment, help="2030-01-31, 2030-01-31T12:00+01:00, 12h, 30d or 8w."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the key and nothing else.")] = False,
) -> None:
    """Make a key for a tenant. It is shown this once.

    Example: KEY=$(tarn keys create alice --expires 30d --quiet)
    """
    if quiet and session.output.as_json:
        raise Misuse("--quiet and --json are two forms of one answer: give one of them")
    new = {"label": label, "expires": expires}
    created = session.client.document("POST", at("/v1/admin/tenants", tenant, "keys"), new)
    if quiet:
        typer.echo(created["key"])
        return
    session.output.record(created)
    session.output.note("keep the key now: it is not shown again")


@client_command(app, "revoke")
def revoke(session: CommandSession, key_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a key by its id, at once."""
    session.output.record(session.client.document("DELETE", at("/v1/admin/keys", key_id)))
