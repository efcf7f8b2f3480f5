"""The guarded fetcher: the only way to fetch files from other servers and folders.

    http, https     public addresses, pinned for every hop          tarn.archive.fetching.web
    file, a path    below the folders that the operator allowed     tarn.archive.fetching.local
    s3, gs, az      the stores that the operator allowed            tarn.archive.fetching.stores

Any other address is refused before anything is opened, resolved or connected to.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from tarn.archive.fetching.addresses import Guard, resolve_by_system
from tarn.archive.fetching.dns import Lookups, Resolve
from tarn.archive.fetching.local import Roots
from tarn.archive.fetching.sources import ListedFile, ListingFailure, PathFilter, Source, refused
from tarn.archive.fetching.stores import SCHEMES, SourceStores, source_connection
from tarn.archive.fetching.urls import PORTS, Url
from tarn.archive.fetching.web import Clock, Web
from tarn.archive.fetching.web_index import WebIndex
from tarn.errors import StartRefused
from tarn.model.file import LONGEST_URI
from tarn.settings import Settings

SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)


@dataclass(frozen=True)
class Fetcher:
    """Opens and lists sources. Safe to share between threads and to pickle to other processes."""

    web: Web
    roots: Roots
    stores: SourceStores

    @classmethod
    def from_settings(
        cls, settings: Settings, resolve: Resolve = resolve_by_system, clock: Clock = time.monotonic
    ) -> Self:
        """Create it. Raises StartRefused for an invalid source, or one that would let tenants read the lake itself."""
        guard = Guard.opened_for(settings.fetch_private_hosts, Lookups(resolve, settings.fetch_timeout))
        connections = tuple(
            source_connection(uri, {name: value.get_secret_value() for name, value in options.items()})
            for uri, options in settings.fetch_stores.items()
        )
        _require_lake_excluded(settings)
        limit = settings.fetch_max_bytes
        return cls(
            Web(guard, limit, settings.fetch_timeout, settings.fetch_max_seconds, clock),
            Roots(settings.fetch_roots, limit),
            SourceStores(connections, limit),
        )

    def check(self, uri: str) -> None:
        """Raise SchemaViolation for an address that may not be fetched from. Does not access it."""
        scheme = _scheme(uri)
        if scheme in PORTS:
            Url.parse(uri)
        elif scheme in SCHEMES:
            self.stores.place(uri)
        else:
            self.roots.place(_path(uri, scheme))

    def open(self, uri: str) -> Source:
        """Open a file, to be read once in a `with` block.

        Raises SchemaViolation if it may not be fetched, FileNotFound, BodyTooLarge, SourceFailed and, for a store,
        Unavailable. Reading it may raise the last three.
        """
        scheme = _scheme(uri)
        if scheme in PORTS:
            return self.web.open(Url.parse(uri))[1]
        if scheme in SCHEMES:
            return self.stores.open(uri)
        return self.roots.open(_path(uri, scheme))

    def sources(
        self, uri: str, prefix: str = "", glob: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> Iterator[ListedFile | ListingFailure]:
        """Yield the files below a folder, a store's prefix or an index page that pass the filters, and the failures.

        Paths are relative to `uri`. Raises immediately what `open` does if the address itself cannot be listed.
        """
        path_filter = PathFilter(prefix, tuple(glob), tuple(exclude))
        scheme = _scheme(uri)
        if scheme in PORTS:
            return WebIndex(self.web, path_filter).files(Url.parse(uri))
        if scheme in SCHEMES:
            return self.stores.files(uri, path_filter)
        return self.roots.files(_path(uri, scheme), path_filter)


def _scheme(uri: str) -> str:
    """Return the scheme of an address, empty for a path. Raises SchemaViolation for an unsupported one."""
    if len(uri) > LONGEST_URI:
        raise refused(f"the address is longer than {LONGEST_URI} characters")
    try:
        uri.encode()
    except UnicodeEncodeError:
        raise refused("the address is not well formed") from None
    scheme_match = SCHEME.match(uri)
    scheme = scheme_match[1].lower() if scheme_match else ""
    if scheme not in {"", "file", *PORTS, *SCHEMES}:
        raise refused("only http, https, s3, gs, az and files of the server are fetched")
    return scheme


def _path(uri: str, scheme: str) -> str:
    """Return the path of a `file:` URI or of a plain path. Raises SchemaViolation."""
    if not scheme:
        path = uri
    else:
        try:
            parts = urlsplit(uri)
            path = unquote(parts.path, errors="strict")
        except ValueError:
            raise refused("the address is not well formed") from None
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise refused("an address of a file must look like file:///path")
    if not path.startswith("/") or path.startswith("//"):
        raise refused("the path of a file must be absolute")
    return path


def _require_lake_excluded(settings: Settings) -> None:
    """Raise StartRefused if a source open to tenants contains the lake, the database or the key, or is in them."""
    lake = urlsplit(settings.lake_uri)
    if lake.scheme in SCHEMES:
        own = f"{lake.scheme}://{lake.netloc}{lake.path}".rstrip("/")
        if any(_overlap(own, uri) for uri in settings.fetch_stores):
            raise StartRefused("TARN_FETCH_STORES: tenants could read the lake itself; open another bucket or folder")
    else:
        folder = Path(unquote(lake.path) if lake.scheme else settings.lake_uri)
        _require_excluded(settings, folder, "the lake")
    if settings.database_url.startswith("sqlite:///"):
        _require_excluded(settings, Path(settings.database_url.removeprefix("sqlite:///")), "the database")
    _require_excluded(settings, settings.admin_key_file, "the administrator's key")


def _require_excluded(settings: Settings, own_path: Path, description: str) -> None:
    folder = f"/{own_path.resolve()}"
    for root in settings.fetch_roots:
        if _overlap(folder, f"/{root.resolve()}"):
            raise StartRefused(f"TARN_FETCH_ROOTS: tenants could read {description} below {root}; open another folder")


def _overlap(one: str, other: str) -> bool:
    shorter, longer = sorted((f"{one.rstrip('/')}/", f"{other.rstrip('/')}/"), key=len)
    return longer.startswith(shorter)
