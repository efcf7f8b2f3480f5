"""Ranges of keys: where the files of a store lie, and where rewriting them is worth it.

Large files that do not overlap are settled, and divide the keys into ranges; whatever else concerns a range (fresh
files over it, and what happened to its rows) is what folding it would gain.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from tarn.model.ranges import ColumnSpan, Range, span
from tarn.model.snapshot import File, Snapshot


class RangeLoad(NamedTuple):
    """A range with the rows that are settled in it, and those that folding would touch."""

    keys: Range
    settled: int
    loose: float

    @property
    def gain(self) -> float:
        return self.loose / max(1, self.settled)


def marks_of(snapshot: Snapshot) -> list[File]:
    """The files of the translog that say more than the rows themselves do."""
    return [file for file in snapshot.translog.files if file.partition["kind"] != "insert"]


def inserts_of(snapshot: Snapshot) -> list[File]:
    """The files of the translog that repeat what the rows themselves say."""
    return [file for file in snapshot.translog.files if file.partition["kind"] == "insert"]


def have_many_inserts(snapshot: Snapshot, share: float) -> bool:
    """Whether inserts of so many rows, for each live one, are still kept: they take half of the room that these do."""
    rows = sum(file.rows for file in inserts_of(snapshot))
    return rows > 0 and rows >= share * snapshot.rows.live


def range_loads(snapshot: Snapshot) -> list[RangeLoad]:
    """The ranges of a store, in order; together they are everything. How rows are spread over those that a file meets
    is estimated: as the settled ones are."""
    settled = _settled_files(snapshot.statements.files)
    bounds = ["", *(one.first for one in _merge_overlapping(settled)[1:])]
    ranges = [Range(low, high) for low, high in zip(bounds, [*bounds[1:], None], strict=True)]
    kept = {file.path for file in settled}
    fixed = [float(sum(file.rows for file in settled if span(file).meets(keys))) for keys in ranges]
    loose = [0.0] * len(ranges)
    for file in [*snapshot.statements.files, *marks_of(snapshot)]:
        if file.path in kept:
            continue
        met = [number for number, keys in enumerate(ranges) if span(file).meets(keys)]
        weight = sum(fixed[number] for number in met)
        for number in met:
            loose[number] += file.rows * (fixed[number] / weight if weight else 1 / len(met))
    return [RangeLoad(keys, int(rows), more) for keys, rows, more in zip(ranges, fixed, loose, strict=True)]


def merge_adjacent(ranges: Iterable[Range]) -> list[Range]:
    """Ranges in order, those that follow on each other made one."""
    found: list[Range] = []
    for keys in ranges:
        if found and found[-1].high == keys.low:
            found[-1] = Range(found[-1].low, keys.high)
        else:
            found.append(keys)
    return found


def _settled_files(files: Sequence[File]) -> list[File]:
    """Of each origin the largest files that do not overlap each other."""

    def origin(file: File) -> str:
        return file.partition["origin"]

    found: list[File] = []
    for _, group in groupby(sorted(files, key=origin), origin):
        own: list[ColumnSpan] = []
        for file in sorted(group, key=lambda file: (-file.rows, file.path)):
            keys = span(file)
            place = bisect(own, keys.first, key=attrgetter("first"))
            # They do not overlap each other, so the nearest ones tell.
            if not any(keys.overlaps(other) for other in own[max(0, place - 1) : place + 1]):
                own.insert(place, keys)
                found.append(file)
    return found


def _merge_overlapping(files: Iterable[File]) -> list[ColumnSpan]:
    """What files lie over, in order, those that overlap made one."""
    found: list[ColumnSpan] = []
    for one in sorted(map(span, files), key=attrgetter("first")):
        last = found[-1] if found else None
        if last is not None and last.overlaps(one):
            end = None if last.last is None or one.last is None else max(last.last, one.last)
            found[-1] = ColumnSpan(last.first, end)
        else:
            found.append(one)
    return found
