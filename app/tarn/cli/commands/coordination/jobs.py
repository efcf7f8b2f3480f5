"""`tarn jobs`: list, show, follow, cancel and retry background jobs."""

from typing import Annotated

import typer
from tarn_client.events import follow as follow_events
from tarn_client.jobs import JOBS, wait_for_job
from tarn_client.paths import path_of

from tarn.cli.commands.coordination.events import print_event
from tarn.cli.connection import LONG_TIMEOUT
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="List, show, follow, cancel and retry background jobs.")

JobId = Annotated[str, typer.Argument(metavar="ID")]


@client_command(app, "list")
def list_jobs(
    session: CommandSession, limit: Annotated[int, typer.Option(min=1, help="Maximum number of jobs.")] = 100
) -> None:
    """List your jobs, newest first; the lake's administrator sees all jobs."""
    jobs = session.connection.each(JOBS, limit=limit)
    session.output.table(jobs, "id", "operation", "dataset", "state", "created", "finished")


@client_command(app, "show")
def show(
    session: CommandSession,
    job_id: JobId,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Wait up to this long for the job to finish.")
    ] = 0,
) -> None:
    """Show a job, immediately or when it has finished."""
    session.output.record(wait_for_job(session.connection, job_id, wait))


@client_command(app, "follow")
def follow(session: CommandSession, job_id: JobId) -> None:
    """Print the events of a job, one line each, until it has finished."""

    def finished() -> bool:
        return session.connection.read(path_of(JOBS, job_id))["finished"] is not None

    path = path_of(JOBS, job_id, "events")
    for event in follow_events(session.connection, path, finished=finished, timeout=LONG_TIMEOUT):
        print_event(session, event)


@client_command(app, "cancel")
def cancel(session: CommandSession, job_id: JobId) -> None:
    """Cancel a job: immediately if it is queued, at its next step if it runs. A finished job is unchanged."""
    session.output.record(session.connection.write("DELETE", path_of(JOBS, job_id)))


@client_command(app, "retry")
def retry(session: CommandSession, job_id: JobId) -> None:
    """Retry a job that failed or was cancelled."""
    session.output.record(session.connection.write("POST", path_of(JOBS, job_id, "retry")))
