"""`tarn grants`: list, add and remove the access levels of a tenant on datasets."""

from typing import Annotated, Literal

import typer
from tarn_client.paths import path_of

from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="List, add and remove the access levels of a tenant on datasets.")

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's name.")]
LevelName = Literal["read", "write", "maintain", "admin"]
"""The levels of `tarn.model.tenant`, repeated because importing it would slow down every command."""


@client_command(app, "list")
def list_grants(session: CommandSession, tenant: Tenant) -> None:
    """List a tenant's grants."""
    grants = session.connection.each(path_of("/v1/admin/tenants", tenant, "grants"))
    session.output.table(grants, "id", "dataset", "level", "created")


@client_command(app, "add")
def add(
    session: CommandSession,
    tenant: Tenant,
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="A dataset's name, with * for any run of characters.")
    ],
    level: Annotated[
        LevelName,
        typer.Argument(metavar="LEVEL", help="read, write, maintain or admin; each includes the ones before it."),
    ],
) -> None:
    """Grant a tenant a level on the datasets that a pattern matches.

    Example: tarn grants add alice 'leaks_*' write
    """
    new = {"dataset": dataset, "level": level}
    session.output.record(session.connection.write("POST", path_of("/v1/admin/tenants", tenant, "grants"), new))


@client_command(app, "remove")
def remove(session: CommandSession, grant_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Remove a grant by its id, effective immediately."""
    session.connection.write("DELETE", path_of("/v1/admin/grants", grant_id))
    session.output.note(f"the grant {grant_id} was removed")
