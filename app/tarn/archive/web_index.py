"""What an index page on the web lists: links on the same host, below the folder of the page."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

from tarn.archive.sources import ListedFile, ListingFailure, PathFilter, refused
from tarn.archive.urls import Url
from tarn.archive.web import Web
from tarn.errors import TarnError
from tarn.model.cancellation import check

LARGEST_PAGE = 8 << 20
DEPTH = 16
PAGES = 10_000
"""Pages that one listing reads at most: a server can make up new ones for ever."""
TAG = re.compile(
    r"""<a\s(?:[^<>"']|"[^"<]{0,4096}+"|'[^'<]{0,4096}+'){0,4096}+>""",
    re.IGNORECASE,
)
"""A link's opening tag, which is all that the parser gets to see: for 64 KB that were made for it, it takes 45 seconds.
Nothing here goes back over what it has passed, or beyond the next tag."""
HTML = frozenset({"text/html", "application/xhtml+xml"})


@dataclass
class WebIndex:
    """One listing. A link that ends with a slash is a page of its own, read once. Any other is a file, and found on
    every page that links to it."""

    web: Web
    choice: PathFilter
    _pages: set[str] = field(default_factory=set)

    def files(self, url: Url) -> Iterator[ListedFile | ListingFailure]:
        """Raises what fetching the first page does, and SchemaViolation if it is no HTML."""
        top, links = self._read(url)
        return self._follow(top, top, links, 1)

    def _follow(self, top: Url, page: Url, links: list[str], depth: int) -> Iterator[ListedFile | ListingFailure]:
        for link in links:
            try:
                target = page.joined(link)
            except TarnError:
                continue  # a link to elsewhere, such as mailto:, or to nowhere
            if not target.is_below(top) or target.query:
                continue
            try:
                path = target.path_below(top)
            except TarnError as error:
                yield ListingFailure(target.path, error)
                continue
            if not path.endswith("/"):
                if self.choice.takes(path):
                    yield ListedFile(target.shown, path, None)
            elif self.choice.reaches(path) and target.path not in self._pages:
                yield from self._page(top, target, path, depth)

    def _page(self, top: Url, url: Url, path: str, depth: int) -> Iterator[ListedFile | ListingFailure]:
        try:
            if depth >= DEPTH:
                raise refused(f"it is more than {DEPTH} pages deep")
            if len(self._pages) >= PAGES:
                raise refused(f"there are more than {PAGES} pages")
            page, links = self._read(url)
            if not page.is_below(top):
                raise refused("the page redirects to elsewhere")
        except TarnError as error:
            yield ListingFailure(path, error)
        else:
            yield from self._follow(top, page, links, depth + 1)

    def _read(self, url: Url) -> tuple[Url, list[str]]:
        """Where a page was found in the end, and its links in their order, each once."""
        check()
        self._pages.add(url.path)
        page, source = self.web.open(url, LARGEST_PAGE)
        with source:
            if source.media_type not in HTML:
                raise refused("it is no HTML page that could list files")
            text = b"".join(source).decode(errors="replace")
        return page, links_of(text)


def links_of(page: str) -> list[str]:
    """Where a page's links lead, in their order, each once."""
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
