"""Jobs: long work, looked at, waited for, given up or tried again."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarn.cli.commands.coordination.events import followed, tell
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

if TYPE_CHECKING:
    from tarn.cli.connection import Client

BASE = "/v1/jobs"
app = typer.Typer(no_args_is_help=True, help="Jobs: long work that the server does in the background.")

JobId = Annotated[str, typer.Argument(metavar="ID")]

SHOWN_PROPERTIES = 5
"""Properties that the summary of omitted values names."""

LONGEST_WAIT = 60.0
"""Seconds that one request waits: some proxies break off what is silent for longer."""


def awaited(client: "Client", job_id: str, seconds: float) -> dict[str, Any]:
    """The job when it is over, or as it is when the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        wait = min(left, LONGEST_WAIT)
        job = client.document("GET", at(BASE, job_id), params={"wait": wait}, wait=wait)
        if job["finished"] is not None or left <= LONGEST_WAIT:
            return job


def outcome(session: CommandSession, job: dict[str, Any]) -> None:
    """Print a job that was asked for: all of it, but to people, when it is over, only what came of it."""
    result = {field: value for field, value in (job["result"] or {}).items() if field != "operation"}
    over = job["finished"] is not None and not session.output.as_json
    omitted = result.get("omitted") or {"count": 0}
    told = {field: job[field] for field in ("operation", "dataset", "state")} | result
    told |= {"omitted": omitted["count"]} if "omitted" in result else {}
    session.output.record(told if over else job)
    if omitted["count"]:
        session.output.note(_omitted_summary(omitted))


def _omitted_summary(omitted: dict[str, Any]) -> str:
    """One line on the values that a job left out: how many, of which properties, and the first of them."""
    counts = sorted(omitted["by_property"].items(), key=lambda one: -one[1])
    shown = ", ".join(f"{name} {count}" for name, count in counts[:SHOWN_PROPERTIES])
    others = len(counts) - SHOWN_PROPERTIES
    more = f" and {others} other properties" if others > 0 else ""
    first = omitted["first"][0]
    line = "" if first["line"] is None else f"line {first['line']}, "
    example = f"{line}{first['property']} {first['value']!r}: {first['reason']}"
    return f"{omitted['count']} values were left out: {shown}{more}; the first: {example}"


@client_command(app, "list")
def list_jobs(
    session: CommandSession, limit: Annotated[int, typer.Option(min=1, help="At most so many jobs.")] = 100
) -> None:
    """List your jobs, newest first; the lake's administrator sees everybody's."""
    jobs = session.client.each(BASE, limit)
    session.output.table(jobs, "id", "operation", "dataset", "state", "created", "finished")


@client_command(app, "show")
def show(
    session: CommandSession,
    job_id: JobId,
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Wait so long for the job to be over.")] = 0,
) -> None:
    """Show a job, at once or when it is over."""
    session.output.record(awaited(session.client, job_id, wait))


@client_command(app, "follow")
def follow(session: CommandSession, job_id: JobId) -> None:
    """Show what becomes of a job, a line each, until it is over."""

    def over() -> bool:
        return session.client.document("GET", at(BASE, job_id))["finished"] is not None

    for event in followed(session, at(BASE, job_id, "events"), None, over):
        tell(session, event)


@client_command(app, "cancel")
def cancel(session: CommandSession, job_id: JobId) -> None:
    """Give a job up: at once if it waits, at its next step if it runs. What is over stays as it is."""
    session.output.record(session.client.document("DELETE", at(BASE, job_id)))


@client_command(app, "retry")
def retry(session: CommandSession, job_id: JobId) -> None:
    """Try a job again that failed or was cancelled."""
    session.output.record(session.client.document("POST", at(BASE, job_id, "retry")))
