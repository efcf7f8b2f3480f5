"""Links have targets, and every page is linked."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.pages import INDEX, ROOT, SITE, anchors, links, pages

EXTERNAL = ("https://", "http://", "mailto:")


def test_every_link_has_a_file_and_every_anchor_a_heading():
    broken = [
        f"{page.relative_to(ROOT)}:{line}: {target}" for page, line, target in _local() if not _exists(page, target)
    ]
    assert broken == []


def test_pages_of_the_site_link_only_to_files_of_the_site():
    outside = [
        f"{page.relative_to(ROOT)}:{line}: {target}"
        for page, line, target in _local()
        if page.is_relative_to(SITE)
        and not (_file(page, target).is_relative_to(SITE) and _file(page, target).is_file())
    ]
    assert outside == []


def test_every_page_can_be_reached_from_the_index():
    reached, queue = {INDEX}, [INDEX]
    while queue:
        page = queue.pop()
        targets = {_file(page, target) for _, target in links(page) if not target.startswith(EXTERNAL)}
        new = {each for each in targets - reached if each.suffix == ".md" and each.exists()}
        reached |= new
        queue += new
    orphans = sorted(str(page.relative_to(ROOT)) for page in set(SITE.rglob("*.md")) - reached)
    assert orphans == [], "add a line to docs/index.md for each, and run `make docs`"


def test_every_picture_is_used_and_is_valid_svg():
    used = {_file(page, target) for page, _, target in _local()}
    pictures = set((SITE / "pictures").iterdir())
    assert pictures - used == set()
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("viewBox"), f"{picture.name} has no viewBox"


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [("# Limits and quotas", "limits-and-quotas"), ("## Tags, queue, locks", "tags-queue-locks"), ("## `at=`", "at")],
)
def test_anchors_are_those_of_code_hosts(heading: str, anchor: str, tmp_path: Path):
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
