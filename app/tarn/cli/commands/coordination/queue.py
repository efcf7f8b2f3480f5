"""The queue: what the worker, or another tenant, is asked to do."""

import json
import sys
from typing import Annotated, Any, Literal

import typer

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.commands.datasets.entities import Dataset
from tarn.cli.failures import Misuse
from tarn.cli.input.files import STDIN
from tarn.cli.options import Origin
from tarn.cli.paths import at
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(no_args_is_help=True, help="The queue: what the worker, or another tenant, is asked to do.")

ItemId = Annotated[str, typer.Argument(metavar="ID", help="The item's id.")]


@client_command(app, "add")
def add(
    session: CommandSession,
    dataset: Dataset,
    action: Annotated[Literal["upsert", "delete"], typer.Argument(help="What to do.")],
    resource: Annotated[Literal["entity", "file"], typer.Argument(help="With what.")],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="Which one, as JSON; - reads standard input.")],
    to: Annotated[str | None, typer.Option(help="The tenant that is to take it; else the worker does it.")] = None,
    origin: Origin = None,
    shared: Annotated[bool, typer.Option("--shared", help="All who may read the dataset may read it.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the id alone.")] = False,
) -> None:
    """Ask for something to be done.

    Example: tarn queue add donations delete entity '{"id": "jane"}'
    """
    item = {"action": action.upper(), "resource": resource, "payload": _parsed(payload), "shared": shared}
    item |= {name: value for name, value in (("to", to), ("origin", origin)) if value is not None}
    added = session.client.document("POST", at(BASE, dataset, "queue"), item)
    if quiet:
        typer.echo(added["id"])
    else:
        session.output.record(added)


@client_command(app, "list")
def list_items(
    session: CommandSession,
    dataset: Dataset,
    sender: Annotated[str | None, typer.Option("--from", help="Who sent it: those that you may read.")] = None,
    state: Annotated[Literal["pending", "done", "dead"] | None, typer.Option(help="What became of them.")] = None,
    after: Annotated[str | None, typer.Option(metavar="ID", help="Those that were accepted after this one.")] = None,
) -> None:
    """List items that you sent or are to take, oldest first; with --from, all of a tenant's that you may read."""
    params: dict[str, Any] = {"from": sender, "state": state, "after": after}
    items = session.client.each(at(BASE, dataset, "queue"), **params)
    session.output.table(items, "id", "tenant", "to", "action", "resource", "state", "attempts", "created")


@client_command(app, "show")
def show(session: CommandSession, dataset: Dataset, item: ItemId) -> None:
    """Show an item, and what became of it."""
    session.output.record(session.client.document("GET", at(BASE, dataset, "queue", item)))


@client_command(app, "pop")
def pop(
    session: CommandSession,
    dataset: Dataset,
    lease: Annotated[float, typer.Option(metavar="SECONDS", help="For how long it is yours.")] = 60,
) -> None:
    """Take the oldest item that is addressed to you; exits with 1 if there is none.

    Example: tarn queue pop donations --lease 600 --json > item.json
    """
    answer = session.client.request("POST", at(BASE, dataset, "queue", "pop"), {"lease": lease})
    if answer.status_code == 204:
        session.output.note("there is nothing to be taken")
        raise typer.Exit(1)
    session.output.record(answer.json())


@client_command(app, "ack")
def ack(
    session: CommandSession,
    dataset: Dataset,
    item: ItemId,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="What you got when you took it.")],
    error: Annotated[str | None, typer.Option(help="Why it could not be done: it is tried again later.")] = None,
) -> None:
    """Say that an item that you took is done, or why it is not."""
    said = {"token": token} | ({} if error is None else {"error": error})
    session.output.record(session.client.document("POST", at(BASE, dataset, "queue", item, "ack"), said))


@client_command(app, "retry")
def retry(session: CommandSession, dataset: Dataset, item: ItemId) -> None:
    """Let an item be tried again that is dead."""
    session.output.record(session.client.document("POST", at(BASE, dataset, "queue", item, "retry")))


@client_command(app, "delete")
def delete(session: CommandSession, dataset: Dataset, item: ItemId) -> None:
    """Take an item out of the queue; what it has done stays."""
    session.client.request("DELETE", at(BASE, dataset, "queue", item))
    session.output.note(f"the item {item} is deleted")


def _parsed(text: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if text == STDIN else text)
    except ValueError as error:
        raise Misuse(f"the payload is not JSON: {error}") from None
