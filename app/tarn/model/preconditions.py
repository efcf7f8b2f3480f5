"""What a caller says must hold of what is there, before a request changes it: `If-Match` and `If-None-Match`."""

from collections.abc import Sequence
from dataclasses import dataclass

from tarn.errors import PreconditionFailed
from tarn.model.dataset import matches, matches_none_match

SHOWN = 10
"""Entity tags that an error names."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The two headers of a request, as they were sent."""

    if_match: str | None = None
    if_none_match: str | None = None

    def __bool__(self) -> bool:
        return self.if_match is not None or self.if_none_match is not None

    def require(self, tags: Sequence[str]) -> None:
        """Raise PreconditionFailed unless they hold of what has these entity tags; none: nothing is there.

        `*` stands for whatever is there. `If-Match` compares strongly, and comes first.
        """
        head = ", ".join(tags[:SHOWN]) or None
        if self.if_match is not None and not any(matches(self.if_match, tag) for tag in tags):
            raise PreconditionFailed("what is there is not what `If-Match` names", expected=self.if_match, head=head)
        if self.if_none_match is not None and any(matches_none_match(self.if_none_match, tag) for tag in tags):
            raise PreconditionFailed(
                "what `If-None-Match` names is there already", expected=self.if_none_match, head=head
            )
