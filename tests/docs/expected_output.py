"""Compare the output that a page shows with the actual output. `…` matches any text."""

import difflib
import re


def differences(expected: str, actual: str) -> list[str]:
    """Return the lines of a diff, or an empty list if the output is as expected.

    `…` within a line matches any text, and as a line of its own any lines. Spaces at the ends of lines, and the number
    of spaces between columns, are ignored.
    """
    expected_lines, actual_lines = _lines(expected), _lines(actual)
    if _pattern(expected_lines).fullmatch("".join(f"{line}\n" for line in actual_lines)):
        return []
    return list(difflib.unified_diff(expected_lines, actual_lines, "expected", "actual", lineterm=""))


def _lines(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line.rstrip()) for line in text.strip("\n").splitlines()]


def _pattern(lines: list[str]) -> re.Pattern[str]:
    any_lines, any_text = r"(?:.*\n)*", ".*"
    return re.compile("".join(any_lines if line == "…" else _line(line, any_text) + r"\n" for line in lines))


def _line(line: str, any_text: str) -> str:
    return any_text.join(re.escape(part) for part in line.split("…"))
