"""Input files: a file or standard input, read once in chunks; its format is detected by name or first bytes."""

import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from tarn.cli.failures import Misuse

HEAD_BYTES, PIECE_BYTES = 64 << 10, 256 << 10
STDIN = "-"

ENCODINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED = re.compile(r"\.(gz|zst)$", re.IGNORECASE)
TEXT = frozenset({"application/x-ndjson", "text/csv", "application/x-ftm-pack"})
"""Media types with one record per line, apart from a header and line breaks within values."""


@dataclass(frozen=True)
class InputFile:
    """Input that is read once; its first bytes are buffered."""

    name: str
    size: int | None
    encoding: str | None
    head: bytes
    _file: BinaryIO

    @property
    def suffix(self) -> str:
        """File extension without that of a compression; empty for standard input."""
        return os.path.splitext(COMPRESSED.sub("", self.name))[1].lower()

    def pieces(self) -> Iterator[bytes]:
        """Yield the stored bytes, compressed or not. Raises Misuse on a read error."""
        yield self.head
        try:
            # read1: send what a pipe has, without waiting for a full chunk.
            while piece := self._file.read1(PIECE_BYTES):  # type: ignore[attr-defined]  # BinaryIO lacks it; the file is buffered
                yield piece
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def beginning(self) -> bytes:
        """Return the first bytes, decompressed. Raises Misuse if they cannot be decompressed."""
        try:
            return _decompressed(self.head, self.encoding).removeprefix(b"\xef\xbb\xbf").lstrip()
        except ValueError as error:
            raise Misuse(f"{self.name} is not valid {self.encoding}: {error}") from None


@contextmanager
def open_input(name: str) -> Iterator[InputFile]:
    """Open a file or standard input. Raises Misuse if it cannot be opened."""
    if name == STDIN:
        yield _source("standard input", sys.stdin.buffer, None)
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 - closed below, whatever reading it raises
    except OSError as error:
        raise _unreadable(name, error) from None
    with file:
        status = os.fstat(file.fileno())
        yield _source(name, file, status.st_size if stat.S_ISREG(status.st_mode) else None)


def entity_type(source: InputFile) -> str:
    """Return the media type: NDJSON by extension or if the first line is a complete object; otherwise JSON."""
    if source.suffix in (".ndjson", ".jsonl"):
        return "application/x-ndjson"
    return _json_type(source.beginning())


def statement_type(source: InputFile) -> str:
    """Return the media type by extension or first bytes. Raises Misuse if neither shows it."""
    named = STATEMENT_TYPES.get(source.suffix.removeprefix("."))
    if named is not None:
        return named
    begin = source.beginning()
    if begin.startswith(b"PAR1"):
        return STATEMENT_TYPES["parquet"]
    if begin.startswith(b"\xff\xff\xff\xff"):
        return STATEMENT_TYPES["arrow"]
    if begin[:1] in (b"{", b"["):
        return _json_type(begin)
    if b"canonical_id" in begin.partition(b"\n")[0]:
        return STATEMENT_TYPES["csv"]
    raise Misuse(f"{source.name} has no recognizable format: give --format")


STATEMENT_TYPES = {
    "ndjson": "application/x-ndjson",
    "jsonl": "application/x-ndjson",
    "csv": "text/csv",
    "pack": "application/x-ftm-pack",
    "parquet": "application/vnd.apache.parquet",
    "arrow": "application/vnd.apache.arrow.stream",
    "arrows": "application/vnd.apache.arrow.stream",
}
"""Media types by value of `--format` or file extension."""


def _source(name: str, file: BinaryIO, size: int | None) -> InputFile:
    try:
        head = file.read(HEAD_BYTES)
    except OSError as error:
        raise _unreadable(name, error) from None
    encoding = next((encoding for magic, encoding in ENCODINGS.items() if head.startswith(magic)), None)
    return InputFile(name, size, encoding, head, file)


def _decompressed(head: bytes, encoding: str | None) -> bytes:
    """Return the decompressed bytes. Raises ValueError if they are not of this encoding."""
    if encoding == "gzip":
        try:
            return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from None
    if encoding == "zstd":
        import zstandard

        try:
            with zstandard.ZstdDecompressor().stream_reader(head) as reader:
                return reader.read(HEAD_BYTES)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
    return head


def _json_type(begin: bytes) -> str:
    line, end, _ = begin.partition(b"\n")
    if begin.startswith(b"["):
        return "application/json"
    try:
        is_record = not end or isinstance(json.loads(line), dict)
    except ValueError:
        is_record = False
    return "application/x-ndjson" if is_record else "application/json"


def _unreadable(name: str, error: OSError) -> Misuse:
    return Misuse(f"{name} cannot be read: {error.strerror or error}")
