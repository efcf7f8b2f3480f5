"""Documentation names modules and files of the code: each of them must exist."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, pages

SOURCES = ROOT / "app" / "tarn"
PACKAGES = {folder.name for folder in SOURCES.iterdir() if folder.is_dir()}

CODE = re.compile(r"`([^`\n]+)`")
REPOSITORY_PATH = re.compile(r"(?<![\w./-])(?:app/|tests/|bench/|clients/|migrations/|helm/|\.ci/)[\w./-]*\w")
PACKAGE_PATH = re.compile(r"(?<![\w./-])tarn/[\w/.]*\w")
DOTTED = re.compile(r"(?<![\w./-])tarn(?!\.py\b)(?:\.[a-z_]\w*)+")
MODULE = re.compile(r"([a-z]\w*)(?:/[a-z]\w*)+/?")
TAG = re.compile(r"\w+/last_\w+")
"""Keys of Tarn's own tags, whose first part may also be the name of a package."""


def missing(text: str) -> Iterator[str]:
    """Yield the modules and files that a piece of code in a page names and that do not exist."""
    for name in REPOSITORY_PATH.findall(text):
        if not _exists(ROOT / name):
            yield name
    for name in PACKAGE_PATH.findall(text):
        if not _exists(ROOT / "app" / name):
            yield name
    for name in DOTTED.findall(text):
        path = ROOT / "app" / name.replace(".", "/")
        if not _exists(path) and not _defines(path.parent, path.name):
            yield name
    module = MODULE.fullmatch(text)
    if module and module[1] in PACKAGES and not TAG.fullmatch(text) and not _is_module(text.rstrip("/")):
        yield text


def _is_module(name: str) -> bool:
    return _exists(SOURCES / name) or _exists(ROOT / "tests" / name)


def _exists(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.py").exists()


def _defines(module: Path, name: str) -> bool:
    source = module.with_name(f"{module.name}.py")
    return source.exists() and re.search(rf"^(?:def |class )?{name}\b", source.read_text(), re.MULTILINE) is not None


def test_every_module_that_a_page_names_exists():
    wrong = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        for code in CODE.findall(page.read_text())
        for name in missing(code)
    ]
    assert wrong == []


def test_names_of_modules_are_found_in_code():
    named = "`lake/commit` `lake/nothing` `app/tarn/lake/commit.py` `app/tarn/lake/nothing.py` `tarn/nothing`"
    dotted = "`tarn.model.document.load` `tarn.model.document.nothing` `python -m tarn.cli` `journal/last_updated`"
    names = [name for code in CODE.findall(f"{named} {dotted}") for name in missing(code)]
    assert names == ["lake/nothing", "app/tarn/lake/nothing.py", "tarn/nothing", "tarn.model.document.nothing"]
