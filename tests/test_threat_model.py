"""Every guarantee in docs/threat-model.md names existing tests."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEST_REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def guarantees() -> list[str]:
    """Return the rows of the table of guarantees, without its header."""
    section = (ROOT / "docs" / "threat-model.md").read_text().split("## Promises\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_guarantee_names_a_test():
    assert len(guarantees()) > 20
    assert [row for row in guarantees() if not TEST_REFERENCE.search(row)] == []


def test_every_named_test_exists():
    named = [reference for row in guarantees() for reference in TEST_REFERENCE.findall(row)]

    assert [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)] == []
