"""Why a command ends without its result.

Exception
└── Failure                 one sentence for the person at the terminal, and an exit code
    ├── ProblemAnswered     1   the server refused, and says why in a problem document
    ├── Misuse              2   nothing was sent: the command is wrong as it was given
    └── Unreachable         3   no server answered, or not to the end
"""

from collections.abc import Iterator
from typing import Any, ClassVar


class Failure(Exception):
    """A command that has no result; the message is what to say of it."""

    exit_code: ClassVar[int]

    def lines(self) -> Iterator[str]:
        """What a person reads on standard error."""
        yield f"tarn: {self}"


class ProblemAnswered(Failure):
    """The server answered with a problem (RFC 9457), which is kept as it came."""

    exit_code = 1

    def __init__(self, problem: dict[str, Any], hint: str | None = None) -> None:
        super().__init__(problem["detail"])
        self.problem = problem
        self.hint = hint

    @property
    def slug(self) -> str:
        return str(self.problem["type"]).rsplit("/", 1)[-1]

    def lines(self) -> Iterator[str]:
        yield f"tarn: {self} ({self.slug})"
        for fault in self.problem.get("errors", ()):
            line = f"line {fault['line']}" if fault.get("line") is not None else None
            yield "    " + ": ".join(str(part) for part in (line, fault.get("field"), fault.get("reason")) if part)
        if self.hint is not None:
            yield f"    {self.hint}"


class Misuse(Failure):
    """The command cannot be carried out as it was given. Nothing was sent."""

    exit_code = 2


class Unreachable(Failure):
    """There is no whole answer. Whether a change was made is not known, unless nothing listened at all."""

    exit_code = 3
