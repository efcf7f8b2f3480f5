"""Metadata: a JSON object that callers attach to writes, stored unchanged from the request to the manifest."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator

DEEPEST = 64
"""Maximum nesting of objects and arrays; JSON parsers have different limits."""

LEAST, GREATEST = -(2**63), 2**64 - 1
"""Range of integers that JSON parsers keep exactly; others would be rounded or cause an error."""


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    _check(metadata, (), DEEPEST)
    return metadata


def checked_value(value: Any) -> Any:
    """Return a JSON value unchanged. Raises ValueError for values that JSON cannot represent."""
    _check(value, (), DEEPEST)
    return value


def _check(value: Any, place: tuple[str, ...], deeper: int) -> None:
    """Raise ValueError, with its path, for the first value that JSON cannot represent."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _require(_is_text(value), place, "contains an unpaired surrogate")
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
    """Return whether it can be encoded as UTF-8: a lone `\\ud800` is valid JSON, but cannot be stored in a manifest."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(holds: bool, place: tuple[str, ...], reason: str) -> None:
    if not holds:
        raise ValueError(f"{'.'.join(place)[:200] or 'the object'} {reason}")


Metadata = Annotated[dict[str, Any], AfterValidator(_plain)]
"""A JSON object. NaN, infinities and values that do not survive a round trip are refused; the error has their path."""
