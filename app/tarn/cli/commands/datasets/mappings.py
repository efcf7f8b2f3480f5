"""`tarn mapping`: store and run mappings from the rows of an archived file to entities."""

from typing import Annotated, Any

import typer
from tarn_client.jobs import require_success, wait_for_job
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS
from tarn.cli.failures import Misuse
from tarn.cli.jobs import Wait, outcome
from tarn.cli.options import Dataset, Quiet
from tarn.cli.output.progress import progress
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Store and run mappings from the rows of an archived file to entities.")

Hash = Annotated[str, typer.Argument(metavar="HASH", help="The SHA-256 of the file in the archive.")]

POLL_SECONDS = 1.0
"""Seconds between two polls of a job's progress."""


@client_command(app, "put")
def put(
    session: CommandSession,
    dataset: Dataset,
    content_hash: Hash,
    file: Annotated[
        typer.FileText,
        typer.Argument(metavar="FILE", encoding="utf-8", help="FtM mapping in YAML or JSON; - is standard input."),
    ],
) -> None:
    """Store a mapping for a file; the previous mapping is kept as a version.

    Example: tarn mapping put donations $(sha256sum donations.csv | cut -c-64) donations.yml
    """
    from tarn.cli.input.yaml_reader import parse  # late import: only this command needs YAML

    try:
        mapping = parse(file.read())
    except ValueError as error:
        raise Misuse(f"{file.name} is neither YAML nor JSON: {error}") from None
    stored = session.connection.write("PUT", _path(dataset, content_hash), mapping)
    if session.output.as_json:
        session.output.json(stored)
    else:
        session.output.note(f"the mapping for {content_hash} is stored")


@client_command(app, "get")
def get(session: CommandSession, dataset: Dataset, content_hash: Hash) -> None:
    """Print a mapping as JSON, with the time it was last processed."""
    session.output.json(session.connection.read(_path(dataset, content_hash)))


@client_command(app, "ls")
def ls(session: CommandSession, dataset: Dataset) -> None:
    """List a dataset's mappings."""
    session.output.table(session.connection.each(path_of(DATASETS, dataset, "mappings")), "content_hash", "processed")


@client_command(app, "run")
def run(
    session: CommandSession,
    dataset: Dataset,
    content_hash: Hash,
    force: Annotated[bool, typer.Option(help="Run it even if nothing changed since the last run.")] = False,
    encoding: Annotated[str | None, typer.Option(help="Text encoding of the file; default: UTF-8.")] = None,
    delimiter: Annotated[str | None, typer.Option(help="Field delimiter; default: detected.")] = None,
    sheet: Annotated[str | None, typer.Option(help="Sheet of a spreadsheet; default: the first.")] = None,
    wait: Wait = True,
    quiet: Quiet = False,
) -> None:
    """Create entities from the rows of a file, replacing those of the last run."""
    options = {"encoding": encoding, "delimiter": delimiter, "sheet": sheet}
    body = {"force": force} | {name: value for name, value in options.items() if value is not None}
    job = session.connection.write("POST", path_of(DATASETS, dataset, "mappings", content_hash, "process"), body)
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = require_success(_wait_with_progress(session, job, quiet))
    outcome(session, job)


def _wait_with_progress(session: CommandSession, job: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Wait for the job while showing its progress; return the finished job."""
    while job["finished"] is None and job["progress"] is None:
        job = wait_for_job(session.connection, job["id"], POLL_SECONDS)
    if job["finished"] is not None:
        return job
    with progress(session.output, "mapping", quiet, size=job["progress"]["total"]) as advance:
        done = 0
        while job["finished"] is None:
            advance(job["progress"]["done"] - done, 0)
            done = job["progress"]["done"]
            job = wait_for_job(session.connection, job["id"], POLL_SECONDS)
    return job


def _path(dataset: str, content_hash: str) -> str:
    return path_of(DATASETS, dataset, "mappings", content_hash)
