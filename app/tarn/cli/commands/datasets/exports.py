"""Exports: files that are made of a dataset, and fetched."""

from typing import Annotated, Any

import typer

from tarn.cli.commands.coordination.jobs import outcome
from tarn.cli.commands.coordination.operations import Name, Wait, ask
from tarn.cli.output.invalid_entities import OmittedEntities
from tarn.cli.output.streams import print_bytes
from tarn.cli.paths import at
from tarn.cli.session import CommandSession

KINDS = "statements, entities, statistics, documents, graph, delta, index"


def make(
    session: CommandSession,
    dataset: Name,
    force: Annotated[bool, typer.Option(help="Make what is fresh, too.")] = False,
    wait: Wait = True,
) -> None:
    """Make every export that is not fresh."""
    job = ask(session, dataset, "make", {"force": force}, wait)
    outcome(session, job)
    if job["result"] is not None:
        _summarise(dataset, job["result"])


def export(
    session: CommandSession,
    dataset: Name,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {KINDS}, or the name of a file.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Fetch it, too; - for standard output.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Make it though it is fresh.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Make one export if it is not fresh, and fetch it.

    Example: tarn export donations entities -o - | ftm validate
    """
    job = ask(session, dataset, "export", {"kinds": [kind], "force": force}, wait=True)
    if out is None:
        outcome(session, job)
        _summarise(dataset, job["result"])
        return
    (wanted,) = (one["kind"] for one in job["result"]["made"] + job["result"]["skipped"])
    (found,) = (one for one in _listed(session, dataset) if one["kind"] == wanted)
    path = at("/v1/datasets", dataset, "exports", found["name"])
    print_bytes(session, path, found["media_type"], {}, out, quiet)
    # Of the file that was fetched, which may be newer than the job's.
    _summarise(dataset, found, found["name"])


def exports(session: CommandSession, dataset: Name) -> None:
    """List what was exported, and whether it is fresh."""
    session.output.table(_listed(session, dataset), "name", "seq", "made", "size", "invalid", "fresh", "reason")


def _summarise(dataset: str, result: dict[str, Any], name: str | None = None) -> None:
    """Print how many entities an export or the files of a job leave out, if any."""
    invalid = OmittedEntities(dataset)
    # Null if it is not known, and missing if the server is of an older version.
    invalid.count = result.get("invalid") or 0
    invalid.summarise(name)


def _listed(session: CommandSession, dataset: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = session.client.document("GET", at("/v1/datasets", dataset, "exports"))["results"]
    return found
