"""`tarn make`, `tarn export` and `tarn exports`: build, download and list exports."""

from typing import Annotated, Any

import typer
from tarn_client.paths import path_of

from tarn.cli.jobs import Name, Wait, outcome, start_job
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.streams import print_bytes
from tarn.cli.session import CommandSession

KINDS = "statements, entities, statistics, documents, graph, delta, index"


def make(
    session: CommandSession,
    dataset: Name,
    force: Annotated[bool, typer.Option(help="Rebuild exports that are up to date, too.")] = False,
    wait: Wait = True,
) -> None:
    """Build every export that is not up to date."""
    job = start_job(session, dataset, "make", {"force": force}, wait)
    outcome(session, job)
    if job["result"] is not None:
        _summarise(dataset, job["result"])


def export(
    session: CommandSession,
    dataset: Name,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {KINDS}, or the name of a file.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Download it to this file; - for standard output.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Rebuild it even if it is up to date.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar.")] = False,
) -> None:
    """Build one export if it is not up to date, and download it with --out.

    Example: tarn export donations entities -o - | ftm validate
    """
    job = start_job(session, dataset, "export", {"kinds": [kind], "force": force}, wait=True)
    if out is None:
        outcome(session, job)
        _summarise(dataset, job["result"])
        return
    (exported_kind,) = (each["kind"] for each in job["result"]["made"] + job["result"]["skipped"])
    (file,) = (each for each in _listed(session, dataset) if each["kind"] == exported_kind)
    path = path_of("/v1/datasets", dataset, "exports", file["name"])
    print_bytes(session, path, file["media_type"], {}, out, quiet)
    # Summarise the downloaded file, which may be newer than the job's.
    _summarise(dataset, file, file["name"])


def exports(session: CommandSession, dataset: Name) -> None:
    """List the exports of a dataset, and whether each is up to date."""
    session.output.table(_listed(session, dataset), "name", "seq", "made", "size", "invalid", "fresh", "reason")


def _summarise(dataset: str, result: dict[str, Any], name: str | None = None) -> None:
    """Print how many entities an export or the files of a job leave out, if any."""
    invalid = OmittedEntities(dataset)
    # Null if unknown, missing if the server has an older version.
    invalid.count = result.get("invalid") or 0
    invalid.summarise(name)


def _listed(session: CommandSession, dataset: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = session.connection.read(path_of("/v1/datasets", dataset, "exports"))["results"]
    return listed
