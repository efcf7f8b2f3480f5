"""Rules of docs/contract.md that no test holds yet, with what they wait for. This list only gets shorter."""

PENDING = {
    "X4": "streams, uploads and exports",
}
