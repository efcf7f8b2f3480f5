"""Listing of index pages on the web: files below the start page, and nothing else."""

from itertools import count

import pytest
from tarn.archive.fetching import web_index
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.fetching.sources import ListedFile, ListingFailure
from tarn.archive.fetching.web_index import links_of
from tarn.errors import BodyTooLarge, FileNotFound, SchemaViolation

from tests.archive.web import Canary, Scripted, answer, page, redirect


def listed(fetcher: Fetcher, uri: str, **choice) -> tuple[list[str], dict[str, str]]:
    """Return the paths found, in order, and the failures."""
    results = [*fetcher.sources(uri, **choice)]
    failed = {each.path: each.error.detail for each in results if isinstance(each, ListingFailure)}
    return [each.path for each in results if isinstance(each, ListedFile)], failed


@pytest.fixture
def top(server: Scripted) -> str:
    return f"http://files.test:{server.port}/data/"


def test_listing_returns_the_files_of_all_pages_with_their_uris(fetcher: Fetcher, server: Scripted, top: str):
    server.scripts |= {
        "/data/": page("?C=N;O=D", "/", "../", "a.txt", "b/", "a.txt", "für mich.pdf", "#top", "./c%20d.txt"),
        "/data/b/": page("../", "/data/", "/data/b/e.txt", "f/", f"{top}b/g.txt"),
        "/data/b/f/": page("../../", "../", "h"),
        "/data/b/f/h": answer(b"deep"),
    }

    results = [*fetcher.sources(top)]

    assert [each.path for each in results] == ["a.txt", "b/e.txt", "b/f/h", "b/g.txt", "für mich.pdf", "c d.txt"]
    assert results[2] == ListedFile(f"{top}b/f/h", "b/f/h", None)
    with fetcher.open(f"{top}b/f/h") as source:
        assert b"".join(source) == b"deep"
    assert len(server.requests) == 4, "each page is read once"


def test_listing_stays_on_its_host_and_below_its_path(fetcher: Fetcher, server: Scripted, canary: Canary, top: str):
    server.scripts["/data/"] = page(
        f"http://canary.test:{canary.port}/data/x", f"http://127.0.0.1:{canary.port}/data/", "//canary.test/data/x",
        f"https://files.test:{server.port}/data/x", "http://files.test/data/x", "/datax", "/other/x", "../x",
        "x/../../y", "mailto:a@b", "javascript:1", "ftp://files.test/data/x", "file:///data/x", "http://me@files.test/data/x",
        "http://[/", "\\\\canary.test\\x", "good",
    )  # fmt: skip

    assert listed(fetcher, top) == (["good"], {})
    assert len(server.requests) == 1


@pytest.mark.parametrize("link", ["%2e%2e/x", "a%2fb", "%00", "%ff", "a//b", ".%2e/", "..%2f..%2fx"])
def test_link_that_is_not_a_path_is_a_failure(fetcher: Fetcher, server: Scripted, top: str, link: str):
    server.scripts["/data/"] = page(f"{top}{link}", "good")

    paths, failed = listed(fetcher, top)

    assert paths == ["good"]
    assert [*failed] == [f"/data/{link}"]


def test_failed_page_is_counted_and_the_listing_continues(fetcher: Fetcher, server: Scripted, canary: Canary, top: str):
    server.scripts |= {
        "/data/": page("gone/", "text/", "away/", "up/", "moved/", "large/", "good"),
        "/data/text/": answer(b"<a href=x>", Content_Type="text/plain"),
        "/data/away/": redirect(f"http://canary.test:{canary.port}/data/away/"),
        "/data/up/": redirect("/other/"),
        "/other/": page("x"),
        "/data/moved/": redirect("/data/here/"),
        "/data/here/": page("x"),
        "/data/large/": answer(bytes(web_index.LARGEST_PAGE + 1), Content_Type="text/html"),
    }

    paths, failed = listed(fetcher, top)

    assert paths == ["here/x", "good"]
    assert failed.keys() == {"gone/", "text/", "away/", "up/", "large/"}
    assert "not at a public address" in failed["away/"]
    assert "redirects to another site or folder" in failed["up/"]


def test_page_may_be_named_without_its_slash_or_by_a_file(fetcher: Fetcher, server: Scripted, top: str):
    server.scripts |= {
        "/data": redirect("/data/"),
        "/data/": page("a"),
        "/data/index.html": page("a", "index.html"),
    }

    assert listed(fetcher, top.rstrip("/")) == (["a"], {})
    assert listed(fetcher, f"{top}index.html") == (["a", "index.html"], {})


def test_listing_with_a_filter_reads_only_pages_that_can_match(fetcher: Fetcher, server: Scripted, top: str):
    server.scripts |= {"/data/": page("a.pdf", "b/", "c/"), "/data/b/": page("d.pdf", "e.txt", "f.pdf")}

    assert listed(fetcher, top, prefix="b/", glob=["*.pdf"], exclude=["*/f*"]) == (["b/d.pdf"], {})
    assert len(server.requests) == 2


def test_listing_of_endless_generated_pages_ends(
    fetcher: Fetcher, server: Scripted, top: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(web_index, "PAGES", 5)
    deeper = ["/data/" + "x/" * n for n in range(web_index.DEPTH + 2)]
    server.scripts |= dict.fromkeys(deeper, page("x/", "f"))
    assert listed(fetcher, top)[1].popitem()[1].endswith("more than 5 pages")

    monkeypatch.undo()
    paths, failed = listed(fetcher, top)
    assert len(paths) == web_index.DEPTH
    assert len(failed) == 1
    assert failed.popitem()[1].endswith(f"more than {web_index.DEPTH} pages deep")


def test_unreadable_first_page_is_an_error_at_once(fetcher: Fetcher, server: Scripted, top: str):
    server.scripts["/data/file"] = answer(b"x", Content_Type="application/pdf")
    server.scripts["/data/large"] = answer(bytes(web_index.LARGEST_PAGE + 1), Content_Type="text/html")

    for uri, error in (("no/", FileNotFound), ("file", SchemaViolation), ("large", BodyTooLarge)):
        with pytest.raises(error):
            fetcher.sources(f"{top}{uri}")
    with pytest.raises(SchemaViolation):
        fetcher.sources("http://127.0.0.1/")


@pytest.mark.parametrize(
    ("html", "links"),
    [
        ('<A class="x > y" HREF="a&amp;b">', ["a&b"]),
        ("<a\nhref='q' ><a href=plain>", ["q", "plain"]),
        ("<a href=' a b '>", ["a%20b"]),
        ("<area href=x><abbr href=y><a name=z><a href><a href=''>", []),
        ("<a href=a><a href=b><a href=a>", ["a", "b"]),
        ("<a href=x", []),
        ("<a b='<a href=x>", ["x"]),
    ],
)
def test_links_are_resolved_like_in_a_browser(html: str, links: list[str]):
    assert links_of(html) == links


@pytest.mark.parametrize("piece", ["<a ", '<a b="', "<!--", "<![", "<a href='", "</a", "<a b=x ", "&#"])
def test_page_crafted_to_slow_the_parser_is_cut(piece: str, monkeypatch: pytest.MonkeyPatch):
    """Count the bytes given to the parser instead of measuring time: complete pages of these take minutes."""
    fed = count()
    monkeypatch.setattr(web_index._Links, "feed", lambda *_: next(fed))

    assert links_of(piece * 300_000) == []
    assert next(fed) == 0
