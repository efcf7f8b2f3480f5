"""`tarn top`: live view of journals, running jobs, workers and tenants."""

import sys
import time
from collections import Counter
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tarn_client.paths import path_of

from tarn.cli.output.tables import as_table, print_table
from tarn.cli.session import CommandSession

if TYPE_CHECKING:
    from rich.console import Group
    from tarn_client.connection import Connection

TENANTS = "/v1/admin/tenants"
MOST_TENANTS = 20
COLUMNS = {
    "journal": ("dataset", "rows", "waiting"),
    "running": ("operation", "dataset", "tenant", "progress", "since"),
    "workers": ("host", "pid", "seen"),
    "tenants": ("tenant", "running", "statements", "bytes"),
}


def top(
    session: CommandSession,
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Seconds between two updates.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once and exit; implied in a pipe and by --json.")
    ] = False,
) -> None:
    """Show live activity: journal depth, flush lag, jobs, workers and tenants. Ctrl-C ends it."""
    if session.output.as_json:
        session.output.json(_read_state(session.connection)[0])
    elif once or not sys.stdout.isatty():
        print_table(_render(*_read_state(session.connection)))
    else:
        _watch(session.connection, every)


def _watch(connection: "Connection", every: float) -> None:
    from rich.live import Live

    try:
        with Live(_render(*_read_state(connection)), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_render(*_read_state(connection)), refresh=True)
    except KeyboardInterrupt:
        return


def _read_state(connection: "Connection") -> tuple[dict[str, Any], datetime]:
    """Return the server's workload and tenants, and the server's time."""
    response = connection.request("GET", "/v1/admin/worker")
    tenants = [
        {"tenant": each["name"], **connection.read(path_of(TENANTS, each["name"], "limits"))}
        for each in connection.each(TENANTS, limit=MOST_TENANTS)
    ]
    return {**response.json(), "tenants": tenants}, parsedate_to_datetime(response.headers["Date"])


def _render(work: dict[str, Any], now: datetime) -> "Group":
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(summary(work, now), style="bold")]
    for title, rows in _rows(work, now).items():
        if rows:
            parts += [Text(f"\n{title}", style="bold"), as_table(rows, COLUMNS[title], header=True)]
    return Group(*parts)


def summary(work: dict[str, Any], now: datetime) -> str:
    """Return the workload as one line."""
    waiting, queued = work["journal"], sum(each["jobs"] for each in work["jobs"] if each["state"] == "queued")
    rows = sum(each["rows"] for each in waiting)
    lag = f", the oldest for {since(waiting[0]['oldest'], now)}" if waiting else ""
    return (
        f"{rows:,} rows wait in {len(waiting)} journals{lag}; "
        f"{len(work['running'])} jobs run and {queued} wait; {len(work['workers'])} workers"
    )


def _rows(work: dict[str, Any], now: datetime) -> dict[str, list[dict[str, Any]]]:
    busy = Counter(job["tenant"] for job in work["running"])
    return {
        "journal": [{**each, "waiting": since(each["oldest"], now)} for each in work["journal"]],
        "running": [
            {**job, "progress": how_far(job["progress"]), "since": since(job["started"], now)}
            for job in work["running"]
        ],
        "workers": [{**each, "seen": f"{since(each['seen'], now)} ago"} for each in work["workers"]],
        "tenants": [
            {
                "tenant": each["tenant"],
                "running": busy[each["tenant"]],
                "statements": each["used_statements"],
                "bytes": each["used_bytes"],
            }
            for each in work["tenants"]
        ],
    }


def how_far(progress: dict[str, Any] | None) -> str | None:
    """Return a job's progress as text; None if it reports none."""
    if progress is None:
        return None
    total = "" if progress["total"] is None else f" of {progress['total']:,}"
    return f"{progress['done']:,}{total} {progress['unit']}"


def since(moment: str | None, now: datetime) -> str:
    """Return the time that has passed since a moment as short text."""
    if moment is None:
        return "-"
    seconds = max(0, round((now - datetime.fromisoformat(moment)).total_seconds()))
    minutes, hours = seconds // 60, seconds // 3600
    return f"{seconds} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{hours} h"
