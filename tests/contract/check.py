"""Compare the rules of the contract, the tests that are marked with them, and the list of rules without a test."""

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

RULE = re.compile(r"^- \*\*([A-Z]\d+)\*\* ", re.MULTILINE)


@dataclass(frozen=True)
class Mark:
    """One rule of a `@pytest.mark.contract(…)`: its id, the location of the mark, and whether a test has it."""

    rule: str
    location: str
    on_test: bool


def rules_in(document: str) -> list[str]:
    """Return the ids of the rules that a contract lists, in its order."""
    return RULE.findall(document)


def marks_in(source: str, path: str) -> Iterator[Mark]:
    """Yield the marks in a Python file, one for each rule that is named."""
    tree = ast.parse(source, path)
    on_tests = {
        decorator
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for decorator in node.decorator_list
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.mark.contract", "mark.contract"):
            for argument in node.args:
                yield Mark(ast.literal_eval(argument), f"{path}:{node.lineno}", node in on_tests)


def inconsistencies(rules: list[str], marks: Collection[Mark], pending: Collection[str]) -> list[str]:
    """Return a sentence for each inconsistency between rules, marks and pending rules."""
    tested = {mark.rule for mark in marks if mark.on_test}
    known = set(rules)
    return [
        *(f"{rule} is listed twice" for rule in sorted(known) if rules.count(rule) > 1),
        *(f"{rule} has no test, and is not pending" for rule in rules if rule not in tested and rule not in pending),
        *(f"{mark.location} names {mark.rule}, which is not a rule" for mark in marks if mark.rule not in known),
        *(f"{mark.location} is not on a test" for mark in marks if not mark.on_test),
        *(f"{rule} is pending, and is not a rule" for rule in pending if rule not in known),
        *(f"{rule} is pending, and has a test: remove it from the list" for rule in pending if rule in tested),
    ]
