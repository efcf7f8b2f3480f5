"""Errors that end a command, each with an exit code: those of the client package, and those of the command line.

| exit code | error                                                                             |
|-----------|-----------------------------------------------------------------------------------|
| 1         | Problem: the server refused; JobCancelled; Incomplete: an import differs          |
| 2         | Misuse and InvalidRequest: wrong usage; nothing was changed                       |
| 3         | Unreachable and IncompleteResponse: no response, or an incomplete one             |
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from tarn_client.errors import InvalidRequest, JobCancelled, LakeError, Problem


class Failure(Exception):
    """Base class of the command line's own errors."""

    exit_code: ClassVar[int]


class Incomplete(Failure):
    """An import was aborted, or the counts of source and target differ at its end."""

    exit_code = 1


class Misuse(Failure):
    """The arguments are invalid. Nothing was changed."""

    exit_code = 2


FAILURES = (Failure, LakeError)
"""The errors that end a command with a message instead of a traceback."""


def exit_code(error: Failure | LakeError) -> int:
    """Return the exit code of an error."""
    if isinstance(error, Failure):
        return error.exit_code
    if isinstance(error, InvalidRequest):
        return 2
    return 1 if isinstance(error, (Problem, JobCancelled)) else 3


def error_lines(error: Failure | LakeError) -> Iterator[str]:
    """Yield the lines of an error for standard error: its message, invalid records or fields, and notes."""
    yield f"tarn: {error}"
    invalid = error.errors if isinstance(error, Problem) else []
    # A single one is usually part of the message already.
    if len(invalid) > 1 or any(str(each["reason"]) not in str(error) for each in invalid):
        yield from (f"    {invalid_line(each)}" for each in invalid)
    yield from (f"    {note}" for note in getattr(error, "__notes__", ()))


def invalid_line(invalid: dict[str, Any]) -> str:
    """Return the line, field and reason of an invalid record or field, as text."""
    line = f"line {invalid['line']}" if invalid.get("line") is not None else None
    return ": ".join(str(part) for part in (line, invalid.get("field"), invalid.get("reason")) if part)
