"""Paths of the API."""

from urllib.parse import quote

from tarn.cli.failures import Misuse


def at(base: str, *segments: str) -> str:
    """The path of what bears these names below a base. Raises Misuse for one that would lead elsewhere."""
    for segment in segments:
        if segment in ("", ".", ".."):
            raise Misuse(f"{segment!r} is not a name")
    return "/".join([base, *(quote(segment, safe="", errors="surrogateescape") for segment in segments)])
