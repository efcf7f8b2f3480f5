"""Session of a client command: the connection, the output, common options and error reporting."""

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
from tarn_client.errors import Problem

from tarn.cli.connection import DEFAULT_URL, connected
from tarn.cli.failures import FAILURES, Misuse, error_lines, exit_code
from tarn.cli.output.tables import CommandOutput, printable

if TYPE_CHECKING:
    from tarn_client.connection import Connection

PANEL = "Server and output"

Url = Annotated[str, typer.Option("--url", envvar="TARN_URL", help="Base URL of the server.", rich_help_panel=PANEL)]
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
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

Function = Callable[..., None]


@dataclass(frozen=True)
class CommandSession:
    """The connection and output of one command."""

    connection: "Connection"
    output: CommandOutput

    def confirm(self, question: str, yes: bool) -> None:
        """Ask for confirmation unless --yes is given. Raises Misuse if it is declined or there is no terminal."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise Misuse("standard input is not a terminal: give --yes to delete without confirmation")
        # Not `typer.confirm`, which leaves a blank on standard output.
        typer.echo(f"{question} [y/N] ", nl=False, err=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Misuse("nothing was deleted")


def client_command(app: typer.Typer, name: str, panel: str | None = None) -> Callable[[Function], Function]:
    """Register a command that calls a server: a function of a CommandSession and of the command's own options.

    The command also takes --url, --key and --json. An error is printed to standard error and sets the exit code.
    """

    def register(function: Function) -> Function:
        _, *own = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def run(url: str, key: str | None, as_json: bool, **options: Any) -> None:
            with _report_errors(as_json), connected(url, key) as connection:
                function(CommandSession(connection, CommandOutput(as_json)), **options)

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
def _report_errors(as_json: bool) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        if as_json and isinstance(error, Problem):
            typer.echo(json.dumps(error.document, indent=2, ensure_ascii=False), err=True)
        else:
            typer.echo("\n".join(printable(line) for line in error_lines(error)), err=True)
        raise typer.Exit(exit_code(error)) from None
