"""What every client command has: a server to speak to, somewhere to answer, and one way to fail."""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tarn.cli.failures import Failure, Misuse, ProblemAnswered
from tarn.cli.output.tables import CommandOutput, printable

if TYPE_CHECKING:
    from tarn.cli.connection import Client

DEFAULT_URL = "http://127.0.0.1:8000"
PANEL = "Server and output"

Url = Annotated[str, typer.Option("--url", envvar="TARN_URL", help="The server.", rich_help_panel=PANEL)]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="TARN_KEY",
        help="The key to use; better set in the environment, where others do not see it. For a server on this machine "
        "the administrator's (TARN_ADMIN_KEY, or the file data/admin.key) if there is no other.",
        rich_help_panel=PANEL,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the API's JSON.", rich_help_panel=PANEL)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Function = Callable[..., None]


@dataclass(frozen=True)
class CommandSession:
    """One command's conversation with a server."""

    client: "Client"
    output: CommandOutput

    def confirm(self, question: str, yes: bool) -> None:
        """Return if the person agrees, or has agreed with --yes; else raise Misuse. Nobody is asked in a pipe."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise Misuse("there is nobody to ask: give --yes to delete without being asked")
        # Not `typer.confirm`, which leaves a blank on standard output.
        typer.echo(f"{question} [y/N] ", nl=False, err=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Misuse("nothing was deleted")


def client_command(app: typer.Typer, name: str, panel: str | None = None) -> Callable[[Function], Function]:
    """Add a command that speaks to a server: a function of a Session and of the command's own options.

    The command also takes --url, --key and --json, and a Failure becomes its words on standard error and its exit code.
    """

    def register(function: Function) -> Function:
        _, *own = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def run(url: str, key: str | None, as_json: bool, **options: Any) -> None:
            from tarn.cli.connection import Client

            with _reported(as_json), Client(url, key) as client:
                function(CommandSession(client, CommandOutput(as_json)), **options)

        parameters = [*own, *_common()]
        # Typer reads the options from here.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # mypy knows no such attribute
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, rich_help_panel=panel)(run)
        return function

    return register


def _common() -> list[Parameter]:
    return [
        Parameter("url", Parameter.KEYWORD_ONLY, default=DEFAULT_URL, annotation=Url),
        Parameter("key", Parameter.KEYWORD_ONLY, default=None, annotation=Key),
        Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
    ]


@contextmanager
def _reported(as_json: bool) -> Iterator[None]:
    try:
        yield
    except Failure as failure:
        if as_json and isinstance(failure, ProblemAnswered):
            typer.echo(json.dumps(failure.problem, indent=2, ensure_ascii=False), err=True)
        else:
            typer.echo("\n".join(printable(line) for line in failure.lines()), err=True)
        raise typer.Exit(failure.exit_code) from None
