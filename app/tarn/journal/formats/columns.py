"""The columns of a statement, as every tabular format has them."""

from collections import Counter
from collections.abc import Sequence

from followthemoney.statement.serialize import CSV_COLUMNS

from tarn.journal.formats.record import invalid_format

KNOWN = frozenset(CSV_COLUMNS)
NEEDED = ("entity_id", "prop", "schema", "value")

MOST_COLUMNS = 1000
"""Columns of a table, those that are ignored included."""

_TRUTH = {"": False, "f": False, "n": False, "0": False, "t": True, "y": True, "1": True}


def check_columns(
    names: Sequence[str], line: int | None = None, *, needed: Sequence[str] = NEEDED, known: frozenset[str] = KNOWN
) -> tuple[str, ...]:
    """The columns that no statement has, which are ignored.

    Raises InvalidFormat if a needed column is missing, if a known one is there twice, or for too many columns.
    """
    if len(names) > MOST_COLUMNS:
        raise invalid_format(f"the header has {len(names)} columns, at most {MOST_COLUMNS} are read", line)
    faults = {
        "lacks": [name for name in needed if name not in names],
        "repeats": [name for name, times in Counter(names).items() if times > 1 and name in known],
    }
    for fault, columns in faults.items():
        if columns:
            raise invalid_format(f"the header {fault} columns: {', '.join(name[:64] for name in columns[:10])}", line)
    return tuple(dict.fromkeys(name for name in names if name not in known))


def truth(text: str) -> bool | None:
    """What a text says as FtM reads booleans, or None where it says neither.

    `rigour.boolean.text_bool` takes any other word for false, and remembers every text it has seen.
    """
    return _TRUTH.get(text[:1].lower())
