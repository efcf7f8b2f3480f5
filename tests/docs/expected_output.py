"""What a page says that is printed, held against what was. `…` stands for what nobody can know before."""

import difflib
import re


def differences(claimed: str, printed: str) -> list[str]:
    """What differs, as lines of a diff; nothing if the claim holds.

    `…` in a line stands for any text in it, and in a line of its own for any lines. Space at the ends of lines, and how
    many spaces set two columns apart, do not count.
    """
    expected, actual = _lines(claimed), _lines(printed)
    if _pattern(expected).fullmatch("".join(f"{line}\n" for line in actual)):
        return []
    return list(difflib.unified_diff(expected, actual, "claimed", "printed", lineterm=""))


def _lines(text: str) -> list[str]:
    return [re.sub(r"\s+", " ", line.rstrip()) for line in text.strip("\n").splitlines()]


def _pattern(lines: list[str]) -> re.Pattern[str]:
    any_lines, any_text = r"(?:.*\n)*", ".*"
    return re.compile("".join(any_lines if line == "…" else _line(line, any_text) + r"\n" for line in lines))


def _line(line: str, any_text: str) -> str:
    return any_text.join(re.escape(part) for part in line.split("…"))
