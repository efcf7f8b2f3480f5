"""The generated parts of the documentation: the table of routes, and the navigation of the site.

python -m tests.docs.site    regenerate both
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from tarn.api.http.route_access import TABLE, Access

from clients.document import DOCUMENT
from tests.docs.pages import INDEX, ROOT, SITE

API = SITE / "api.md"
CONFIGURATION = ROOT / "mkdocs.yml"
BEGIN, END = "<!-- routes -->\n", "<!-- end of routes -->\n"

ABOUT = """\
# Configuration of MkDocs. Generated from docs/index.md by `make docs`.
"""
SECTION = re.compile(r"^## (.*)$")
ENTRY = re.compile(r"^- \[([^\]]*)\]\(([^)]*)\)")
DECISION = re.compile(r"^\| \[(\d+)\]\(([^)]*)\) \| (.*) \|$")


def with_routes(page: str) -> str:
    """Return the API page with a current table of routes."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{''.join(_tables())}{END}{after}"


def configuration() -> str:
    """Return the configuration of the site, with its navigation."""
    document = {"site_name": "Tarn", "docs_dir": "docs", "use_directory_urls": False, "nav": list(_navigation())}
    return ABOUT + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000)


def main() -> None:
    """Write both files."""
    API.write_text(with_routes(API.read_text()))
    CONFIGURATION.write_text(configuration())


def _tables() -> Iterator[str]:
    paths = json.loads(DOCUMENT.read_text())["paths"]
    routes = [(path, method, route) for path, methods in paths.items() for method, route in methods.items()]
    for tag in dict.fromkeys(route["tags"][0] for _, _, route in routes):
        yield f"\n### {tag.capitalize()}\n\n| route | needs | what it does |\n|---|---|---|\n"
        for path, method, route in routes:
            if route["tags"][0] == tag:
                first, *_ = re.split(r"\.(?=\s|$)", " ".join(route["description"].replace("|", "\\|").split()))
                yield f"| `{method.upper()} {path}` | {_needs(TABLE[route['operationId']])} | {first} |\n"
    yield "\n"


def _needs(access: Access) -> str:
    if access.lake:
        return "lake"
    if access.dataset is not None:
        return access.dataset.value
    return "key" if access.identified else "-"


def _navigation() -> Iterator[dict[str, object]]:
    """Yield the sections of the index with their pages; every decision is listed below the page of decisions."""
    yield {"Tarn": INDEX.name}
    section: list[dict[str, object]] = []
    for line in INDEX.read_text().splitlines():
        if heading := SECTION.match(line):
            section = []
            yield {heading[1]: section}
        elif entry := ENTRY.match(line):
            page = SITE / entry[2]
            below = [{"All": entry[2]}, *_below(page)] if page.name == "README.md" else entry[2]
            section.append({entry[1]: below})


def _below(page: Path) -> Iterator[dict[str, object]]:
    for line in page.read_text().splitlines():
        if row := DECISION.match(line):
            yield {f"{row[1]} {row[3]}": (page.parent / row[2]).relative_to(SITE).as_posix()}


if __name__ == "__main__":
    main()
