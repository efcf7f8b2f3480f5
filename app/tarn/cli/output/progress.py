"""Progress for the person at a terminal: rows, rate, and the time left where it can be known. Programs see nothing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tarn.cli.output.tables import CommandOutput

Passed = Callable[[int, int], None]
"""Told of the bytes and rows that passed; rows are 0 where they cannot be counted."""


@contextmanager
def progress(
    output: CommandOutput, doing: str, quiet: bool, rows: int | None = None, size: int | None = None, unit: str = "rows"
) -> Iterator[Passed]:
    """Show on standard error how far a command is: towards so many rows or bytes, if either is known.

    Rows may go by another name.
    """
    if quiet or output.as_json or not sys.stderr.isatty():
        yield _ignore
        return
    with _bar(doing, rows, size, unit) as passed:
        yield passed


@contextmanager
def _bar(doing: str, rows: int | None, size: int | None, unit: str) -> Iterator[Passed]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    total = size if size is not None else rows
    left = TimeElapsedColumn() if total is None else TimeRemainingColumn(compact=True, elapsed_when_finished=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[passed]}"), left)
    # Records go to standard output as bytes, below what rich would put in its place.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as shown:
        task = shown.add_task(doing, total=total, passed="")
        begun, all_bytes, all_rows = time.monotonic(), 0, 0

        def passed(more_bytes: int, more_rows: int) -> None:
            nonlocal all_bytes, all_rows
            all_bytes, all_rows = all_bytes + more_bytes, all_rows + more_rows
            done = all_rows if total == rows else all_bytes
            shown.update(task, completed=done, passed=describe(all_bytes, all_rows, time.monotonic() - begun, unit))

        try:
            yield passed
        except BaseException:
            shown.live.transient = True  # the bar of what came to nothing goes away
            raise


def _ignore(_bytes: int, _rows: int) -> None:
    """Nobody looks."""


def describe(size: int, rows: int, seconds: float, unit: str = "rows") -> str:
    """How much passed, and how fast."""
    seconds = max(seconds, 0.001)
    if rows:
        return f"{rows:,} {unit}, {rows / seconds:,.0f}/s" + (f", {_size(size)}" if size else "")
    return f"{_size(size)}, {_size(size / seconds)}/s"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
