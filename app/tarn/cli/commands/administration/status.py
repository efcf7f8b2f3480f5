"""How the lake's workers are."""

from tarn.cli.session import CommandSession


def status(session: CommandSession) -> None:
    """Show the workers, what waits in the journals, and the jobs that run."""
    found = session.client.document("GET", "/v1/admin/worker")
    session.output.record(found)
    if not found["workers"]:
        session.output.note("no worker has given a sign of life: one that was just started needs a few seconds")
