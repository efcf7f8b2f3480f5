"""Progress bar on a terminal: rows, rate and, where known, the time left. Nothing in a pipe."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tarn.cli.output.tables import CommandOutput

Advance = Callable[[int, int], None]
"""Callback with the number of bytes and rows since the last call; rows are 0 where they cannot be counted."""


@contextmanager
def progress(
    output: CommandOutput, label: str, quiet: bool, rows: int | None = None, size: int | None = None, unit: str = "rows"
) -> Iterator[Advance]:
    """Show a command's progress on standard error, relative to a total of rows or bytes if one is known.

    `unit` names what the rows are.
    """
    if quiet or output.as_json or not sys.stderr.isatty():
        yield _ignore
        return
    with _bar(label, rows, size, unit) as advance:
        yield advance


@contextmanager
def _bar(label: str, rows: int | None, size: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    total = size if size is not None else rows
    time_column = (
        TimeElapsedColumn() if total is None else TimeRemainingColumn(compact=True, elapsed_when_finished=True)
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[passed]}"),
        time_column,
    )
    # Records go to standard output as bytes, below what rich would put in its place.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as shown:
        task = shown.add_task(label, total=total, passed="")
        start, all_bytes, all_rows = time.monotonic(), 0, 0

        def advance(more_bytes: int, more_rows: int) -> None:
            nonlocal all_bytes, all_rows
            all_bytes, all_rows = all_bytes + more_bytes, all_rows + more_rows
            done = all_rows if total == rows else all_bytes
            shown.update(task, completed=done, passed=describe(all_bytes, all_rows, time.monotonic() - start, unit))

        try:
            yield advance
        except BaseException:
            shown.live.transient = True  # remove the bar of a failed command
            raise


def _ignore(_bytes: int, _rows: int) -> None:
    """Ignore progress: it is not shown."""


def describe(size: int, rows: int, seconds: float, unit: str = "rows") -> str:
    """Return the amount and rate as text."""
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
