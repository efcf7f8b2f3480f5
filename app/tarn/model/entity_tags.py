"""Entity tags of documents, and their comparison with `If-Match` and `If-None-Match`."""

import hashlib


def etag(text: bytes) -> str:
    """Return the strong entity tag of a document: equal bytes have equal tags, independent of history."""
    return f'"{hashlib.sha256(text).hexdigest()[:32]}"'


def matches(if_match: str, tag: str) -> bool:
    """Return whether `If-Match` contains this entity tag. Strong comparison: a weak tag (`W/`) never matches."""
    return if_match.strip() == "*" or tag in _listed(if_match)


def matches_none_match(if_none_match: str, tag: str) -> bool:
    """Return whether `If-None-Match` contains this entity tag. Weak comparison: `W/` is ignored."""
    return if_none_match.strip() == "*" or tag in [listed.removeprefix("W/") for listed in _listed(if_none_match)]


def _listed(header: str) -> list[str]:
    return [part.strip() for part in header.split(",")]
