"""Listing of an index page on the web: links on the same host, below the folder of the page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

from tarn.archive.fetching.sources import ListedFile, ListingFailure, PathFilter, refused
from tarn.archive.fetching.urls import Url
from tarn.archive.fetching.web import Web
from tarn.errors import TarnError
from tarn.model.work.cancellation import check

LARGEST_PAGE = 8 << 20
DEPTH = 16
PAGES = 10_000
"""Most pages that one listing reads: a server can generate new ones without end."""
TAG = re.compile(
    r"""<a\s(?:[^<>"']|"[^"<]{0,4096}+"|'[^'<]{0,4096}+'){0,4096}+>""",
    re.IGNORECASE,
)
"""A link's opening tag. The HTML parser gets only these, as it takes 45 seconds for 64 KB of crafted input. The pattern
never backtracks, and never matches beyond the next tag."""
HTML = frozenset({"text/html", "application/xhtml+xml"})


@dataclass
class WebIndex:
    """A listing of an index page. A link that ends with a slash is a page of its own, read once. Any other is a file,
    and listed for every page that links to it."""

    web: Web
    path_filter: PathFilter
    _pages: set[str] = field(default_factory=set)

    def files(self, url: Url) -> Iterator[ListedFile | ListingFailure]:
        """Yield the listed files. Raises what fetching the first page does, and SchemaViolation if it is not HTML."""
        top, links = self._read(url)
        return self._follow(top, top, links, 1)

    def _follow(self, top: Url, page: Url, links: list[str], depth: int) -> Iterator[ListedFile | ListingFailure]:
        for link in links:
            try:
                target = page.joined(link)
            except TarnError:
                continue  # a link that is not fetched, such as mailto:, or is invalid
            if not target.is_below(top) or target.query:
                continue
            try:
                path = target.path_below(top)
            except TarnError as error:
                yield ListingFailure(target.path, error)
                continue
            if not path.endswith("/"):
                if self.path_filter.takes(path):
                    yield ListedFile(target.shown, path, None)
            elif self.path_filter.reaches(path) and target.path not in self._pages:
                yield from self._page(top, target, path, depth)

    def _page(self, top: Url, url: Url, path: str, depth: int) -> Iterator[ListedFile | ListingFailure]:
        try:
            if depth >= DEPTH:
                raise refused(f"it is more than {DEPTH} pages deep")
            if len(self._pages) >= PAGES:
                raise refused(f"there are more than {PAGES} pages")
            page, links = self._read(url)
            if not page.is_below(top):
                raise refused("the page redirects to another site or folder")
        except TarnError as error:
            yield ListingFailure(path, error)
        else:
            yield from self._follow(top, page, links, depth + 1)

    def _read(self, url: Url) -> tuple[Url, list[str]]:
        """Return the final URL of a page, and its links in order, each once."""
        check()
        self._pages.add(url.path)
        page, source = self.web.open(url, LARGEST_PAGE)
        with source:
            if source.media_type not in HTML:
                raise refused("it is not an HTML page")
            text = b"".join(source).decode(errors="replace")
        return page, links_of(text)


def links_of(page: str) -> list[str]:
    """Return the targets of a page's links in order, each once."""
    parser = _Links()
    for tag in TAG.finditer(page):
        parser.feed(tag[0])
        parser.reset()
    return [*parser.found]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if href:
            self.found[href.strip().replace(" ", "%20")] = None
