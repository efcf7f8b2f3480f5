"""Patterns of `like`: how they are parsed, and limits of their cost."""

import pytest
from tarn.model.ftm.pattern import LONGEST_PATTERN, LONGEST_WITH_SINGLES, MOST_SINGLES, Gap, check, parts


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", []),
        ("ab", ["ab"]),
        ("%", [Gap(0, True)]),
        ("__", [Gap(2, False)]),
        ("%%%a%%", [Gap(0, True), "a", Gap(0, True)]),
        ("%_%_a_b", [Gap(2, True), "a", Gap(1, False), "b"]),
        (r"a\%\_b\\", ["a%_b\\"]),
        (r"%\a_", [Gap(0, True), "a", Gap(1, False)]),
    ],
)
def test_runs_of_wildcards_and_literals_are_merged(pattern: str, expected: list[str | Gap]) -> None:
    assert parts(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "_" * LONGEST_PATTERN,
        "%_" * (LONGEST_PATTERN // 2),
        "_%" * (LONGEST_PATTERN // 2),
        "%a" * (LONGEST_PATTERN // 2),
        "____-__-__%",
        "%.____",
        "%a" + "_" * MOST_SINGLES,
        "%" + "_a" * MOST_SINGLES,
        "%a" + "\\_" * 40,
        "a" * 400 + "_" * 400 + "%" + "b" * 100,
    ],
)
def test_pattern_within_the_bounds_is_accepted(pattern: str) -> None:
    check(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("x" * (LONGEST_PATTERN + 1), "is 1001 characters long, at most 1000 are allowed"),
        ("%a" + "_" * 998, "has 998 `_` after its first run with a `%`, at most 8 are allowed there"),
        ("%a" + "_%" * 9, "has 9 `_` after its first run with a `%`, at most 8 are allowed there"),
        (
            "%" + "a" * LONGEST_WITH_SINGLES + "_",
            "is 102 characters long, at most 100 are allowed with `_` after a `%`",
        ),
        ("%\\", "single backslash"),
    ],
)
def test_pattern_that_costs_too_much_is_refused_with_the_limit(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|backslash") as refused:
        check(pattern)
    assert reason in str(refused.value)
