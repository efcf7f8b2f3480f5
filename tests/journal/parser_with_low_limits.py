"""A parser process with thresholds that small bodies exceed: `python -m tests.journal.parser_with_low_limits`."""

import sys
from collections.abc import Callable

from tarn.journal.formats import arrow, batch, record
from tarn.journal.parsing import event_chunks, parser_pool
from tarn.journal.parsing.parser_process import ParserLimits, main

CHUNK_ROWS, CHUNK_BYTES, BLOCK, ROWS, BYTES, LARGEST_BATCH = 12, 1500, 64, 5, 300, 2000


def lower(change: Callable[[object, str, int], None]) -> None:
    """Lower the thresholds of this process."""
    change(event_chunks, "CHUNK_ROWS", CHUNK_ROWS)
    change(event_chunks, "CHUNK_BYTES", CHUNK_BYTES)
    for module in (record, arrow, parser_pool):
        change(module, "BLOCK", BLOCK)
    for module in (batch, arrow):
        change(module, "ROWS", ROWS)
    change(batch, "BYTES", BYTES)


if __name__ == "__main__":
    lower(setattr)
    main(ParserLimits(*map(int, sys.argv[1:])))
