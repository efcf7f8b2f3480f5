"""The columns of a statement, as every tabular format has them."""

from collections import Counter
from collections.abc import Sequence

from followthemoney.statement.serialize import CSV_COLUMNS

from app.journal.formats.record import broken

KNOWN = frozenset(CSV_COLUMNS)
NEEDED = ("entity_id", "prop", "schema", "value")

_TRUTH = {"": False, "f": False, "n": False, "0": False, "t": True, "y": True, "1": True}


def check_columns(
    names: Sequence[str], line: int | None = None, *, needed: Sequence[str] = NEEDED, known: frozenset[str] = KNOWN
) -> None:
    """Raise InvalidFormat unless every needed column is there, and no other than the known ones, once each."""
    faults = {
        "lacks": [name for name in needed if name not in names],
        "has unknown": [name for name in names if name not in known],
        "repeats": [name for name, times in Counter(names).items() if times > 1],
    }
    for fault, columns in faults.items():
        if columns:
            raise broken(f"the header {fault} columns: {', '.join(name[:64] for name in columns[:10])}", line)


def truth(text: str) -> bool | None:
    """What a text says as FtM reads booleans, or None where it says neither.

    `rigour.boolean.text_bool` takes any other word for false, and remembers every text it has seen.
    """
    return _TRUTH.get(text[:1].lower())
