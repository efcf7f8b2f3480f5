"""What a verification has found so far."""

from collections.abc import Sequence

from tarn.model.finding import Finding, FindingKind

MOST = 1000
"""Findings that are told one by one; all are counted."""

SOME = 3
"""Things that a detail names, where there may be thousands."""


class Findings:
    """Findings in the order in which they were made."""

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
    """The first few of many, and how many more there are."""
    told = sorted(names)
    more = f" and {len(told) - SOME} more" if len(told) > SOME else ""
    return ", ".join(told[:SOME]) + more
