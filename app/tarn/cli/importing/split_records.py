"""Split FtM statement files into parts of complete records, so that a broken connection costs one part."""

import zlib
from collections.abc import Iterator

from tarn.cli.failures import Misuse
from tarn.cli.importing.stage import PART_BYTES, StagePart
from tarn.cli.input.files import STATEMENT_TYPES, InputFile

CSV, PACK, NDJSON = (STATEMENT_TYPES[name] for name in ("csv", "pack", "ndjson"))
STATEMENT_FORMATS = (CSV, PACK, NDJSON)

LONGEST_RECORD = 128 << 20
"""Maximum number of bytes of one record."""

MAX_OUTPUT, ZSTD_INPUT = 1 << 20, 1 << 10
"""Bytes that gzip may return at once, and bytes given to zstd at once: it has no output limit, and a few of its bytes
can be 128 kB."""


def parts(source: InputFile, kind: str) -> Iterator[StagePart]:
    """Yield the records of a source in parts. Raises Misuse if it is damaged or of another format."""
    pieces = _decompressed(source)
    if kind == NDJSON:
        yield from (StagePart(body, body.count(b"\n"), kind) for body in _cut(pieces, quoted=False))
        return
    header = b""
    for number, body in enumerate(_cut(pieces, quoted=True)):
        if number == 0:
            body = body.removeprefix(b"\xef\xbb\xbf")
            header, body = _header(source, body, kind)
        if not body:
            continue
        yield StagePart(header + body, body.count(b"\n"), kind)


def _header(source: InputFile, body: bytes, kind: str) -> tuple[bytes, bytes]:
    """Return the header and the rest; packs of older tools have no header. Raises Misuse for a CSV without."""
    line, end, remainder = body.partition(b"\n")
    if b"entity_id" in line and b"prop" in line:
        return line + end, remainder
    if kind == CSV:
        raise Misuse(
            f"{source.name} has no header with the columns of statements: is it a pack? Then give --format pack"
        )
    return b"", body


def _cut(pieces: Iterator[bytes], quoted: bool) -> Iterator[bytes]:
    """Yield bodies that end at the end of a record. A line end between quotes is not one."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= PART_BYTES and (end := _end(buffer, quoted)):
            yield bytes(buffer[:end])
            del buffer[:end]
        if len(buffer) > LONGEST_RECORD:
            raise Misuse(f"no record ends within {LONGEST_RECORD} bytes: is a closing quote missing?")
    if buffer:
        yield bytes(buffer)


def _end(buffer: bytearray, quoted: bool) -> int:
    """Return the end of the last record that fits into a part, or else of the first one; 0 if none ends."""
    position = PART_BYTES
    quotes = buffer.count(b'"', 0, position) if quoted else 0
    while (line := buffer.rfind(b"\n", 0, position)) >= 0:
        quotes -= buffer.count(b'"', line, position) if quoted else 0
        if quotes % 2 == 0:
            return line + 1
        position = line
    position = PART_BYTES
    quotes = buffer.count(b'"', 0, position) if quoted else 0
    while (line := buffer.find(b"\n", position)) >= 0:
        quotes += buffer.count(b'"', position, line) if quoted else 0
        if quotes % 2 == 0:
            return line + 1
        position = line + 1
    return 0


def _decompressed(source: InputFile) -> Iterator[bytes]:
    """Yield the content of a source, decompressed. Raises Misuse if it is damaged or truncated."""
    if source.encoding is None:
        yield from source.pieces()
    elif source.encoding == "gzip":
        yield from _gunzipped(source)
    else:
        yield from _unzstd(source)


def _gunzipped(source: InputFile) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        for piece in source.pieces():
            while piece:
                if unpacker.eof:  # another member follows
                    unpacker = zlib.decompressobj(wbits=31)
                yield unpacker.decompress(piece, MAX_OUTPUT)
                piece = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error as error:
        raise Misuse(f"{source.name} is not valid gzip: {error}") from None
    if not unpacker.eof:
        raise Misuse(f"{source.name} is truncated: its gzip stream does not end")


def _unzstd(source: InputFile) -> Iterator[bytes]:
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        for chunk in source.pieces():
            for start in range(0, len(chunk), ZSTD_INPUT):
                piece = chunk[start : start + ZSTD_INPUT]
                while piece:
                    if unpacker.eof:  # another frame follows
                        unpacker = zstandard.ZstdDecompressor().decompressobj()
                    yield unpacker.decompress(piece)
                    piece = unpacker.unused_data
    except zstandard.ZstdError as error:
        raise Misuse(f"{source.name} is not valid zstd: {error}") from None
    if not unpacker.eof:
        raise Misuse(f"{source.name} is truncated: its zstd stream does not end")
