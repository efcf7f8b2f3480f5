"""Output of results: tables and records for people, or the API's JSON; nothing else on standard output.

On a terminal tables are rich's. In a pipe they are plain aligned text whose lines are as long as they must be, so
that no id or key is ever cut or wrapped.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PROSE = frozenset({"title", "label", "target", "value", "message"})
"""Columns that may be wrapped on a narrow terminal; the others are for copying."""

UNBOUNDED = 1_000_000
MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00)")


@dataclass(frozen=True)
class CommandOutput:
    """Prints a command's result, as text or JSON."""

    as_json: bool

    def record(self, document: dict[str, Any], **people_only: Any) -> None:
        """Print one document. In text output, empty fields are omitted and nested ones have dotted names."""
        if self.as_json:
            self.json(document)
            return
        named_first = sorted({**document, **people_only}.items(), key=lambda item: item[0] != "name")
        shown = [{"field": field, "value": value} for field, value in _flat(dict(named_first))]
        print_table(as_table(shown, ("field", "value"), header=False))

    def table(self, documents: Iterable[dict[str, Any]], *columns: str) -> None:
        """Print a list: these columns as text, or an array with all fields as JSON."""
        if self.as_json:
            self.json(list(documents))
        else:
            print_table(as_table(list(documents), columns, header=True))

    def json(self, document: Any) -> None:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))

    def note(self, sentence: str) -> None:
        """Print a note to standard error; nothing with JSON output."""
        if not self.as_json:
            typer.echo(printable(sentence), err=True)


def printable(text: str) -> str:
    """Return untrusted text without terminal control characters."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def _flat(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{field}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from ((prefix + field, _line(item)) for item in value)
        elif value not in (None, "", []):
            yield prefix + field, value


def _line(document: dict[str, Any]) -> str:
    return ", ".join(f"{field} {_cell(value)}" for field, value in _flat(document))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    moment = MOMENT.fullmatch(text)
    return f"{moment[1]}Z" if moment else printable(text)


def as_table(rows: list[dict[str, Any]], columns: Sequence[str], header: bool) -> "Table":
    """Return a table of these columns of the documents."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(Text(column), no_wrap=column not in PROSE, style="cyan" if position == 0 else "")
    for row in rows:
        cells = (_cell(row.get(column)) for column in columns)
        table.add_row(*(Text(cell.replace("\n", " ") if header else cell) for cell in cells))
    return table


def print_table(table: "RenderableType") -> None:
    """Print a table, or several, without truncating columns."""
    from rich.console import Console

    unbounded = Console(highlight=False, width=UNBOUNDED)
    if unbounded.is_terminal:
        # Rich truncates what does not fit; if the terminal is too narrow, let it wrap lines instead.
        width = max(Console().width, unbounded.measure(table).minimum)
        Console(highlight=False, width=width).print(table)
        return
    with unbounded.capture() as captured:
        unbounded.print(table)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
