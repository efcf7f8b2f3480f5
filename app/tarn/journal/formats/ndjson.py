"""Streaming splitter of NDJSON lines. This is the hot path of every load, so a regular block is split entirely in C."""

from collections.abc import Iterator

from tarn.journal.formats.record import BadRecord, ByteSource, Record, text_blocks, too_long


def lines(source: ByteSource, longest: int) -> Iterator[Record | BadRecord]:
    """Yield every line that is not blank, without its line end. Blank lines count in the line numbers.

    A line over `longest` bytes is a BadRecord; the rest of it is discarded as it arrives.
    """
    number = 1
    cut = bytearray()  # the beginning of a line whose end has not arrived
    for block in text_blocks(source):
        head, newline, remainder = block.partition(b"\n")
        # One byte over the limit is enough to detect a long line, and bounds the memory.
        cut += head[: longest + 1 - len(cut)] if len(cut) + len(head) > longest else head
        if not newline:
            continue
        yield from _checked([bytes(cut)], number, longest)
        number += 1
        complete, newline, tail = remainder.rpartition(b"\n")
        cut = bytearray(tail[: longest + 1])
        if not newline:
            continue
        split = complete.split(b"\n")
        if len(complete) > longest or b"\r" in complete or b"" in split:
            yield from _checked(split, number, longest)
        else:
            yield from enumerate(split, number)
        number += len(split)
    yield from _checked([bytes(cut)], number, longest)


def _checked(split: list[bytes], number: int, longest: int) -> Iterator[Record | BadRecord]:
    for line, text in enumerate(split, number):
        if len(text) > longest:
            yield too_long(line, longest)
        elif text := text.rstrip(b"\r"):
            yield line, text
