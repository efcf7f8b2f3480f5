"""How the lake's workers are."""

from app.cli.session import Session


def status(session: Session) -> None:
    """Show the workers, what waits in the journals, and the jobs that run."""
    session.output.record(session.client.document("GET", "/v1/admin/worker"))
