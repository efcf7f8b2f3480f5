"""The list of findings that a verification collects."""

from collections.abc import Sequence

from tarn.model.datasets.finding import Finding, FindingKind

MOST = 1000
"""Findings that are listed; all are counted."""

SOME = 3
"""Names that a detail lists, where there may be thousands."""


class Findings:
    """Collects findings in the order in which they are added."""

    def __init__(self) -> None:
        self.first: list[Finding] = []
        self.found = 0
        self.harmless = 0

    def add(
        self,
        kind: FindingKind,
        detail: str,
        path: str | None = None,
        count: int | None = None,
        ids: Sequence[str] = (),
    ) -> None:
        self.found += 1
        self.harmless += kind.harmless
        if len(self.first) < MOST:
            finding = Finding(
                kind=kind,
                path=path,
                detail=detail,
                harmless=kind.harmless,
                repaired=False,
                count=count,
                ids=list(ids),
            )
            self.first.append(finding)


def some(names: set[str] | list[str]) -> str:
    """Return the first few names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - SOME} more" if len(ordered) > SOME else ""
    return ", ".join(ordered[:SOME]) + more
