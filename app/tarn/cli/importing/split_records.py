"""Files of FtM statements, cut into parts of whole records, so that a connection that breaks costs one part."""

import zlib
from collections.abc import Iterator

from tarn.cli.failures import Misuse
from tarn.cli.importing.stage import PART_BYTES, StagePart
from tarn.cli.input.files import STATEMENT_TYPES, InputFile

CSV, PACK, NDJSON = (STATEMENT_TYPES[name] for name in ("csv", "pack", "ndjson"))
FORMS = (CSV, PACK, NDJSON)

LONGEST_RECORD = 128 << 20
"""Bytes that are looked through for the end of a record."""

UNPACKED, SIP = 1 << 20, 1 << 10
"""Bytes that gzip may give at once; and that zstd is fed, which has no such limit: a few of its bytes can be 128 kB."""


def parts(source: InputFile, kind: str) -> Iterator[StagePart]:
    """The records of a source of this type. Raises Misuse for what is damaged, or no such thing."""
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
    """The header and the rest; packs of older tools have none. Raises Misuse for a CSV that has none."""
    line, end, rest = body.partition(b"\n")
    if b"entity_id" in line and b"prop" in line:
        return line + end, rest
    if kind == CSV:
        raise Misuse(
            f"{source.name} has no header with the columns of statements: is it a pack? Then give --format pack"
        )
    return b"", body


def _cut(pieces: Iterator[bytes], quoted: bool) -> Iterator[bytes]:
    """Bodies that end where a record does. A line end between quotes is within one."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= PART_BYTES and (end := _end(buffer, quoted)):
            yield bytes(buffer[:end])
            del buffer[:end]
        if len(buffer) > LONGEST_RECORD:
            raise Misuse(f"there is no end of a record within {LONGEST_RECORD} bytes: a quote is missing")
    if buffer:
        yield bytes(buffer)


def _end(buffer: bytearray, quoted: bool) -> int:
    """The end of the last record that fits a part, or else of the first one; 0 if none has ended."""
    place = PART_BYTES
    quotes = buffer.count(b'"', 0, place) if quoted else 0
    while (line := buffer.rfind(b"\n", 0, place)) >= 0:
        quotes -= buffer.count(b'"', line, place) if quoted else 0
        if quotes % 2 == 0:
            return line + 1
        place = line
    place = PART_BYTES
    quotes = buffer.count(b'"', 0, place) if quoted else 0
    while (line := buffer.find(b"\n", place)) >= 0:
        quotes += buffer.count(b'"', place, line) if quoted else 0
        if quotes % 2 == 0:
            return line + 1
        place = line + 1
    return 0


def _decompressed(source: InputFile) -> Iterator[bytes]:
    """What a source holds, decompressed as it is read. Raises Misuse if it is damaged or cut off."""
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
                yield unpacker.decompress(piece, UNPACKED)
                piece = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error as error:
        raise Misuse(f"{source.name} is not valid gzip: {error}") from None
    if not unpacker.eof:
        raise Misuse(f"{source.name} is cut off: its gzip has no end")


def _unzstd(source: InputFile) -> Iterator[bytes]:
    import zstandard

    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        for whole in source.pieces():
            for start in range(0, len(whole), SIP):
                piece = whole[start : start + SIP]
                while piece:
                    if unpacker.eof:  # another frame follows
                        unpacker = zstandard.ZstdDecompressor().decompressobj()
                    yield unpacker.decompress(piece)
                    piece = unpacker.unused_data
    except zstandard.ZstdError as error:
        raise Misuse(f"{source.name} is not valid zstd: {error}") from None
    if not unpacker.eof:
        raise Misuse(f"{source.name} is cut off: its zstd has no end")
