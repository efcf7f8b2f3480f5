"""`tarn datasets`: create, show, update and delete datasets."""

import sys
from typing import Annotated

import typer
from tarn_client.errors import Problem
from tarn_client.jobs import wait_for_job
from tarn_client.paths import path_of

from tarn.cli.commands.datasets.metadata import Assignments, Description, File, Summary, Title, read_metadata
from tarn.cli.completion import dataset_names
from tarn.cli.connection import DATASETS
from tarn.cli.failures import Misuse
from tarn.cli.jobs import outcome
from tarn.cli.options import IfMatch, conditions
from tarn.cli.session import CommandSession, Yes, client_command

app = typer.Typer(no_args_is_help=True, help="Create, show, update and delete datasets.")

Dataset = Annotated[str, typer.Argument(metavar="NAME", help="The dataset's name.", autocompletion=dataset_names)]


@client_command(app, "list")
def list_datasets(session: CommandSession) -> None:
    """List the datasets you may read."""
    session.output.table(session.connection.each(DATASETS), "name", "title", "created")


@client_command(app, "create")
def create(
    session: CommandSession,
    name: Dataset,
    title: Title = None,
    summary: Summary = None,
    description: Description = None,
    file: File = None,
    assignments: Assignments = None,
) -> None:
    """Create a dataset.

    Example: tarn datasets create donations --title Donations --set publisher.name=Parliament
    """
    metadata = read_metadata(file, assignments, title=title, summary=summary, description=description)
    session.output.record(session.connection.write("POST", DATASETS, metadata.body() | {"name": name}))


@client_command(app, "show")
def show(
    session: CommandSession,
    name: Dataset,
    etag: Annotated[bool, typer.Option("--etag", help="Print only the entity tag, for --if-match.")] = False,
) -> None:
    """Show a dataset's configuration."""
    config, tag = session.connection.read_with_etag(path_of(DATASETS, name))
    if etag:
        typer.echo(tag)
    else:
        session.output.record(config, etag=tag)


@client_command(app, "update")
def update(
    session: CommandSession,
    name: Dataset,
    title: Title = None,
    summary: Summary = None,
    description: Description = None,
    file: File = None,
    assignments: Assignments = None,
    if_match: IfMatch = None,
) -> None:
    """Update a dataset's configuration; fields left out are unchanged, null restores the default.

    Example: tarn datasets update donations --set policy.retention.days=30 --set summary=null

    Example: tarn datasets version donations TIMESTAMP config.yml | tarn datasets update donations --file -
    """
    metadata = read_metadata(file, assignments, title=title, summary=summary, description=description)
    if not metadata:
        raise Misuse("there is nothing to change: give --title, --summary, --description, --set or --file")
    path, current = path_of(DATASETS, name), None
    if metadata.extends:
        # The API replaces whole fields; the tag ensures that the field has not changed since it was read.
        current, tag = session.connection.read_with_etag(path)
        if_match = if_match or tag
    headers = conditions(if_match)
    session.output.record(session.connection.write("PATCH", path, metadata.body(current), headers=headers))


@client_command(app, "delete")
def delete(
    session: CommandSession,
    name: Dataset,
    yes: Yes = False,
    wait: Annotated[bool, typer.Option(help="Wait until its files are deleted and its name can be reused.")] = True,
) -> None:
    """Delete a dataset and everything in it. It is hidden immediately; a job deletes its files."""
    session.confirm(f"Delete the dataset {name} and everything in it?", yes)
    job = session.connection.write("DELETE", path_of(DATASETS, name), params={"confirm": name})
    if wait:
        session.output.note(f"waiting for the job {job['id']}")
        job = wait_for_job(session.connection, job["id"])
        if job["problem"] is not None:
            raise Problem(job["problem"])
    outcome(session, job)


@client_command(app, "versions")
def versions(session: CommandSession, name: Dataset) -> None:
    """List former versions of a dataset's documents, newest first."""
    session.output.table(session.connection.each(path_of(DATASETS, name, "versions")), "timestamp", "name", "size")


@client_command(app, "version")
def version(
    session: CommandSession,
    name: Dataset,
    timestamp: Annotated[str, typer.Argument(metavar="TIMESTAMP", help="As `tarn datasets versions` shows it.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The document's name, such as config.yml.")],
) -> None:
    """Print a former version of a document, unchanged.

    Example: tarn datasets version donations 20300131T120000.000000Z config.yml
    """
    sys.stdout.flush()
    sys.stdout.buffer.write(
        session.connection.request("GET", path_of(DATASETS, name, "versions", timestamp, file)).content
    )
