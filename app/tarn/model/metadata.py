"""Metadata: what callers say of their own writes, kept as it is from the request to the manifest."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator

DEEPEST = 64
"""Levels of objects and arrays; readers of JSON give up at some depth, each at its own."""

LEAST, GREATEST = -(2**63), 2**64 - 1
"""Integers that JSON readers keep exactly; a greater one would become another number, or an error, on its way."""


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    _check(metadata, (), DEEPEST)
    return metadata


def checked_value(value: Any) -> Any:
    """Any JSON value, as it is. Raises ValueError for what JSON does not have."""
    _check(value, (), DEEPEST)
    return value


def _check(value: Any, place: tuple[str, ...], deeper: int) -> None:
    """Raise ValueError for the first value that JSON does not have, with its place."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _require(_is_text(value), place, "has half of a surrogate pair, which is no text")
    elif isinstance(value, float):
        _require(math.isfinite(value), place, "is NaN or infinite, which JSON does not have")
    elif isinstance(value, int):
        _require(LEAST <= value <= GREATEST, place, "is an integer of more than 64 bits: send it as a string")
    else:
        _require(isinstance(value, dict | list), place, "is not a JSON value")
        _require(deeper > 0, place, f"is nested more than {DEEPEST} levels deep")
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            is_name = not isinstance(value, dict) or (isinstance(name, str) and _is_text(name))
            _require(is_name, place, "has a name that is not a string")
            _check(inner, (*place, str(name)), deeper - 1)


def _is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: `\\ud800` alone is JSON, and no manifest could hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(holds: bool, place: tuple[str, ...], reason: str) -> None:
    if not holds:
        raise ValueError(f"{'.'.join(place)[:200] or 'the object'} {reason}")


Metadata = Annotated[dict[str, Any], AfterValidator(_plain)]
"""A JSON object. NaN, infinities and what readers would not give back as it was are refused, by their place."""
