"""The audit log."""

from typing import Annotated

import typer

from app.cli.session import Session


def audit(
    session: Session,
    tenant: Annotated[str | None, typer.Option(help="Only what this tenant did.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many entries.")] = 100,
) -> None:
    """List what was written and what was refused, newest first."""
    entries = session.client.each("/v1/admin/audit", limit, tenant=tenant)
    session.output.table(entries, "at", "tenant", "action", "target", "outcome")
