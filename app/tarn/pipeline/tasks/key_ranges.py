"""Key ranges: how rows are distributed over the keys, and which ranges are worth rewriting.

Large files that do not overlap are base files and divide the keys into ranges. All other rows of a range (in newer
files, and translog marks on its rows) are unmerged: folding the range merges them into its base files.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from tarn.lake.scans import select_marks
from tarn.model.datasets.ranges import ColumnSpan, Range, span
from tarn.model.datasets.snapshot import File, Snapshot


class RangeLoad(NamedTuple):
    """A range with the number of rows in its base files, and of unmerged rows."""

    keys: Range
    base_rows: int
    unmerged_rows: float

    @property
    def unmerged_share(self) -> float:
        return self.unmerged_rows / max(1, self.base_rows)


def inserts_of(snapshot: Snapshot) -> list[File]:
    """Return the files of the translog that repeat the rows."""
    return [file for file in snapshot.translog.files if file.partition["kind"] == "insert"]


def have_many_inserts(snapshot: Snapshot, share: float) -> bool:
    """Return whether there are at least `share` inserts per live row. An insert takes half the space of a row."""
    rows = sum(file.rows for file in inserts_of(snapshot))
    return rows > 0 and rows >= share * snapshot.rows.live


def range_loads(snapshot: Snapshot) -> list[RangeLoad]:
    """Return the ranges of a dataset, in order; together they contain all keys. The unmerged rows of a file that
    overlaps several ranges are distributed in proportion to the base rows."""
    base_files = _base_files(snapshot.statements.files)
    bounds = ["", *(keys.first for keys in _merge_overlapping(base_files)[1:])]
    ranges = [Range(low, high) for low, high in zip(bounds, [*bounds[1:], None], strict=True)]
    base_paths = {file.path for file in base_files}
    base_rows = [float(sum(file.rows for file in base_files if span(file).meets(keys))) for keys in ranges]
    unmerged_rows = [0.0] * len(ranges)
    for file in [*snapshot.statements.files, *select_marks(snapshot.translog.files)]:
        if file.path in base_paths:
            continue
        ranges_met = [number for number, keys in enumerate(ranges) if span(file).meets(keys)]
        weight = sum(base_rows[number] for number in ranges_met)
        for number in ranges_met:
            unmerged_rows[number] += file.rows * (base_rows[number] / weight if weight else 1 / len(ranges_met))
    return [RangeLoad(keys, int(rows), more) for keys, rows, more in zip(ranges, base_rows, unmerged_rows, strict=True)]


def merge_adjacent(ranges: Iterable[Range]) -> list[Range]:
    """Merge adjacent ranges. The ranges are in order."""
    merged: list[Range] = []
    for keys in ranges:
        if merged and merged[-1].high == keys.low:
            merged[-1] = Range(merged[-1].low, keys.high)
        else:
            merged.append(keys)
    return merged


def _base_files(files: Sequence[File]) -> list[File]:
    """Return, of each origin, the largest files that do not overlap each other."""

    def origin(file: File) -> str:
        return file.partition["origin"]

    base_files: list[File] = []
    for _, group in groupby(sorted(files, key=origin), origin):
        spans: list[ColumnSpan] = []
        for file in sorted(group, key=lambda file: (-file.rows, file.path)):
            keys = span(file)
            index = bisect(spans, keys.first, key=attrgetter("first"))
            # The chosen spans do not overlap each other, so only the nearest ones need to be compared.
            if not any(keys.overlaps(other) for other in spans[max(0, index - 1) : index + 1]):
                spans.insert(index, keys)
                base_files.append(file)
    return base_files


def _merge_overlapping(files: Iterable[File]) -> list[ColumnSpan]:
    """Return the key spans of files in order, with overlapping ones merged."""
    merged: list[ColumnSpan] = []
    for keys in sorted(map(span, files), key=attrgetter("first")):
        last = merged[-1] if merged else None
        if last is not None and last.overlaps(keys):
            end = None if last.last is None or keys.last is None else max(last.last, keys.last)
            merged[-1] = ColumnSpan(last.first, end)
        else:
            merged.append(keys)
    return merged
