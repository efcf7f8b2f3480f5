"""Operations: work on a dataset that is asked for by hand and done by a job."""

import math
from typing import Annotated, Any

import typer

from tarn.cli.commands.coordination.jobs import awaited, outcome
from tarn.cli.completion import dataset_names
from tarn.cli.failures import Cancelled, ProblemAnswered
from tarn.cli.options import Quiet
from tarn.cli.output.progress import progress
from tarn.cli.paths import at
from tarn.cli.session import CommandSession

Name = Annotated[str, typer.Argument(metavar="DATASET", autocompletion=dataset_names)]
BETWEEN_LOOKS = 1.0
"""Seconds between two looks at how far a job is."""

Wait = Annotated[bool, typer.Option(help="Wait until it is done.")]


def flush(
    session: CommandSession,
    dataset: Annotated[
        str | None,
        typer.Argument(metavar="[DATASET]", help="One dataset instead of all.", autocompletion=dataset_names),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the snapshot is made.")] = True,
) -> None:
    """Flush what waits in the journal into snapshots: of one dataset, or of all that you may maintain."""
    path = "/v1/operations/flush" if dataset is None else _path(dataset, "flush")
    _do(session, path, {}, wait)


def compact(
    session: CommandSession,
    dataset: Name,
    force: Annotated[bool, typer.Option(help="Everything, and not only where it is worth it.")] = False,
    wait: Wait = True,
) -> None:
    """Fold fresh files, and what happened to older ones, into sorted runs."""
    _do(session, _path(dataset, "compact"), {"force": force}, wait)


def optimize(session: CommandSession, dataset: Name, wait: Wait = True) -> None:
    """Pack small files into larger ones."""
    _do(session, _path(dataset, "optimize"), {}, wait)


def vacuum(
    session: CommandSession,
    dataset: Name,
    retention_hours: Annotated[
        float | None, typer.Option(min=0, help="Keep what is younger, instead of what the policy keeps.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Delete nothing, and tell what would be deleted.")] = False,
    override_floor: Annotated[bool, typer.Option(help="Allow less than 24 hours.")] = False,
    wait: Wait = True,
) -> None:
    """Give up old snapshots, and delete what nothing needs any more."""
    body: dict[str, Any] = {"dry_run": dry_run, "override_floor": override_floor}
    if retention_hours is not None:
        body["retention_hours"] = retention_hours
    _do(session, _path(dataset, "vacuum"), body, wait)


def verify(
    session: CommandSession,
    dataset: Name,
    repair: Annotated[bool, typer.Option(help="Make whole again what can be made whole from the rest.")] = False,
    wait: Wait = True,
) -> None:
    """Look whether all that a dataset consists of is there and fits together. Exits with 1 if it does not."""
    job = _do(session, _path(dataset, "verify"), {"repair": repair}, wait)
    findings = (job["result"] or {}).get("findings", ())
    if not all(finding["repaired"] for finding in findings):
        raise typer.Exit(1)


def revert(
    session: CommandSession,
    dataset: Name,
    to: Annotated[str | None, typer.Option(help="Back to this snapshot: id, number, ref or moment.")] = None,
    undo: Annotated[str | None, typer.Option(help="Take back what this one snapshot did.")] = None,
    message: Annotated[str | None, typer.Option(help="Why.")] = None,
    wait: Wait = True,
) -> None:
    """Make an older state the present one, or take back what one snapshot did."""
    if (to is None) == (undo is None):
        raise typer.BadParameter("say either --to or --undo")
    given = {"to": to, "undo": undo, "message": message}
    _do(session, _path(dataset, "revert"), {name: value for name, value in given.items() if value is not None}, wait)


def purge(
    session: CommandSession,
    dataset: Name,
    entity_ids: Annotated[list[str], typer.Argument(metavar="ENTITY...")],
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Every older snapshot is given up; nothing can be brought back.")
    ] = False,
    wait: Wait = True,
) -> None:
    """Erase entities for good: from every file, with every older snapshot."""
    if not confirm:
        raise typer.BadParameter("nothing can be brought back: say --confirm")
    _do(session, _path(dataset, "purge"), {"entity_ids": entity_ids, "confirm": True}, wait)


def crawl(
    session: CommandSession,
    dataset: Name,
    uri: Annotated[str, typer.Argument(metavar="URI", help="A folder, a store's prefix, or an index page.")],
    prefix: Annotated[str, typer.Option(help="Only paths that begin so.")] = "",
    glob: Annotated[list[str] | None, typer.Option(help="Only paths that fit; may be given again.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No paths that fit; may be given again.")] = None,
    existing: Annotated[
        str, typer.Option(metavar="MODE", help="skip_path, skip_checksum or overwrite: what the archive has.")
    ] = "skip_path",
    origin: Annotated[str, typer.Option(help="Of the files and their Documents.")] = "crawl",
    wait: Wait = True,
    quiet: Quiet = False,
) -> None:
    """Let the server take all files below a place into the archive, with their Documents.

    Example: tarn crawl donations https://example.org/files/ --glob '*.pdf'
    """
    body = {"uri": uri, "prefix": prefix, "existing": existing, "origin": origin}
    job = session.client.document(
        "POST", _path(dataset, "crawl"), body | {"glob": glob or [], "exclude": exclude or []}
    )
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = ended_well(_watched(session, job["id"], quiet))
    outcome(session, job)


def ask(session: CommandSession, dataset: str, operation: str, body: dict[str, Any], wait: bool) -> dict[str, Any]:
    """Ask for a job, and wait for its end if that is wanted. Raises what it failed of."""
    return _awaited(session, _path(dataset, operation), body, wait)


def _path(dataset: str, operation: str) -> str:
    return at("/v1/datasets", dataset, "operations", operation)


def _do(session: CommandSession, path: str, body: dict[str, Any], wait: bool) -> dict[str, Any]:
    """Ask for a job, wait for its end if that is wanted, and show it. Raises what it failed of."""
    job = _awaited(session, path, body, wait)
    outcome(session, job)
    return job


def _awaited(session: CommandSession, path: str, body: dict[str, Any], wait: bool) -> dict[str, Any]:
    job = session.client.document("POST", path, body)
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = ended_well(awaited(session.client, job["id"], math.inf))
    return job


def _watched(session: CommandSession, job_id: str, quiet: bool) -> dict[str, Any]:
    """The job when it is over; how far it is, until then."""
    seen = 0
    with progress(session.output, "crawling", quiet, unit="files") as passed:
        while True:
            job = awaited(session.client, job_id, BETWEEN_LOOKS)
            done = (job["progress"] or {"done": 0})["done"]
            passed(0, done - seen)
            seen = done
            if job["finished"] is not None:
                return job


def ended_well(job: dict[str, Any]) -> dict[str, Any]:
    """A job that came to a good end. Raises what it failed of."""
    if job["state"] == "cancelled":
        raise Cancelled(f"the job {job['id']} was cancelled")
    if job["problem"] is not None:
        raise ProblemAnswered(job["problem"])
    return job
