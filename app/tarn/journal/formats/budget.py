"""Decompression limits of columnar bodies, relative to their size (protection against decompression bombs).

With compression, dictionaries and run lengths, a few kilobytes can expand to gigabytes. Most of that is declared in
headers and is counted before anything is decompressed. What is only known while rows are read (a dictionary value that
many rows have) is counted as it is read.
"""

from tarn.errors import BodyTooLarge
from tarn.journal.formats.record import invalid_format

ROWS_PER_BYTE = 32
FEW_ROWS = 100_000
"""Maximum rows of a body: `FEW_ROWS` plus this many per byte. The densest files of distinct statements have six to
sixteen rows per byte, with constant columns and numbered ids that compress very well."""

UNPACKED_PER_BYTE = 1_000
LITTLE_UNPACKED = 64 << 20
MOST_UNPACKED = 16 << 30
"""Maximum decompressed bytes: `LITTLE_UNPACKED` plus this many per byte, and never more than `MOST_UNPACKED`. The
maximum ratio of gzip is about 1000."""

MOST_IN_MEMORY = 256 << 20
"""Maximum decompressed bytes in memory at the same time: the pages of all columns, or an Arrow batch with its
dictionaries."""


class Budget:
    """Counter of the declared and actual decompressed size of one body. Its reader adds to `size` as bytes arrive."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.rows = 0
        self._unpacked = 0
        self._text = 0

    def add_rows(self, count: int) -> None:
        """Count rows. Raises InvalidFormat if there are more than a body of this size may have."""
        self.rows += count
        most = FEW_ROWS + ROWS_PER_BYTE * self.size
        if not 0 <= count <= most or self.rows > most:
            raise invalid_format(f"{self.rows} rows in {self.size} bytes; a body of this size may have {most}")

    def add_unpacked(self, size: int) -> None:
        """Count decompressed bytes that a header declares. Raises BodyTooLarge."""
        self._unpacked += size
        self._require(self._unpacked, "unpacks to")

    def add_text(self, size: int) -> None:
        """Count the text of rows; repeated values count each time. Raises BodyTooLarge."""
        self._text += size
        self._require(self._text, "holds text of")

    def require_at_once(self, size: int, subject: str) -> None:
        """Raise BodyTooLarge if this many bytes would be decompressed in memory at the same time."""
        if size > MOST_IN_MEMORY:
            raise BodyTooLarge(
                f"{subject} unpacks to {size} bytes, and at most {MOST_IN_MEMORY} are unpacked at once: "
                "write smaller ones",
                limit=MOST_IN_MEMORY,
            )

    def _require(self, total: int, verb: str) -> None:
        most = min(MOST_UNPACKED, LITTLE_UNPACKED + UNPACKED_PER_BYTE * self.size)
        if total > most:
            raise BodyTooLarge(
                f"the body {verb} {total} bytes or more; at {self.size} bytes it may become {most}", limit=most
            )
