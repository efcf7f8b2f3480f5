"""`tarn tenants`: create, show, update and delete tenants, and set their limits."""

from typing import Annotated

import typer
from tarn_client.paths import path_of

from tarn.cli.failures import Misuse
from tarn.cli.session import CommandSession, Yes, client_command

BASE = "/v1/admin/tenants"
app = typer.Typer(no_args_is_help=True, help="Create, show, update and delete tenants, and set their limits.")

Tenant = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.")]


@client_command(app, "list")
def list_tenants(session: CommandSession) -> None:
    """List tenants."""
    session.output.table(session.connection.each(BASE), "name", "title", "disabled", "created")


@client_command(app, "create")
def create(
    session: CommandSession, name: Tenant, title: Annotated[str, typer.Option(help="Display title.")] = ""
) -> None:
    """Create a tenant, without keys or grants."""
    session.output.record(session.connection.write("POST", BASE, {"name": name, "title": title}))


@client_command(app, "show")
def show(session: CommandSession, name: Tenant) -> None:
    """Show a tenant."""
    session.output.record(session.connection.read(path_of(BASE, name)))


@client_command(app, "update")
def update(
    session: CommandSession,
    name: Tenant,
    title: Annotated[str | None, typer.Option(help="Display title.")] = None,
    disabled: Annotated[
        bool | None,
        typer.Option("--disable/--enable", help="Reject its keys, or accept them again.", show_default=False),
    ] = None,
) -> None:
    """Change a tenant's title, or disable and enable it."""
    changes = {"title": title, "disabled": disabled}
    change = {field: value for field, value in changes.items() if value is not None}
    if not change:
        raise Misuse("there is nothing to change: give --title, --disable or --enable")
    session.output.record(session.connection.write("PATCH", path_of(BASE, name), change))


@client_command(app, "delete")
def delete(session: CommandSession, name: Tenant, yes: Yes = False) -> None:
    """Delete a tenant with its keys and grants. Its data stays; its name cannot be used again."""
    session.confirm(f"Delete the tenant {name} with its keys and grants?", yes)
    session.connection.write("DELETE", path_of(BASE, name))
    session.output.note(f"the tenant {name} is deleted")


@client_command(app, "limits")
def limits(
    session: CommandSession,
    name: Tenant,
    rate_limit: Annotated[float | None, typer.Option(min=0, help="Requests per second; 0 for no limit.")] = None,
    rate_burst: Annotated[int | None, typer.Option(min=1, help="Requests in a burst before the rate applies.")] = None,
    statements: Annotated[int | None, typer.Option(min=0, help="Maximum number of statements it may write.")] = None,
    bytes_: Annotated[
        int | None, typer.Option("--bytes", min=0, help="Maximum number of bytes of files it may store.")
    ] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Remove its own limits, so that the server's defaults apply.")
    ] = False,
) -> None:
    """Show the limits in force for a tenant, or set its own.

    Setting replaces all its own limits: limits that are left out are reset to the server's defaults.

    Example: tarn tenants limits alice --rate-limit 50 --statements 1000000
    """
    own = {
        "rate_limit": rate_limit,
        "rate_burst": rate_burst,
        "quota_statements": statements,
        "quota_bytes": bytes_,
    }
    limits_given = {limit: value for limit, value in own.items() if value is not None}
    if defaults and limits_given:
        raise Misuse("--defaults removes all limits of the tenant: it cannot be combined with others")
    path = path_of(BASE, name, "limits")
    changed = bool(limits_given) or defaults
    in_force = session.connection.write("PUT", path, limits_given) if changed else session.connection.read(path)
    if session.output.as_json:
        session.output.json(in_force)
    else:
        session.output.record({limit: "none" if value is None else value for limit, value in in_force.items()})
