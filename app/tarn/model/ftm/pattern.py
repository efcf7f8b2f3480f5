r"""Patterns of `like` and `ilike`: `%` is any run of characters, `_` any one, `\` makes the next character literal.

A pattern is evaluated as one RE2 expression (`tarn.query.filters`). RE2 reads a text once, but its automaton tracks
every position at which the pattern may have started. `_` after a `%` multiplies the states: `%a` and thirty times `_`
has a billion. When they exceed its memory, RE2 simulates each state separately, which took 99 seconds for a text of
8 MB and a pattern of a thousand characters. So the number of such `_` is limited, and so is the length of a pattern
that has one. What precedes the first `%` matches at one position only and costs nothing, nor do literal characters and
`%` without `_`.
"""

from typing import NamedTuple

LONGEST_PATTERN = 1000
"""Maximum characters of a pattern."""
MOST_SINGLES = 8
"""Maximum number of `_` after the first `%`."""
LONGEST_WITH_SINGLES = 100
"""Maximum characters of a pattern that has any of those."""


class Gap(NamedTuple):
    """A run of wildcards: exactly `least` characters, or if it is open, at least that many."""

    least: int
    is_open: bool


def parts(pattern: str) -> list[str | Gap]:
    """Return the literal texts and the gaps between them. A trailing backslash is ignored; `check` refuses it."""
    result: list[str | Gap] = []
    characters = iter(pattern)
    for character in characters:
        last = result[-1] if result else None
        if character in "%_":
            gap = last if isinstance(last, Gap) else Gap(0, False)
            merged = Gap(gap.least + (character == "_"), gap.is_open or character == "%")
            result[len(result) - isinstance(last, Gap) :] = [merged]
        else:
            literal = next(characters, "") if character == "\\" else character
            result[len(result) - isinstance(last, str) :] = [(last if isinstance(last, str) else "") + literal]
    return result


def check(pattern: str) -> None:
    """Raise ValueError for a pattern that is invalid or too expensive."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"is {len(pattern)} characters long, at most {LONGEST_PATTERN} are allowed")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("must not end with a single backslash, which escapes the character after it")
    gaps = [part for part in parts(pattern) if isinstance(part, Gap)]
    first = next((place for place, gap in enumerate(gaps) if gap.is_open), len(gaps))
    # Within the first run that has a `%`, the order of wildcards makes no difference.
    singles = sum(gap.least for gap in gaps[first + 1 :])
    if singles > MOST_SINGLES:
        raise ValueError(f"has {singles} `_` after its first run with a `%`, at most {MOST_SINGLES} are allowed there")
    if singles and len(pattern) > LONGEST_WITH_SINGLES:
        raise ValueError(
            f"is {len(pattern)} characters long, at most {LONGEST_WITH_SINGLES} are allowed with `_` after a `%`"
        )
