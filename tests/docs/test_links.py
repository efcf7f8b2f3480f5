"""Where links lead, and that every page is led to."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.pages import INDEX, ROOT, SITE, anchors, links, pages

EXTERNAL = ("https://", "http://", "mailto:")


def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading():
    broken = [
        f"{page.relative_to(ROOT)}:{line}: {target}" for page, line, target in _local() if not _exists(page, target)
    ]
    assert broken == []


def test_no_page_of_the_site_links_to_what_is_not_in_it():
    outside = [
        f"{page.relative_to(ROOT)}:{line}: {target}"
        for page, line, target in _local()
        if page.is_relative_to(SITE)
        and not (_file(page, target).is_relative_to(SITE) and _file(page, target).is_file())
    ]
    assert outside == []


def test_every_page_is_reached_from_the_index():
    reached, waiting = {INDEX}, [INDEX]
    while waiting:
        page = waiting.pop()
        found = {_file(page, target) for _, target in links(page) if not target.startswith(EXTERNAL)}
        new = {each for each in found - reached if each.suffix == ".md" and each.exists()}
        reached |= new
        waiting += new
    orphans = sorted(str(page.relative_to(ROOT)) for page in set(SITE.rglob("*.md")) - reached)
    assert orphans == [], "add a line to docs/index.md for each, and run `make docs`"


def test_every_picture_is_shown_somewhere_and_can_be_drawn():
    shown = {_file(page, target) for page, _, target in _local()}
    pictures = set((SITE / "pictures").iterdir())
    assert pictures - shown == set()
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("viewBox"), f"{picture.name} has no size of its own"


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [("# Limits and quotas", "limits-and-quotas"), ("## Tags, queue, locks", "tags-queue-locks"), ("## `at=`", "at")],
)
def test_anchor_is_made_as_code_hosts_make_it(heading: str, anchor: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"{heading}\n\n{heading}\n")
    assert anchors(page) == {anchor, f"{anchor}-1"}


def _local() -> Iterator[tuple[Path, int, str]]:
    for page in pages():
        for line, target in links(page):
            if not target.startswith(EXTERNAL):
                yield page, line, target


def _file(page: Path, target: str) -> Path:
    name = target.split("#")[0]
    return (page.parent / name).resolve() if name else page


def _exists(page: Path, target: str) -> bool:
    file, _, anchor = _file(page, target), *target.partition("#")[1:]
    return file.exists() and (not anchor or anchor in anchors(file))
