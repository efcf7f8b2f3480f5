"""Generated parts of the documentation are up to date."""

from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.pages import SITE
from tests.docs.site import API, CONFIGURATION, configuration, with_routes


def test_table_of_routes_equals_the_openapi_document():
    assert API.read_text() == with_routes(API.read_text()), "run `make docs`"


def test_navigation_equals_the_index():
    assert CONFIGURATION.read_text() == configuration(), "run `make docs`"


def test_navigation_has_every_page_once():
    listed = list(_files(yaml.safe_load(CONFIGURATION.read_text())["nav"]))
    existing = {page.relative_to(SITE).as_posix() for page in SITE.rglob("*.md")}
    assert sorted(listed) == sorted(existing), "add a line to docs/index.md for each page, and run `make docs`"


def test_every_page_begins_with_its_title():
    for page in SITE.rglob("*.md"):
        assert page.read_text().startswith("# "), page.name


def _files(nav: Any) -> Iterator[str]:
    for entry in nav:
        for below in entry.values():
            yield from [below] if isinstance(below, str) else _files(below)
