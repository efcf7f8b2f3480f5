"""Every rule of docs/contract.md has a test, or is listed as pending with a reason."""

from pathlib import Path

import pytest

from tests.contract.check import Mark, inconsistencies, marks_in, rules_in
from tests.contract.pending import PENDING

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "contract.md"

FAMILIES = {"M": 13, "D": 3, "H": 9, "W": 9, "X": 5}


def test_every_rule_has_its_test_or_is_pending_and_every_mark_has_its_rule():
    sources = sorted((ROOT / "tests").rglob("*.py"))
    marks = [mark for path in sources for mark in marks_in(path.read_text(), str(path.relative_to(ROOT)))]

    assert inconsistencies(rules_in(DOCUMENT.read_text()), marks, PENDING) == []


def test_document_lists_all_rules():
    expected = {f"{family}{number}" for family, last in FAMILIES.items() for number in range(1, last + 1)}

    assert set(rules_in(DOCUMENT.read_text())) == expected


def test_every_pending_rule_has_a_reason():
    assert all(PENDING.values())


CONTRACT = """
# A contract
- **A1** The first rule, which is not **A7**.
- **A2** The second, on
  - **A8** no line of its own.
"""


def test_rules_are_the_bold_ids_at_the_start_of_top_level_items():
    assert rules_in(CONTRACT) == ["A1", "A2"]


SOURCE = '''
import pytest
from pytest import mark

@pytest.mark.contract("A1", "A2")
@pytest.mark.parametrize("x", [1])
def test_one(x): ...

class TestIt:
    @mark.contract("A3")
    async def test_two(self): ...

@pytest.mark.contract("A4")
def helper(): ...

def test_three():
    """@pytest.mark.contract("A5")"""
    contract("A6")
'''


def test_marks_in_source_are_found_with_all_their_rules():
    assert sorted(marks_in(SOURCE, "t.py"), key=lambda mark: mark.rule) == [
        Mark("A1", "t.py:5", on_test=True),
        Mark("A2", "t.py:5", on_test=True),
        Mark("A3", "t.py:10", on_test=True),
        Mark("A4", "t.py:13", on_test=False),
    ]


def test_mark_with_a_variable_is_rejected():
    with pytest.raises(ValueError, match="malformed"):
        list(marks_in("@pytest.mark.contract(RULE)\ndef test_one(): ...", "t.py"))


A1, A2 = Mark("A1", "t.py:1", on_test=True), Mark("A2", "t.py:2", on_test=True)


@pytest.mark.parametrize(
    ("rules", "marks", "pending"),
    [
        (["A1", "A2"], [A1, A2], []),
        (["A1", "A2"], [A1, A1], ["A2"]),
        (["A1"], [], ["A1"]),
    ],
)
def test_consistent_rules_and_marks_have_no_inconsistency(rules: list[str], marks: list[Mark], pending: list[str]):
    assert inconsistencies(rules, marks, pending) == []


@pytest.mark.parametrize(
    ("rules", "marks", "pending", "message"),
    [
        (["A1", "A2"], [A1], [], "A2 has no test, and is not pending"),
        (["A1"], [A1, A2], [], "t.py:2 names A2, which is not a rule"),
        (["A1"], [A1], ["A1"], "A1 is pending, and has a test: remove it from the list"),
        (["A1"], [A1], ["A2"], "A2 is pending, and is not a rule"),
        (["A1", "A1"], [A1], [], "A1 is listed twice"),
        (["A1"], [A1, Mark("A1", "t.py:3", on_test=False)], [], "t.py:3 is not on a test"),
    ],
)
def test_each_inconsistency_is_reported_once(rules: list[str], marks: list[Mark], pending: list[str], message: str):
    assert inconsistencies(rules, marks, pending) == [message]


def test_rule_whose_only_mark_is_not_on_a_test_has_no_test():
    result = inconsistencies(["A1"], [Mark("A1", "t.py:3", on_test=False)], [])

    assert result == ["A1 has no test, and is not pending", "t.py:3 is not on a test"]
