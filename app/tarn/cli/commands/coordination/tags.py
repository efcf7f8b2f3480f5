"""Tags: what was done when, to tell whether something derived is still fresh."""

import json
from typing import Annotated, Any

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.commands.datasets.entities import Dataset
from tarn.cli.failures import Misuse
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="Tags: what was done when. Yours alone, but for the lake's own.")

Key = Annotated[str, typer.Argument(metavar="KEY", help="Names joined by slashes; the lake's own begin lakehouse/.")]


@client_command(app, "list")
def list_tags(
    session: CommandSession,
    dataset: Dataset,
    prefix: Annotated[str, typer.Option(help="What keys begin with; lakehouse/ lists the lake's own.")] = "",
) -> None:
    """List your tags on a dataset.

    Example: tarn tags list donations --prefix lakehouse/
    """
    tags = session.client.each(at(BASE, dataset, "tags"), prefix=prefix or None)
    session.output.table(tags, "key", "at", "value")


@client_command(app, "get")
def get(session: CommandSession, dataset: Dataset, tag: Key) -> None:
    """Show a tag."""
    session.output.record(session.client.document("GET", at(BASE, dataset, "tag"), params={"key": tag}))


@client_command(app, "set")
def set_tag(
    session: CommandSession,
    dataset: Dataset,
    tag: Key,
    moment: Annotated[
        str | None, typer.Option("--at", metavar="MOMENT", help="2030-01-31T12:00:00Z; now if it is left out.")
    ] = None,
    value: Annotated[str | None, typer.Option(metavar="JSON", help="What to keep with it.")] = None,
) -> None:
    """Set a tag, to now unless a moment is given.

    Example: tarn tags set donations crawl/last_run --value '{"pages": 12}'
    """
    said = {} if moment is None else {"at": moment}
    if value is not None:
        said["value"] = _parsed(value)
    session.output.record(session.client.document("PUT", at(BASE, dataset, "tag"), said or None, params={"key": tag}))


@client_command(app, "delete")
def delete(session: CommandSession, dataset: Dataset, tag: Key) -> None:
    """Delete a tag."""
    session.client.request("DELETE", at(BASE, dataset, "tag"), params={"key": tag})
    session.output.note(f"the tag {tag} is deleted")


@client_command(app, "is-latest")
def is_latest(
    session: CommandSession,
    dataset: Dataset,
    tag: Key,
    dep: Annotated[list[str], typer.Argument(metavar="KEY…", help="Tags that it must be newer than.")],
) -> None:
    """Tell whether a tag is newer than others; exits with 1 if it is not.

    Example: tarn tags is-latest donations mine/index lakehouse/statements/last_updated
    """
    path = at(BASE, dataset, "tag", "is_latest")
    found = session.client.document("GET", path, params={"key": tag, "dep": dep})
    session.output.record(found)
    if not found["latest"]:
        raise typer.Exit(1)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Misuse(f"--value is not JSON: {error}") from None
