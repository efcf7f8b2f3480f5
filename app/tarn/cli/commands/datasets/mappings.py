"""Mappings: which entities the rows of an archived file stand for."""

from typing import Annotated, Any

import typer

from tarn.cli.commands.coordination.jobs import awaited, outcome
from tarn.cli.commands.coordination.operations import Wait, ended_well
from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.commands.datasets.entities import Dataset
from tarn.cli.failures import Misuse
from tarn.cli.options import Quiet
from tarn.cli.output.progress import progress
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Mappings: which entities the rows of an archived file stand for.")

Hash = Annotated[str, typer.Argument(metavar="HASH", help="The SHA-256 of the file in the archive.")]

LOOK = 1.0
"""Seconds between two looks at how far a job is."""


@client_command(app, "put")
def put(
    session: CommandSession,
    dataset: Dataset,
    content_hash: Hash,
    file: Annotated[
        typer.FileText,
        typer.Argument(metavar="FILE", encoding="utf-8", help="FtM's YAML or JSON; - is standard input."),
    ],
) -> None:
    """Keep a mapping for a file; the former one is kept as a version.

    Example: tarn mapping put donations $(sha256sum donations.csv | cut -c-64) donations.yml
    """
    from tarn.cli.input.yaml_reader import parse  # late: only who puts something needs YAML

    try:
        mapping = parse(file.read())
    except ValueError as error:
        raise Misuse(f"{file.name} is no YAML and no JSON: {error}") from None
    kept = session.client.document("PUT", _path(dataset, content_hash), mapping)
    if session.output.as_json:
        session.output.json(kept)
    else:
        session.output.note(f"the mapping for {content_hash} is kept")


@client_command(app, "get")
def get(session: CommandSession, dataset: Dataset, content_hash: Hash) -> None:
    """Print a mapping as JSON, with when it was last processed."""
    session.output.json(session.client.document("GET", _path(dataset, content_hash)))


@client_command(app, "ls")
def ls(session: CommandSession, dataset: Dataset) -> None:
    """List a dataset's mappings."""
    session.output.table(session.client.each(at(BASE, dataset, "mappings")), "content_hash", "processed")


@client_command(app, "run")
def run(
    session: CommandSession,
    dataset: Dataset,
    content_hash: Hash,
    force: Annotated[bool, typer.Option(help="Though nothing changed since the last time.")] = False,
    encoding: Annotated[str | None, typer.Option(help="How the file's text is written, if not as UTF-8.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="What stands between fields, if it is not found out.")] = None,
    sheet: Annotated[str | None, typer.Option(help="Which sheet of a spreadsheet is read, if not the first.")] = None,
    wait: Wait = True,
    quiet: Quiet = False,
) -> None:
    """Make entities of the rows of a file, in the place of those that the last run made."""
    given = {"encoding": encoding, "delimiter": delimiter, "sheet": sheet}
    body = {"force": force} | {name: value for name, value in given.items() if value is not None}
    job = session.client.document("POST", at(BASE, dataset, "mappings", content_hash, "process"), body)
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = ended_well(_watched(session, job, quiet))
    outcome(session, job)


def _watched(session: CommandSession, job: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """The job when it is over; how much of the file is mapped is shown meanwhile."""
    while job["finished"] is None and job["progress"] is None:
        job = awaited(session.client, job["id"], LOOK)
    if job["finished"] is not None:
        return job
    with progress(session.output, "mapping", quiet, size=job["progress"]["total"]) as passed:
        done = 0
        while job["finished"] is None:
            passed(job["progress"]["done"] - done, 0)
            done = job["progress"]["done"]
            job = awaited(session.client, job["id"], LOOK)
    return job


def _path(dataset: str, content_hash: str) -> str:
    return at(BASE, dataset, "mappings", content_hash)
