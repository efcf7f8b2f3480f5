"""Compares the rules of the contract, the tests that say they hold them, and the list of rules that wait for a test."""

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

RULE = re.compile(r"^- \*\*([A-Z]\d+)\*\* ", re.MULTILINE)


@dataclass(frozen=True)
class Mark:
    """`@pytest.mark.contract(…)`: the rule it names, where it stands, and whether a test bears it."""

    rule: str
    place: str
    on_test: bool


def rules_in(document: str) -> list[str]:
    """The ids of the rules that a contract lists, in its order."""
    return RULE.findall(document)


def marks_in(source: str, path: str) -> Iterator[Mark]:
    """The marks in a Python file, one for each rule that is named."""
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
    """A sentence for everything that does not fit together."""
    held = {mark.rule for mark in marks if mark.on_test}
    known = set(rules)
    return [
        *(f"{rule} is listed twice" for rule in sorted(known) if rules.count(rule) > 1),
        *(f"{rule} has no test, and is not pending" for rule in rules if rule not in held and rule not in pending),
        *(f"{mark.place} names {mark.rule}, which is no rule" for mark in marks if mark.rule not in known),
        *(f"{mark.place} marks what is no test" for mark in marks if not mark.on_test),
        *(f"{rule} is pending, and is no rule" for rule in pending if rule not in known),
        *(f"{rule} is pending, and has a test by now: take it off the list" for rule in pending if rule in held),
    ]
