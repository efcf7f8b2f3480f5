"""The audit log."""

from typing import Annotated

import typer

from tarn.cli.session import CommandSession


def audit(
    session: CommandSession,
    tenant: Annotated[str | None, typer.Option(help="Only what this tenant did.")] = None,
    key_id: Annotated[str | None, typer.Option(help="Only what was done, or tried, with the key of this id.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this operation, such as put_entity.")] = None,
    denied: Annotated[
        bool | None,
        typer.Option("--denied/--done", help="Only what was refused, or what was done.", show_default=False),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Only what was done to this dataset.")] = None,
    request: Annotated[str | None, typer.Option(help="Only the request of this id.")] = None,
    since: Annotated[str | None, typer.Option(metavar="MOMENT", help="Only from this moment on (ISO 8601).")] = None,
    until: Annotated[str | None, typer.Option(metavar="MOMENT", help="Only before this moment.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many entries.")] = 100,
) -> None:
    """List what was written and what was refused, newest first.

    Example: tarn audit --tenant alice --denied --since 2026-01-01T00:00:00Z
    """
    outcome = None if denied is None else "denied" if denied else "done"
    entries = session.client.each(
        "/v1/admin/audit",
        limit,
        tenant=tenant,
        key=key_id,
        action=action,
        outcome=outcome,
        dataset=dataset,
        request=request,
        since=since,
        until=until,
    )
    session.output.table(entries, "at", "tenant", "key", "action", "target", "outcome", "request")
