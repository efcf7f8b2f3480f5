"""Queue commands: add, list, take and acknowledge queue items."""

import json
import sys
from typing import Annotated, Any, Literal

import typer
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS
from tarn.cli.failures import Misuse
from tarn.cli.input.files import STDIN
from tarn.cli.options import Dataset, Origin
from tarn.cli.session import CommandSession, client_command

app = typer.Typer(
    no_args_is_help=True, help="Add, list, take and acknowledge queue items, for the worker or for another tenant."
)

ItemId = Annotated[str, typer.Argument(metavar="ID", help="The item's id.")]


@client_command(app, "add")
def add(
    session: CommandSession,
    dataset: Dataset,
    action: Annotated[Literal["upsert", "delete"], typer.Argument(help="Action.")],
    resource: Annotated[Literal["entity", "file"], typer.Argument(help="Resource that the action applies to.")],
    payload: Annotated[
        str, typer.Argument(metavar="JSON", help="The entity or file, as JSON; - reads standard input.")
    ],
    to: Annotated[str | None, typer.Option(help="Tenant that processes the item; default: the worker.")] = None,
    origin: Origin = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Let every tenant that may read the dataset read the item.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the id.")] = False,
) -> None:
    """Add an item to the queue.

    Example: tarn queue add donations delete entity '{"id": "jane"}'
    """
    item = {"action": action.upper(), "resource": resource, "payload": _parsed(payload), "shared": shared}
    item |= {name: value for name, value in (("to", to), ("origin", origin)) if value is not None}
    added = session.connection.write("POST", path_of(DATASETS, dataset, "queue"), item)
    if quiet:
        typer.echo(added["id"])
    else:
        session.output.record(added)


@client_command(app, "list")
def list_items(
    session: CommandSession,
    dataset: Dataset,
    sender: Annotated[str | None, typer.Option("--from", help="Only items of this tenant.")] = None,
    state: Annotated[Literal["pending", "done", "dead"] | None, typer.Option(help="Only items in this state.")] = None,
    after: Annotated[str | None, typer.Option(metavar="ID", help="Only items added after this one.")] = None,
) -> None:
    """List items that you sent or that are addressed to you, oldest first; with --from, those of one tenant."""
    params: dict[str, Any] = {"from": sender, "state": state, "after": after}
    items = session.connection.each(path_of(DATASETS, dataset, "queue"), params)
    session.output.table(items, "id", "tenant", "to", "action", "resource", "state", "attempts", "created")


@client_command(app, "show")
def show(session: CommandSession, dataset: Dataset, item: ItemId) -> None:
    """Show an item and its state."""
    session.output.record(session.connection.read(path_of(DATASETS, dataset, "queue", item)))


@client_command(app, "pop")
def pop(
    session: CommandSession,
    dataset: Dataset,
    lease: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds until it returns to the queue unless acknowledged.")
    ] = 60,
) -> None:
    """Take the oldest item that is addressed to you; exits with 1 if there is none.

    Example: tarn queue pop donations --lease 600 --json > item.json
    """
    item = session.connection.write("POST", path_of(DATASETS, dataset, "queue", "pop"), {"lease": lease})
    if not item:
        session.output.note("there is no item to take")
        raise typer.Exit(1)
    session.output.record(item)


@client_command(app, "ack")
def ack(
    session: CommandSession,
    dataset: Dataset,
    item: ItemId,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The token returned by `tarn queue pop`.")],
    error: Annotated[str | None, typer.Option(help="Why it failed; it is retried later.")] = None,
) -> None:
    """Acknowledge an item that you took as done, or report with --error why it failed."""
    body = {"token": token} | ({} if error is None else {"error": error})
    session.output.record(session.connection.write("POST", path_of(DATASETS, dataset, "queue", item, "ack"), body))


@client_command(app, "retry")
def retry(session: CommandSession, dataset: Dataset, item: ItemId) -> None:
    """Retry a dead item."""
    session.output.record(session.connection.write("POST", path_of(DATASETS, dataset, "queue", item, "retry")))


@client_command(app, "delete")
def delete(session: CommandSession, dataset: Dataset, item: ItemId) -> None:
    """Delete an item from the queue; its effects stay."""
    session.connection.write("DELETE", path_of(DATASETS, dataset, "queue", item))
    session.output.note(f"the item {item} is deleted")


def _parsed(text: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if text == STDIN else text)
    except ValueError as error:
        raise Misuse(f"the payload is not JSON: {error}") from None
