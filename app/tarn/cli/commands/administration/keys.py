"""`tarn keys`: list, create and revoke API keys of tenants."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from tarn_client.paths import path_of

from tarn.cli.failures import Misuse
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="List, create and revoke API keys of tenants.")

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]

UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def moment(text: str) -> str:
    """Parse an expiry: an ISO 8601 time, in UTC unless it has an offset, or a duration from now such as 30d."""
    span = re.fullmatch(r"(\d+)([hdw])", text)
    try:
        when = datetime.now(UTC) + timedelta(**{UNITS[span[2]]: int(span[1])}) if span else datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is neither a date such as 2030-01-31 nor a duration such as 12h, 30d or 8w"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).isoformat()


@client_command(app, "list")
def list_keys(session: CommandSession, tenant: Tenant) -> None:
    """List a tenant's keys, without their secrets."""
    keys = session.connection.each(path_of("/v1/admin/tenants", tenant, "keys"))
    session.output.table(keys, "id", "label", "created", "expires", "revoked")


@client_command(app, "create")
def create(
    session: CommandSession,
    tenant: Tenant,
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    expires: Annotated[
        str | None,
        typer.Option(metavar="WHEN", parser=moment, help="Expiry: 2030-01-31, 2030-01-31T12:00+01:00, 12h, 30d or 8w."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the key.")] = False,
) -> None:
    """Create a key for a tenant. The secret is shown only once.

    Example: KEY=$(tarn keys create alice --expires 30d --quiet)
    """
    if quiet and session.output.as_json:
        raise Misuse("--quiet and --json cannot be combined: give one of them")
    new = {"label": label, "expires": expires}
    created = session.connection.write("POST", path_of("/v1/admin/tenants", tenant, "keys"), new)
    if quiet:
        typer.echo(created["key"])
        return
    session.output.record(created)
    session.output.note("store the key now: it is not shown again")


@client_command(app, "revoke")
def revoke(session: CommandSession, key_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Revoke a key by its id, effective immediately."""
    session.output.record(session.connection.write("DELETE", path_of("/v1/admin/keys", key_id)))
