r"""Patterns of `like` and `ilike`: `%` is any run of characters, `_` any one, `\` makes the next character literal.

A pattern is evaluated as one RE2 expression (`tarn.query.filters`). RE2 reads a text once, but its automaton must know
for each place where the pattern may have begun. `_` after a `%` multiplies the states: `%a` and thirty times `_` has a
billion. Past its memory RE2 follows every state by itself, which took 99 seconds for a text of 8 MB and a pattern of a
thousand characters. So those are bounded, and so is a pattern that has one. What comes before the first `%` matches in
one place only and costs nothing, nor do literal characters and `%` without `_`.
"""

from typing import NamedTuple

LONGEST_PATTERN = 1000
"""Characters of a pattern."""
MOST_SINGLES = 8
"""`_` after the first `%`."""
LONGEST_WITH_SINGLES = 100
"""Characters of a pattern that has any of those."""


class Gap(NamedTuple):
    """A run of wildcards: so many characters, or so many and more."""

    least: int
    is_open: bool


def parts(pattern: str) -> list[str | Gap]:
    """Literal texts and the gaps between them. A backslash at the end is ignored; `check` refuses it."""
    found: list[str | Gap] = []
    characters = iter(pattern)
    for character in characters:
        last = found[-1] if found else None
        if character in "%_":
            gap = last if isinstance(last, Gap) else Gap(0, False)
            merged = Gap(gap.least + (character == "_"), gap.is_open or character == "%")
            found[len(found) - isinstance(last, Gap) :] = [merged]
        else:
            literal = next(characters, "") if character == "\\" else character
            found[len(found) - isinstance(last, str) :] = [(last if isinstance(last, str) else "") + literal]
    return found


def check(pattern: str) -> None:
    """Raises ValueError for a pattern that is not one, or that costs too much."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"is {len(pattern)} characters long, at most {LONGEST_PATTERN} are allowed")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("must not end with a single backslash, which takes the meaning from what follows it")
    gaps = [part for part in parts(pattern) if isinstance(part, Gap)]
    first = next((place for place, gap in enumerate(gaps) if gap.is_open), len(gaps))
    # In the first run with a `%` it makes no difference which of them come first.
    singles = sum(gap.least for gap in gaps[first + 1 :])
    if singles > MOST_SINGLES:
        raise ValueError(f"has {singles} `_` after its first run with a `%`, at most {MOST_SINGLES} are allowed there")
    if singles and len(pattern) > LONGEST_WITH_SINGLES:
        raise ValueError(
            f"is {len(pattern)} characters long, at most {LONGEST_WITH_SINGLES} are allowed with `_` after a `%`"
        )
