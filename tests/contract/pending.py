"""Rules of docs/contract.md that no test holds yet, with what they wait for. This list only gets shorter."""

PENDING: dict[str, str] = {}
