"""`tarn status`: workers, journals and running jobs."""

from tarn.cli.session import CommandSession


def status(session: CommandSession) -> None:
    """Show the workers, the unflushed rows of journals, and the running jobs."""
    workload = session.connection.read("/v1/admin/worker")
    session.output.record(workload)
    if not workload["workers"]:
        session.output.note("no worker has sent a heartbeat: one that was just started needs a few seconds")
