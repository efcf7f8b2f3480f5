"""Why a command ends without its result.

Exception
└── Failure                 one sentence for the person at the terminal, and an exit code
    ├── ProblemAnswered     1   the server refused, and says why in a problem document
    ├── Cancelled           1   somebody gave up the job that was waited for
    ├── Incomplete          1   what was imported is not what its source holds
    ├── Misuse              2   nothing was changed: the command is wrong as it was given
    └── Unreachable         3   no server answered, or not to the end
"""

from collections.abc import Iterator
from typing import Any, ClassVar


def invalid_line(fault: dict[str, Any]) -> str:
    """What is wrong with one record or field, as the server says it."""
    line = f"line {fault['line']}" if fault.get("line") is not None else None
    return ": ".join(str(part) for part in (line, fault.get("field"), fault.get("reason")) if part)


class Failure(Exception):
    """A command that has no result; the message is what to say of it."""

    exit_code: ClassVar[int]

    def lines(self) -> Iterator[str]:
        """What a person reads on standard error."""
        yield f"tarn: {self}"


class ProblemAnswered(Failure):
    """The server answered with a problem (RFC 9457), which is kept as it came."""

    exit_code = 1

    def __init__(self, problem: dict[str, Any], hint: str | None = None, after: int | None = None) -> None:
        super().__init__(problem["detail"])
        self.problem = problem
        self.hint = hint
        self.after = after
        """In how many seconds the server wants to be asked again."""

    @property
    def slug(self) -> str:
        return str(self.problem["type"]).rsplit("/", 1)[-1]

    def lines(self) -> Iterator[str]:
        yield f"tarn: {self} ({self.slug})"
        faults = self.problem.get("errors", ())
        # The only one is mostly what the sentence above says already.
        if len(faults) > 1 or any(str(fault["reason"]) not in str(self) for fault in faults):
            yield from (f"    {invalid_line(fault)}" for fault in faults)
        if self.hint is not None:
            yield f"    {self.hint}"


class Cancelled(Failure):
    """Somebody gave up the job that was waited for."""

    exit_code = 1


class Incomplete(Failure):
    """An import broke off, or ended and the counts of source and target differ."""

    exit_code = 1


class Misuse(Failure):
    """The command cannot be carried out as it was given. Nothing was changed."""

    exit_code = 2


class Unreachable(Failure):
    """There is no whole answer. Whether a change was made is not known, unless nothing listened at all."""

    exit_code = 3
