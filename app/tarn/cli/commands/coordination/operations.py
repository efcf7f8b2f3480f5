"""Operation commands: flush, compact, optimize, vacuum, verify, revert, purge, crawl. Each starts a job."""

from typing import Annotated, Any

import typer
from tarn_client.jobs import require_success, wait_for_job

from tarn.cli.completion import dataset_names
from tarn.cli.jobs import Name, Wait, operation_path, outcome, start_and_wait
from tarn.cli.options import Quiet
from tarn.cli.output.progress import progress
from tarn.cli.session import CommandSession

POLL_SECONDS = 1.0
"""Seconds between two polls of a job's progress."""


def flush(
    session: CommandSession,
    dataset: Annotated[
        str | None,
        typer.Argument(metavar="[DATASET]", help="One dataset instead of all.", autocompletion=dataset_names),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the job has finished.")] = True,
) -> None:
    """Flush the journal into snapshots: of one dataset, or of all that you may maintain."""
    path = "/v1/operations/flush" if dataset is None else operation_path(dataset, "flush")
    _run_job(session, path, {}, wait)


def compact(
    session: CommandSession,
    dataset: Name,
    force: Annotated[bool, typer.Option(help="Compact all files, not only those where it saves reads.")] = False,
    wait: Wait = True,
) -> None:
    """Merge new files and the translog of older ones into sorted files."""
    _run_job(session, operation_path(dataset, "compact"), {"force": force}, wait)


def optimize(session: CommandSession, dataset: Name, wait: Wait = True) -> None:
    """Merge small files into larger ones."""
    _run_job(session, operation_path(dataset, "optimize"), {}, wait)


def vacuum(
    session: CommandSession,
    dataset: Name,
    retention_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Keep snapshots younger than this, instead of the dataset's retention policy."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Delete nothing; list what would be deleted.")] = False,
    override_floor: Annotated[bool, typer.Option(help="Allow less than 24 hours.")] = False,
    wait: Wait = True,
) -> None:
    """Expire old snapshots and delete files that nothing refers to."""
    body: dict[str, Any] = {"dry_run": dry_run, "override_floor": override_floor}
    if retention_hours is not None:
        body["retention_hours"] = retention_hours
    _run_job(session, operation_path(dataset, "vacuum"), body, wait)


def verify(
    session: CommandSession,
    dataset: Name,
    repair: Annotated[bool, typer.Option(help="Repair what can be restored from the remaining data.")] = False,
    wait: Wait = True,
) -> None:
    """Check that all files of a dataset exist and are consistent. Exits with 1 if not."""
    job = _run_job(session, operation_path(dataset, "verify"), {"repair": repair}, wait)
    findings = (job["result"] or {}).get("findings", ())
    if not all(finding["repaired"] for finding in findings):
        raise typer.Exit(1)


def revert(
    session: CommandSession,
    dataset: Name,
    to: Annotated[str | None, typer.Option(help="Snapshot to restore: id, number, ref or timestamp.")] = None,
    undo: Annotated[str | None, typer.Option(help="Undo the changes of this snapshot only.")] = None,
    message: Annotated[str | None, typer.Option(help="Reason, stored in the new snapshot.")] = None,
    wait: Wait = True,
) -> None:
    """Make an older snapshot the current state, or undo one snapshot."""
    if (to is None) == (undo is None):
        raise typer.BadParameter("give either --to or --undo")
    body = {"to": to, "undo": undo, "message": message}
    _run_job(
        session,
        operation_path(dataset, "revert"),
        {name: value for name, value in body.items() if value is not None},
        wait,
    )


def purge(
    session: CommandSession,
    dataset: Name,
    entity_ids: Annotated[list[str], typer.Argument(metavar="ENTITY...")],
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Confirm that all older snapshots expire; this cannot be undone.")
    ] = False,
    wait: Wait = True,
) -> None:
    """Erase entities permanently: from every file, and expire every older snapshot."""
    if not confirm:
        raise typer.BadParameter("a purge cannot be undone: give --confirm")
    _run_job(session, operation_path(dataset, "purge"), {"entity_ids": entity_ids, "confirm": True}, wait)


def crawl(
    session: CommandSession,
    dataset: Name,
    uri: Annotated[str, typer.Argument(metavar="URI", help="A folder, a store's prefix, or an index page.")],
    prefix: Annotated[str, typer.Option(help="Only paths with this prefix.")] = "",
    glob: Annotated[list[str] | None, typer.Option(help="Only paths that match this pattern; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Skip paths that match this pattern; repeatable.")] = None,
    existing: Annotated[
        str,
        typer.Option(metavar="MODE", help="Files that the archive has already: skip_path, skip_checksum or overwrite."),
    ] = "skip_path",
    origin: Annotated[str, typer.Option(help="Origin of the files and their Documents.")] = "crawl",
    wait: Wait = True,
    quiet: Quiet = False,
) -> None:
    """Import all files below a URI into the archive, with their Documents; the server fetches them.

    Example: tarn crawl donations https://example.org/files/ --glob '*.pdf'
    """
    body = {"uri": uri, "prefix": prefix, "existing": existing, "origin": origin}
    job = session.connection.write(
        "POST", operation_path(dataset, "crawl"), body | {"glob": glob or [], "exclude": exclude or []}
    )
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = require_success(_wait_with_progress(session, job["id"], quiet))
    outcome(session, job)


def _run_job(session: CommandSession, path: str, body: dict[str, Any], wait: bool) -> dict[str, Any]:
    """Start a job, wait for its end if `wait`, and show it. Raises the job's problem if it failed."""
    job = start_and_wait(session, path, body, wait)
    outcome(session, job)
    return job


def _wait_with_progress(session: CommandSession, job_id: str, quiet: bool) -> dict[str, Any]:
    """Show a job's progress until it is finished, and return it."""
    reported = 0
    with progress(session.output, "crawling", quiet, unit="files") as advance:
        while True:
            job = wait_for_job(session.connection, job_id, POLL_SECONDS)
            done = (job["progress"] or {"done": 0})["done"]
            advance(0, done - reported)
            reported = done
            if job["finished"] is not None:
                return job
