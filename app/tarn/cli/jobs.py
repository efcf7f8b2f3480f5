"""Jobs of client commands: start one, wait for it, print it; the arguments that such commands share."""

from typing import Annotated, Any

import typer
from tarn_client.jobs import require_success, wait_for_job
from tarn_client.paths import path_of

from tarn.cli.completion import dataset_names
from tarn.cli.connection import DATASETS
from tarn.cli.session import CommandSession

Name = Annotated[str, typer.Argument(metavar="DATASET", autocompletion=dataset_names)]
Wait = Annotated[bool, typer.Option(help="Wait until the job has finished.")]

SHOWN_PROPERTIES = 5
"""Number of properties listed in the summary of omitted values."""


def outcome(session: CommandSession, job: dict[str, Any]) -> None:
    """Print a job: in full as JSON or while it runs; otherwise only its result."""
    result = {field: value for field, value in (job["result"] or {}).items() if field != "operation"}
    over = job["finished"] is not None and not session.output.as_json
    omitted = result.get("omitted") or {"count": 0}
    summary = {field: job[field] for field in ("operation", "dataset", "state")} | result
    summary |= {"omitted": omitted["count"]} if "omitted" in result else {}
    session.output.record(summary if over else job)
    if omitted["count"]:
        session.output.note(_omitted_summary(omitted))


def _omitted_summary(omitted: dict[str, Any]) -> str:
    """Return one line on the values that a job omitted: the count, the properties, and the first value."""
    counts = sorted(omitted["by_property"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count}" for name, count in counts[:SHOWN_PROPERTIES])
    others = len(counts) - SHOWN_PROPERTIES
    more = f" and {others} other properties" if others > 0 else ""
    first = omitted["first"][0]
    line = "" if first["line"] is None else f"line {first['line']}, "
    example = f"{line}{first['property']} {first['value']!r}: {first['reason']}"
    return f"{omitted['count']} values were left out: {shown}{more}; the first: {example}"


def start_job(
    session: CommandSession, dataset: str, operation: str, body: dict[str, Any], wait: bool
) -> dict[str, Any]:
    """Start a job, and wait for its end if `wait`. Raises the job's problem if it failed."""
    return start_and_wait(session, operation_path(dataset, operation), body, wait)


def operation_path(dataset: str, operation: str) -> str:
    """Return the path that starts an operation of a dataset."""
    return path_of(DATASETS, dataset, "operations", operation)


def start_and_wait(session: CommandSession, path: str, body: dict[str, Any], wait: bool) -> dict[str, Any]:
    """Start a job, and wait for its end if `wait`. Raises the job's problem if it failed."""
    job = session.connection.write("POST", path, body)
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = require_success(wait_for_job(session.connection, job["id"]))
    return job
