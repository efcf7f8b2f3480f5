"""What a columnar body may unpack to, by how large it is.

Compression, dictionaries and run lengths let a few kilobytes stand for gigabytes. A body declares most of that in its
headers: it is counted there, before anything is unpacked. What only shows while rows are read (a value of a dictionary
that many rows have) is counted as it is read.
"""

from tarn.errors import BodyTooLarge
from tarn.journal.formats.record import invalid_format

ROWS_PER_BYTE = 32
FEW_ROWS = 100_000
"""A body may have so many rows for each of its bytes, and these in any case. The densest files of distinct statements
have six to sixteen: constant columns, and numbered ids that compress to next to nothing."""

UNPACKED_PER_BYTE = 1_000
LITTLE_UNPACKED = 64 << 20
MOST_UNPACKED = 16 << 30
"""The same of the bytes it unpacks to, with an end to it. A thousandfold is what gzip makes of a body at most."""

AT_ONCE = 256 << 20
"""Bytes that reading may need unpacked at the same time: the pages of all columns, or an Arrow batch with its
dictionaries."""


class Budget:
    """Counts what one body declares and becomes. Whoever reads the body adds to `size` as it arrives."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self.rows = 0
        self._unpacked = 0
        self._text = 0

    def add_rows(self, count: int) -> None:
        """Raises InvalidFormat if these are more rows than a body of this size may have."""
        self.rows += count
        most = FEW_ROWS + ROWS_PER_BYTE * self.size
        if not 0 <= count <= most or self.rows > most:
            raise invalid_format(f"{self.rows} rows in {self.size} bytes; a body of this size may have {most}")

    def add_unpacked(self, size: int) -> None:
        """Count bytes that a header declares. Raises BodyTooLarge."""
        self._unpacked += size
        self._require(self._unpacked, "unpacks to")

    def add_text(self, size: int) -> None:
        """Count the text of rows, in which a value counts as often as it occurs. Raises BodyTooLarge."""
        self._text += size
        self._require(self._text, "holds text of")

    def require_at_once(self, size: int, what: str) -> None:
        """Raises BodyTooLarge if so much cannot be unpacked at the same time."""
        if size > AT_ONCE:
            raise BodyTooLarge(
                f"{what} unpacks to {size} bytes, and at most {AT_ONCE} are unpacked at once: write smaller ones",
                limit=AT_ONCE,
            )

    def _require(self, total: int, verb: str) -> None:
        most = min(MOST_UNPACKED, LITTLE_UNPACKED + UNPACKED_PER_BYTE * self.size)
        if total > most:
            raise BodyTooLarge(
                f"the body {verb} {total} bytes or more; at {self.size} bytes it may become {most}", limit=most
            )
