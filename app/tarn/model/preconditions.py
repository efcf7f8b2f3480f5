"""HTTP preconditions of a request: `If-Match` and `If-None-Match`."""

from collections.abc import Sequence
from dataclasses import dataclass

from tarn.errors import PreconditionFailed
from tarn.model.entity_tags import matches, matches_none_match

SHOWN = 10
"""Maximum entity tags that an error lists."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The two headers of a request, unparsed."""

    if_match: str | None = None
    if_none_match: str | None = None

    def __bool__(self) -> bool:
        return self.if_match is not None or self.if_none_match is not None

    def require(self, tags: Sequence[str]) -> None:
        """Raise PreconditionFailed unless the headers match the resource's entity tags; no tags: it does not exist.

        `*` matches any existing resource. `If-Match` is evaluated first, by strong comparison.
        """
        head = ", ".join(tags[:SHOWN]) or None
        if self.if_match is not None and not any(matches(self.if_match, tag) for tag in tags):
            raise PreconditionFailed(
                "the current entity tag does not match `If-Match`", expected=self.if_match, head=head
            )
        if self.if_none_match is not None and any(matches_none_match(self.if_none_match, tag) for tag in tags):
            raise PreconditionFailed(
                "an entity tag of `If-None-Match` exists already", expected=self.if_none_match, head=head
            )
