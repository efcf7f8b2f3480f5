"""Statement columns shared by all tabular formats: validation of headers and parsing of booleans."""

from collections import Counter
from collections.abc import Sequence

from followthemoney.statement.serialize import CSV_COLUMNS

from tarn.journal.formats.record import invalid_format

KNOWN = frozenset(CSV_COLUMNS)
NEEDED = ("entity_id", "prop", "schema", "value")

MOST_COLUMNS = 1000
"""Maximum columns of a table, including ignored ones."""

_TRUTH = {"": False, "f": False, "n": False, "0": False, "t": True, "y": True, "1": True}


def check_columns(
    names: Sequence[str], line: int | None = None, *, needed: Sequence[str] = NEEDED, known: frozenset[str] = KNOWN
) -> tuple[str, ...]:
    """Return the columns that are not fields of a statement, which are ignored.

    Raises InvalidFormat if a required column is missing, a known one is repeated, or there are too many columns.
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
    """Parse a boolean like FtM, but return None for text that is neither true nor false.

    `rigour.boolean.text_bool` is not used: it treats any other text as false, and caches every text it has seen.
    """
    return _TRUTH.get(text[:1].lower())
