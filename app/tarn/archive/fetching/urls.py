"""Strict parsing of http and https URLs: what two parsers could interpret differently is refused."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Self
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from tarn.archive.fetching.addresses import ascii_host
from tarn.archive.fetching.sources import refused

PORTS = {"http": 80, "https": 443}
LONGEST = 8192
UNSAFE = re.compile(r"[\x00-\x20\x7f-\x9f\\\u2028\u2029]")
KEPT = "%/:?#[]@!$&'()*+,;=~"
"""Characters that are not encoded in a path or query: those with a meaning, and those of existing escapes."""
DOTS = frozenset({".", ".."})


@dataclass(frozen=True)
class Url:
    """A parsed and checked http or https URL."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL. Raises SchemaViolation unless it is a plain http or https URL without credentials."""
        if len(text) > LONGEST:
            raise refused(f"the URL is longer than {LONGEST} characters")
        if UNSAFE.search(text):
            raise refused("the URL has a space, a control character or a backslash in it")
        try:
            parts = urlsplit(text)
            port = parts.port
            path, query = (quote(part, safe=KEPT) for part in (parts.path, parts.query))
        except ValueError:
            raise refused("the URL is not well formed") from None
        if parts.scheme not in PORTS:
            raise refused("only http and https are fetched from the web")
        if "@" in parts.netloc:
            raise refused("the URL has credentials in it")
        if port == 0:
            raise refused("the URL has port 0")
        return cls(parts.scheme, ascii_host(_written_host(parts)), port or PORTS[parts.scheme], path or "/", query)

    def joined(self, reference: str) -> Self:
        """Resolve a link or redirect relative to this URL. Raises SchemaViolation."""
        if UNSAFE.search(reference):
            raise refused("the URL has a space, a control character or a backslash in it")
        try:
            return type(self).parse(urljoin(f"{self.origin}{self.target}", reference))
        except ValueError:
            raise refused("the URL is not well formed") from None

    @cached_property
    def authority(self) -> str:
        """Return host and port in the form of a `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def shown(self) -> str:
        """Return the URL without its query, which may contain a signature or a token."""
        return f"{self.origin}{self.path}"

    @property
    def name(self) -> str:
        return unquote(self.path.rsplit("/", 1)[-1])

    @property
    def folder(self) -> str:
        """Return the path up to its last slash."""
        return self.path[: self.path.rindex("/") + 1]

    def is_below(self, top: "Url") -> bool:
        """Return whether this is on the same origin, below the folder of `top`, and not that folder itself."""
        return self.origin == top.origin and self.path.startswith(top.folder) and self.path != top.folder

    def path_below(self, top: "Url") -> str:
        """Return the decoded path below the folder of `top`. Raises SchemaViolation if it is not a valid path."""
        encoded = self.path[len(top.folder) :].split("/")
        try:
            segments = [unquote(segment, errors="strict") for segment in encoded]
        except UnicodeDecodeError:
            raise refused("its path is not UTF-8") from None
        if any(segment in DOTS or "/" in segment or "\x00" in segment for segment in segments) or "" in segments[:-1]:
            raise refused("its path has an empty segment, . or .. in it, or an encoded slash or NUL")
        return "/".join(segments)


def _written_host(parts: SplitResult) -> str:
    """Return the host as it was written, including brackets. Raises SchemaViolation."""
    host = re.sub(r":[0-9]*$", "", parts.netloc)
    if not host:
        raise refused("the URL has no host")
    return host
