"""Rules of docs/contract.md that have no test yet, with the reason. Entries are only removed."""

PENDING: dict[str, str] = {}
