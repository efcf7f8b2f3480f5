"""Every rule of docs/contract.md is held by a test, or says what it waits for."""

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


def test_document_has_the_whole_contract():
    expected = {f"{family}{number}" for family, last in FAMILIES.items() for number in range(1, last + 1)}

    assert set(rules_in(DOCUMENT.read_text())) == expected


def test_everything_pending_says_what_it_waits_for():
    assert all(PENDING.values())


CONTRACT = """
# A contract
- **A1** The first rule, which is not **A7**.
- **A2** The second, on
  - **A8** no line of its own.
"""


def test_rules_are_the_ids_that_begin_an_item():
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


def test_marks_are_read_from_the_source_with_every_rule_they_name():
    assert sorted(marks_in(SOURCE, "t.py"), key=lambda mark: mark.rule) == [
        Mark("A1", "t.py:5", on_test=True),
        Mark("A2", "t.py:5", on_test=True),
        Mark("A3", "t.py:10", on_test=True),
        Mark("A4", "t.py:13", on_test=False),
    ]


def test_mark_that_is_not_written_out_cannot_be_checked():
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
def test_what_fits_together_has_no_fault(rules: list[str], marks: list[Mark], pending: list[str]):
    assert inconsistencies(rules, marks, pending) == []


@pytest.mark.parametrize(
    ("rules", "marks", "pending", "fault"),
    [
        (["A1", "A2"], [A1], [], "A2 has no test, and is not pending"),
        (["A1"], [A1, A2], [], "t.py:2 names A2, which is no rule"),
        (["A1"], [A1], ["A1"], "A1 is pending, and has a test by now: take it off the list"),
        (["A1"], [A1], ["A2"], "A2 is pending, and is no rule"),
        (["A1", "A1"], [A1], [], "A1 is listed twice"),
        (["A1"], [A1, Mark("A1", "t.py:3", on_test=False)], [], "t.py:3 marks what is no test"),
    ],
)
def test_what_does_not_fit_together_is_one_fault(rules: list[str], marks: list[Mark], pending: list[str], fault: str):
    assert inconsistencies(rules, marks, pending) == [fault]


def test_rule_whose_only_mark_is_on_no_test_is_not_held():
    found = inconsistencies(["A1"], [Mark("A1", "t.py:3", on_test=False)], [])

    assert found == ["A1 has no test, and is not pending", "t.py:3 marks what is no test"]
