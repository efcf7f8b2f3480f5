"""A lake at work, seen live: what waits in its journals, the jobs that run, the workers, the tenants."""

import sys
import time
from collections import Counter
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarn.cli.output.tables import as_table, print_table
from tarn.cli.paths import at
from tarn.cli.session import CommandSession

if TYPE_CHECKING:
    from rich.console import Group

    from tarn.cli.connection import Client

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
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How often to look.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, as is done in a pipe and with --json.")] = False,
) -> None:
    """Watch the lake at work: journal depth, flush lag, jobs, workers and tenants. Ctrl-C ends it."""
    if session.output.as_json:
        session.output.json(_look(session.client)[0])
    elif once or not sys.stdout.isatty():
        print_table(_shown(*_look(session.client)))
    else:
        _watch(session.client, every)


def _watch(client: "Client", every: float) -> None:
    from rich.live import Live

    try:
        with Live(_shown(*_look(client)), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_shown(*_look(client)), refresh=True)
    except KeyboardInterrupt:
        return


def _look(client: "Client") -> tuple[dict[str, Any], datetime]:
    """What the server says of its work and its tenants, and when, by its own clock."""
    answer = client.request("GET", "/v1/admin/worker")
    tenants = [
        {"tenant": each["name"], **client.document("GET", at(TENANTS, each["name"], "limits"))}
        for each in client.each(TENANTS, MOST_TENANTS)
    ]
    return {**answer.json(), "tenants": tenants}, parsedate_to_datetime(answer.headers["Date"])


def _shown(work: dict[str, Any], now: datetime) -> "Group":
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(summary(work, now), style="bold")]
    for title, rows in _rows(work, now).items():
        if rows:
            parts += [Text(f"\n{title}", style="bold"), as_table(rows, COLUMNS[title], header=True)]
    return Group(*parts)


def summary(work: dict[str, Any], now: datetime) -> str:
    """All of it in one line."""
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
    """How far a job is, where it tells."""
    if progress is None:
        return None
    total = "" if progress["total"] is None else f" of {progress['total']:,}"
    return f"{progress['done']:,}{total} {progress['unit']}"


def since(moment: str | None, now: datetime) -> str:
    """How long ago something was, in words that stay short."""
    if moment is None:
        return "-"
    seconds = max(0, round((now - datetime.fromisoformat(moment)).total_seconds()))
    minutes, hours = seconds // 60, seconds // 3600
    return f"{seconds} s" if seconds < 120 else f"{minutes} min" if minutes < 120 else f"{hours} h"
