"""API paths, built from names with percent-encoding."""

from urllib.parse import quote

from tarn_client.errors import InvalidRequest


def path_of(base: str, *names: str) -> str:
    """Return the path below a base, with each name as one segment. Raises InvalidRequest for '', '.' and '..'."""
    for name in names:
        if name in ("", ".", ".."):
            raise InvalidRequest(f"{name!r} is not a name")
    return "/".join([base, *(quote(name, safe="", errors="surrogateescape") for name in names)])
