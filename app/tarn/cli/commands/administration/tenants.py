"""Tenants and their limits."""

from typing import Annotated

import typer

from tarn.cli.failures import Misuse
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, Yes, client_command

BASE = "/v1/admin/tenants"
app = typer.Typer(no_args_is_help=True, help="Tenants: applications with keys and grants of their own.")

Tenant = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.")]


@client_command(app, "list")
def list_tenants(session: CommandSession) -> None:
    """List tenants."""
    session.output.table(session.client.each(BASE), "name", "title", "disabled", "created")


@client_command(app, "create")
def create(session: CommandSession, name: Tenant, title: Annotated[str, typer.Option(help="Who it is.")] = "") -> None:
    """Make a tenant, without keys or grants."""
    session.output.record(session.client.document("POST", BASE, {"name": name, "title": title}))


@client_command(app, "show")
def show(session: CommandSession, name: Tenant) -> None:
    """Show a tenant."""
    session.output.record(session.client.document("GET", at(BASE, name)))


@client_command(app, "update")
def update(
    session: CommandSession,
    name: Tenant,
    title: Annotated[str | None, typer.Option(help="Who it is.")] = None,
    disabled: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Refuse its keys, or take them again.", show_default=False)
    ] = None,
) -> None:
    """Change a tenant's title, or disable and enable it."""
    given = {"title": title, "disabled": disabled}
    change = {field: value for field, value in given.items() if value is not None}
    if not change:
        raise Misuse("there is nothing to change: give --title, --disable or --enable")
    session.output.record(session.client.document("PATCH", at(BASE, name), change))


@client_command(app, "delete")
def delete(session: CommandSession, name: Tenant, yes: Yes = False) -> None:
    """Delete a tenant with its keys and grants. What it wrote stays; its name is not given out again."""
    session.confirm(f"Delete the tenant {name} with its keys and grants?", yes)
    session.client.request("DELETE", at(BASE, name))
    session.output.note(f"the tenant {name} is deleted")


@client_command(app, "limits")
def limits(
    session: CommandSession,
    name: Tenant,
    rate_limit: Annotated[float | None, typer.Option(min=0, help="Requests a second; 0 is no limit.")] = None,
    rate_burst: Annotated[int | None, typer.Option(min=1, help="Requests at once before the rate counts.")] = None,
    statements: Annotated[int | None, typer.Option(min=0, help="Statements it may write.")] = None,
    bytes_: Annotated[int | None, typer.Option("--bytes", min=0, help="Bytes of files it may store.")] = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Only the server's defaults, none of its own.")] = False,
) -> None:
    """Show the limits in force for a tenant, or set its own.

    Setting replaces all its own limits: what is left out goes back to the server's default. Name all that shall hold.

    Example: tarn tenants limits alice --rate-limit 50 --statements 1000000
    """
    own = {
        "rate_limit": rate_limit,
        "rate_burst": rate_burst,
        "quota_statements": statements,
        "quota_bytes": bytes_,
    }
    given = {limit: value for limit, value in own.items() if value is not None}
    if defaults and given:
        raise Misuse("--defaults leaves no limit of its own: give it alone")
    path = at(BASE, name, "limits")
    changed = bool(given) or defaults
    in_force = session.client.document("PUT", path, given) if changed else session.client.document("GET", path)
    if session.output.as_json:
        session.output.json(in_force)
    else:
        session.output.record({limit: "none" if value is None else value for limit, value in in_force.items()})
