"""Tag commands: timestamps that show whether derived data is up to date."""

import json
from typing import Annotated, Any

import typer
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS
from tarn.cli.failures import Misuse
from tarn.cli.options import Dataset
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(
    no_args_is_help=True,
    help="List, get, set and compare tags: timestamps of processing steps, your own and system tags.",
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="Names joined by slashes; system tags begin with lakehouse/.")]


@client_command(app, "list")
def list_tags(
    session: CommandSession,
    dataset: Dataset,
    prefix: Annotated[str, typer.Option(help="Only keys with this prefix; lakehouse/ for system tags.")] = "",
) -> None:
    """List your tags on a dataset.

    Example: tarn tags list donations --prefix lakehouse/
    """
    tags = session.connection.each(path_of(DATASETS, dataset, "tags"), {"prefix": prefix or None})
    session.output.table(tags, "key", "at", "value")


@client_command(app, "get")
def get(session: CommandSession, dataset: Dataset, tag: Key) -> None:
    """Show a tag."""
    session.output.record(session.connection.read(path_of(DATASETS, dataset, "tag"), params={"key": tag}))


@client_command(app, "set")
def set_tag(
    session: CommandSession,
    dataset: Dataset,
    tag: Key,
    moment: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="Timestamp, such as 2030-01-31T12:00:00Z; default: now."),
    ] = None,
    value: Annotated[str | None, typer.Option(metavar="JSON", help="Value stored with the tag.")] = None,
) -> None:
    """Set a tag, to now unless a time is given.

    Example: tarn tags set donations crawl/last_run --value '{"pages": 12}'
    """
    body: dict[str, Any] = {} if moment is None else {"at": moment}
    if value is not None:
        body["value"] = _parsed(value)
    session.output.record(
        session.connection.write("PUT", path_of(DATASETS, dataset, "tag"), body or None, params={"key": tag})
    )


@client_command(app, "delete")
def delete(session: CommandSession, dataset: Dataset, tag: Key) -> None:
    """Delete a tag."""
    session.connection.write("DELETE", path_of(DATASETS, dataset, "tag"), params={"key": tag})
    session.output.note(f"the tag {tag} is deleted")


@client_command(app, "is-latest")
def is_latest(
    session: CommandSession,
    dataset: Dataset,
    tag: Key,
    dep: Annotated[list[str], typer.Argument(metavar="KEY…", help="Tags that it must be newer than.")],
) -> None:
    """Check whether a tag is newer than others; exits with 1 if it is not.

    Example: tarn tags is-latest donations mine/index lakehouse/statements/last_updated
    """
    path = path_of(DATASETS, dataset, "tag", "is_latest")
    result = session.connection.read(path, params={"key": tag, "dep": dep})
    session.output.record(result)
    if not result["latest"]:
        raise typer.Exit(1)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Misuse(f"--value is not JSON: {error}") from None
