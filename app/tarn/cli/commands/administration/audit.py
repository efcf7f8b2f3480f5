"""`tarn audit`: list the audit log."""

from typing import Annotated

import typer

from tarn.cli.session import CommandSession


def audit(
    session: CommandSession,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.")] = None,
    key_id: Annotated[
        str | None, typer.Option(help="Only requests with the key of this id, including refused ones.")
    ] = None,
    action: Annotated[str | None, typer.Option(help="Only this operation, such as put_entity.")] = None,
    denied: Annotated[
        bool | None,
        typer.Option("--denied/--done", help="Only refused requests, or only those carried out.", show_default=False),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Only requests on this dataset.")] = None,
    request: Annotated[str | None, typer.Option(help="Only the request with this id.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only entries at or after this time (ISO 8601).")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only entries before this time (ISO 8601).")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 100,
) -> None:
    """List the audit log: writes and refused requests, newest first.

    Example: tarn audit --tenant alice --denied --since 2026-01-01T00:00:00Z
    """
    outcome = None if denied is None else "denied" if denied else "done"
    entries = session.connection.each(
        "/v1/admin/audit",
        {
            "tenant": tenant,
            "key": key_id,
            "action": action,
            "outcome": outcome,
            "dataset": dataset,
            "request": request,
            "since": since,
            "until": until,
        },
        limit,
    )
    session.output.table(entries, "at", "tenant", "key", "action", "target", "outcome", "request")
