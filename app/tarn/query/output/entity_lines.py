"""Vectorised assembly of sorted statement rows into entity JSON lines, a column at a time.

The columns are cut where the entity changes; min, max and sets are computed over each cut. Every distinct value becomes
a piece of text, prefixed with the opening of its property and its entity. The concatenated pieces are the lines, so no
line needs a copy or a loop of its own. Python handles single entities only where FtM has to choose: several names,
several schemata, several ids.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from followthemoney.statement.util import BASE_ID

from tarn.query.output.captions import CaptionCandidate, choose_caption, invalid_line
from tarn.query.output.column_text import (
    EMPTY,
    TEXT,
    Flags,
    Numbers,
    changes,
    codes,
    column,
    concatenate,
    json_strings,
    moments,
)
from tarn.query.output.ftm_model import NO_CAPTION, caption_rank, holds_names, resolved_schema, schema_label

LINES = pa.schema([("dataset", TEXT), ("canonical_id", TEXT), ("line", TEXT), ("invalid", pa.bool_())])
"""One row per entity. `line` ends with a newline, so that the column's data buffer is NDJSON."""


def assemble_lines(rows: pa.Table) -> pa.RecordBatch:
    """Return the lines of complete entities, made from their sorted rows."""
    return _Cut(rows).lines()


class _Cut:
    """Sorted rows, cut into entities. Arrays with one value per row are indexed by row, all others by entity."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self.canonical, self.datasets = column(rows, "canonical_id"), column(rows, "dataset")
        first = changes(self.canonical) | changes(self.datasets)
        self.starts = np.flatnonzero(first)
        self.ends = np.append(self.starts[1:], len(first))
        self.entity = np.cumsum(first) - 1
        """The index of the entity of each row."""
        self.props, self.prop_names = codes(column(rows, "prop"))
        self.schemata, self.schema_names = codes(column(rows, "schema"))
        self.origins, self.origin_names = codes(column(rows, "origin"))
        self.is_base = np.array([name == BASE_ID for name in self.prop_names])[self.props]
        self.opens_prop = first | np.append(True, self.props[1:] != self.props[:-1])
        self.values = column(rows, "value")

    def lines(self) -> pa.RecordBatch:
        schema = self._schema()
        invalid = schema < 0
        shown = (self.opens_prop | changes(self.values)) & ~self.is_base & ~invalid[self.entity]
        bare = np.add.reduceat(shown, self.starts, dtype=np.int64) == 0
        # An entity without a property to show still needs one piece, an empty one, for its line.
        pieces = np.flatnonzero(shown | _at(self.starts[bare], len(shown)))
        entity = self.entity[pieces]
        opens = np.append(True, entity[1:] != entity[:-1])
        closes = np.append(opens[1:], True)
        values = json_strings(self.values.take(pa.array(pieces)))
        heads, tails = self._heads(schema, pieces, values), self._tails(bare)
        if invalid.any():
            heads, tails = self._with_invalid(invalid, heads, tails)
        text = concatenate(
            _where(opens, heads, entity),
            self._openings(pieces, opens, bare[entity]),
            _blank(values, bare[entity]),
            _where(closes, tails, entity),
        )
        # A line is all pieces from one entity's opening to the next: reuse the text buffer with new offsets.
        offsets = np.frombuffer(text.buffers()[1], dtype=np.int64)[: len(text) + 1]
        cuts = np.append(offsets[:-1][opens], offsets[-1])
        lines = pa.LargeStringArray.from_buffers(len(self.starts), pa.py_buffer(cuts), text.buffers()[2])
        first = pa.array(self.starts)
        return pa.record_batch(
            [self.datasets.take(first), self.canonical.take(first), lines, pa.array(invalid)], schema=LINES
        )

    def _schema(self) -> Numbers:
        """Return the code of each entity's resolved schema, -1 where it has none."""
        single = np.array([_code(frozenset([name]), self.schema_names) for name in self.schema_names])
        resolved = single[self.schemata[self.starts]]
        for index in self._mixed(self.schemata):
            names = frozenset(self._names(index, self.schemata, self.schema_names))
            resolved[index] = _code(names, self.schema_names)
        return resolved

    def _heads(self, schema: Numbers, pieces: Numbers, values: pa.Array) -> pa.Array:
        names = pa.array([orjson.dumps(name).decode() for name in self.schema_names], TEXT).take(
            pa.array(np.maximum(schema, 0))
        )
        ids = json_strings(self.canonical.take(pa.array(self.starts)))
        captions = self._captions(schema, pieces, values)
        return concatenate('{"id":', ids, ',"caption":', captions, ',"schema":', names, ',"properties":{')

    def _captions(self, schema: Numbers, pieces: Numbers, values: pa.Array) -> pa.Array:
        """Return the caption of each entity, as JSON; `values` are the values of the pieces, as JSON."""
        ranks = np.array([[caption_rank(name, prop) for prop in self.prop_names] for name in self.schema_names])
        rank = ranks[schema[self.entity], self.props]
        best = np.minimum.reduceat(rank, self.starts)
        candidate = (rank == best[self.entity]) & (rank < NO_CAPTION)
        indexes = np.flatnonzero(candidate[pieces])
        entity = self.entity[pieces[indexes]]
        count = np.bincount(entity, minlength=len(self.starts))
        chosen = np.zeros(len(self.starts), dtype=np.int64)
        chosen[entity[::-1]] = indexes[::-1]
        labels = [orjson.dumps(schema_label(name)).decode() for name in self.schema_names]
        unnamed = count == 0
        chosen[unnamed] = len(values) + np.maximum(schema, 0)[unnamed]
        several = np.flatnonzero((count > 1) & (schema >= 0))
        chosen[several] = len(values) + len(labels) + np.arange(len(several))
        captions = self._choose_captions(schema, several, candidate)
        return pa.concat_arrays([values, pa.array(labels, TEXT), pa.array(captions, TEXT)]).take(pa.array(chosen))

    def _choose_captions(self, schema: Numbers, several: Numbers, candidate: Flags) -> list[str]:
        """Return the captions, as JSON, of entities that have several values to choose from."""
        rows = np.flatnonzero(candidate & _at(several, len(self.starts))[self.entity])
        table = self.rows.select(["id", "value", "lang"]).take(pa.array(rows))
        columns = (table.column(name).to_pylist() for name in CaptionCandidate._fields)
        candidates = [CaptionCandidate(*row) for row in zip(*columns, strict=True)]
        bounds = [*np.searchsorted(self.entity[rows], several).tolist(), len(rows)]
        named = [[holds_names(name, prop) for prop in self.prop_names] for name in self.schema_names]
        schemata, props = schema[several].tolist(), self.props[rows[bounds[:-1]]].tolist()
        return [
            orjson.dumps(choose_caption(candidates[start:end], named[code][prop])).decode()
            for (start, end), code, prop in zip(pairwise(bounds), schemata, props, strict=True)
        ]

    def _openings(self, pieces: Numbers, opens: Flags, bare: Flags) -> pa.Array:
        """Return the text before each value: nothing, a comma, or the name of its property."""
        names = [orjson.dumps(name).decode() for name in self.prop_names]
        texts = pa.array([f"{name}:[" for name in names] + [f"],{name}:[" for name in names] + [",", ""], TEXT)
        props, count = self.props[pieces], len(names)
        index = np.where(opens, props, np.where(self.opens_prop[pieces], props + count, 2 * count))
        return texts.take(pa.array(np.where(bare, 2 * count + 1, index)))

    def _tails(self, bare: Flags) -> pa.Array:
        starts = self.starts
        first, last = column(self.rows, "first_seen").to_numpy(), column(self.rows, "last_seen").to_numpy()
        # BASE rows have the time of the last change, all other rows the times seen; without others, BASE has both.
        seen = ~self.is_base | (np.add.reduceat(~self.is_base, starts, dtype=np.int64) == 0)[self.entity]
        latest, earliest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        first_seen = np.minimum.reduceat(np.where(seen, first, latest), starts)
        last_seen = np.maximum.reduceat(np.where(seen, last, earliest), starts)
        last_change = np.maximum.reduceat(np.where(self.is_base, first, earliest), starts)
        unchanged = last_change == earliest
        change = concatenate('"', moments(np.where(unchanged, 0, last_change)), '"')
        return concatenate(
            pa.array(["]", ""], TEXT).take(pa.array(bare.astype(np.int64))),
            '},"datasets":[',
            self._dataset_names(),
            '],"referents":',
            self._referents(),
            ',"origin":',
            self._origins(),
            ',"first_seen":"',
            moments(first_seen),
            '","last_seen":"',
            moments(last_seen),
            '","last_change":',
            pc.if_else(pa.array(unchanged), pa.scalar("null", TEXT), change),
            "}\n",
        )

    def _dataset_names(self) -> pa.Array:
        index, names = codes(self.datasets.take(pa.array(self.starts)))
        return json_strings(pa.array(names, TEXT)).take(pa.array(index))

    def _origins(self) -> pa.Array:
        return self._lists(self.origins, self._mixed(self.origins), self.origin_names)

    def _referents(self) -> pa.Array:
        referents = column(self.rows, "referent")
        others = np.flatnonzero(referents.is_valid().to_numpy(zero_copy_only=False))
        texts, index = ["[]"], np.zeros(len(self.starts), dtype=np.int64)
        ids = referents.take(pa.array(others)).to_pylist()
        by_entity: dict[int, set[str]] = {}
        for entity, referent in zip(self.entity[others].tolist(), ids, strict=True):
            by_entity.setdefault(entity, set()).add(referent)
        for entity, names in by_entity.items():
            index[entity] = len(texts)
            texts.append(orjson.dumps(sorted(names)).decode())
        return pa.array(texts, TEXT).take(pa.array(index))

    def _with_invalid(self, invalid: Flags, heads: pa.Array, tails: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Replace the heads of invalid entities with their `$invalid` reports, and their tails with nothing."""
        indexes = np.flatnonzero(invalid)
        ids = self.canonical.take(pa.array(self.starts[indexes])).to_pylist()
        reports = [
            invalid_line(canonical_id, self._names(index, self.schemata, self.schema_names)).decode()
            for index, canonical_id in zip(indexes.tolist(), ids, strict=True)
        ]
        mask = pa.array(invalid)
        return pc.replace_with_mask(heads, mask, pa.array(reports, TEXT)), pc.if_else(mask, EMPTY, tails)

    def _mixed(self, values: Numbers) -> Numbers:
        """Return the entities whose rows do not all have the same code."""
        return np.flatnonzero(np.minimum.reduceat(values, self.starts) != np.maximum.reduceat(values, self.starts))

    def _names(self, index: int, values: Numbers, names: Sequence[str]) -> set[str]:
        return {names[code] for code in values[self.starts[index] : self.ends[index]].tolist()}

    def _lists(self, values: Numbers, mixed: Numbers, names: Sequence[str]) -> pa.Array:
        """Return the distinct names of each entity's rows as a sorted JSON list."""
        texts = {orjson.dumps([name]).decode(): position for position, name in enumerate(names)}
        indexes = values[self.starts].copy()
        for index in mixed:
            text = orjson.dumps(sorted(self._names(index, values, names))).decode()
            indexes[index] = texts.setdefault(text, len(texts))
        return pa.array(list(texts), TEXT).take(pa.array(indexes))


def _code(schemata: frozenset[str], names: list[str]) -> int:
    resolved = resolved_schema(schemata)
    return -1 if resolved is None else names.index(resolved)


def _at(indexes: Numbers, length: int) -> Flags:
    flags = np.zeros(length, dtype=np.bool_)
    flags[indexes] = True
    return flags


def _where(flags: Flags, texts: pa.Array, entity: Numbers) -> pa.Array:
    """Return, for each piece, the text of its entity where the flag is set, else an empty text."""
    extended = pa.concat_arrays([texts, pa.array([""], TEXT)])
    return extended.take(pa.array(np.where(flags, entity, len(texts))))


def _blank(values: pa.Array, flags: Flags) -> pa.Array:
    return pc.if_else(pa.array(flags), EMPTY, values) if flags.any() else values
