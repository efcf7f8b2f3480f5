"""Every kind of read of a dataset, compared with the model's result."""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any, TypeVar

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter
from tarn.datasets.registry import Dataset
from tarn.model.ftm.query import EntityAggregate, Node
from tarn.model.ftm.query_fields import SortKey
from tarn.query import delete_counts, entities, statements
from tarn.query.output.assembly import Row
from tarn.query.output.statement_formats import ARROW, CSV, FORMATS, NDJSON, PARQUET
from tarn.query.reader import NOW, Reader, Reading, RequestedState
from tarn.query.sorting import Sorting
from tarn.query.statements import StatementFilter

from tests.query.model import NAMES, ORIGINS, Matches, Model, ids_of, last_seen, shown, values

Found = TypeVar("Found")
After = TypeVar("After")

PAGE = 2
"""Records per page: so few that most lists have several pages."""

LEGAL = {"Person", "LegalEntity", "Company"}

CONDITIONS: list[tuple[dict[str, Any], Matches]] = [
    ({"field": "id", "op": "in", "value": ["a", "Q1"]}, lambda rows: bool({"a", "Q1"} & ids_of(rows))),
    ({"field": "canonical_id", "op": "eq", "value": "b"}, lambda rows: rows[0].canonical_id == "b"),
    ({"field": "schema", "op": "eq", "value": "Person"}, lambda rows: "Person" in values("schema", rows)),
    ({"field": "schemata", "op": "eq", "value": "LegalEntity"}, lambda rows: bool(LEGAL & values("schema", rows))),
    ({"field": "origin", "op": "in", "value": ["by.hand"]}, lambda rows: "by.hand" in values("origin", rows)),
    (
        {"and": [{"field": "prop:name", "op": "eq", "value": "x"}, {"not": {"field": "id", "op": "eq", "value": "c"}}]},
        lambda rows: "x" in values("prop:name", rows) and "c" not in ids_of(rows),
    ),
    ({"field": "prop:name", "op": "null", "value": True}, lambda rows: not values("prop:name", rows)),
    (
        {"field": "last_seen", "op": "gte", "value": "1970-01-01T00:00:00.000025Z"},
        lambda rows: last_seen(rows) >= 25,
    ),
]

FILTERS: list[tuple[StatementFilter, Callable[[Row], bool]]] = [
    (StatementFilter(canonical_ids=["a", "Q2"]), lambda row: row.canonical_id in ("a", "Q2")),
    (StatementFilter(schemata=["Person"]), lambda row: row.schema == "Person"),
    (
        StatementFilter(kinds=["LegalEntity"], props=["name", "id"]),
        lambda row: row.schema in LEGAL and row.prop in ("name", "id"),
    ),
    (StatementFilter(origins=["crawl"]), lambda row: row.origin == "crawl"),
    (StatementFilter(origins=["crawl", "by.hand"]), lambda row: row.origin in ("crawl", "by.hand")),
]


@dataclass(frozen=True)
class Reads:
    """Reads of one dataset by one reader."""

    reader: Reader
    dataset: Dataset

    def read(self, work: Callable[..., Found], *arguments: Any) -> Found:
        with self.reader.reading() as reading:
            return work(reading, *arguments)

    def check(self, model: Model, state: RequestedState = NOW) -> None:
        """Check every kind of read."""
        self.check_basic_reads(model, state)
        self.check_entities(model, state)
        self.check_statements(model, state)

    def check_basic_reads(self, model: Model, state: RequestedState = NOW) -> None:
        """Check each entity by each of its ids, all entities, and all statements; every other read is
        derived from these.
        """
        for name in NAMES:
            assert self.get(name, state=state) == model.one(name), name
        assert self.entity_stream(state) == model.lines()
        assert self.statement_stream(state, StatementFilter(), NDJSON) == [shown(row) for row in model.rows]

    def check_entities(self, model: Model, state: RequestedState) -> None:
        for name, origin in zip(NAMES, cycle(ORIGINS), strict=False):
            assert self.get(name, origin, state) == model.one(name, origin), (name, origin)
        for name in ("b", "Q1"):
            assert self.adjacent(name, state) == (model.adjacent(name) if model.one(name) else None), name
        for raw, matches in CONDITIONS:
            assert self.listed(state, raw) == model.lines(matches), raw
        for raw, matches in CONDITIONS[:3]:
            assert self.entity_stream(state, raw) == model.lines(matches), raw
        by_name = self.listed(state, None, "prop:name")
        assert by_name == model.sorted_lines(lambda rows: (min(values("prop:name", rows), default="~"), id_of(rows)))
        by_moment = self.listed(state, CONDITIONS[3][0], "-last_seen")
        assert by_moment == model.sorted_lines(lambda rows: (-last_seen(rows), id_of(rows)), CONDITIONS[3][1])
        for by, (raw, matches) in zip(("schema", "origin", "prop:name"), CONDITIONS[2:5], strict=True):
            assert self.facets(state, by, raw) == model.facets(by, matches), (by, raw)

    def check_statements(self, model: Model, state: RequestedState) -> None:
        for form in FORMATS:
            assert self.statement_stream(state, StatementFilter(), form) == [shown(row) for row in model.rows], form
        for name, origin in zip(NAMES, cycle(ORIGINS), strict=False):
            expected = [shown(row) for row in model.named([name]) if row.origin == origin]
            assert self.statement_list(state, StatementFilter(ids=[name], origins=[origin])) == expected, (name, origin)
        pair = [shown(row) for row in model.named(["a", "Q2"])]
        assert self.statement_list(state, StatementFilter(ids=["a", "Q2"])) == pair
        for statement_filter, matches in FILTERS:
            assert self.statement_list(state, statement_filter) == [shown(row) for row in model.rows if matches(row)], (
                statement_filter
            )

    def check_counts(self, model: Model) -> None:
        """Check the counts that deletes would return now."""
        for name, origin in zip(NAMES, cycle((None, *ORIGINS)), strict=False):
            rows_of_origin = [row for row in model.rows if origin in (None, row.origin)]
            count = self.read(delete_counts.of_entity, self.dataset, name, origin)
            assert count == sum(row.entity_id == name for row in rows_of_origin), (name, origin)
        for statement, origin in zip(sorted({row.id for row in model.rows}), (None, *ORIGINS), strict=False):
            places = self.read(delete_counts.of_statement, self.dataset, statement, origin)
            rows = [row for row in model.rows if row.id == statement and origin in (None, row.origin)]
            assert places == sorted((row.entity_id, row.origin) for row in rows)
        for origin in ORIGINS:
            assert self.read(delete_counts.of_origin, self.dataset, origin) == sum(
                row.origin == origin for row in model.rows
            )

    # One read each

    def get(self, name: str, origin: str | None = None, state: RequestedState = NOW) -> bytes | None:
        result = self.read(entities.one, self.dataset, state, name, origin)
        return None if result.line is None else result.line.json

    def listed(self, state: RequestedState, where: dict[str, Any] | None, *sort: str) -> list[bytes]:
        keys = [SortKey(key) for key in sort]

        def page(after: str | None) -> tuple[list[bytes], str | None]:
            place = None if after is None else Sorting(tuple(keys)).decode(after)
            result = self.read(entities.page, [self.dataset], state, node(where), keys, place, PAGE)
            return [line.json for line in result.lines], result.following

        return list(pages(page))

    def entity_stream(self, state: RequestedState, where: dict[str, Any] | None = None) -> list[bytes]:
        def read_all(reading: Reading) -> list[tuple[bytes, int, int]]:
            return list(entities.stream(reading, self.dataset, state, node(where))[1])

        pieces = self.read(read_all)
        lines = b"".join(piece for piece, _, _ in pieces).splitlines(keepends=True)
        assert len(lines) == sum(count for _, count, _ in pieces)
        assert sum(line.startswith(b'{"$invalid"') for line in lines) == sum(invalid for _, _, invalid in pieces)
        return lines

    def facets(self, state: RequestedState, by: str, where: dict[str, Any]) -> list[dict[str, Any]]:
        metrics = ["count", {"count_distinct": "prop:name"}, {"max": "last_seen"}]
        body = EntityAggregate.model_validate({"where": where, "group_by": [by], "metrics": metrics})
        return [facet.model_dump() for facet in self.read(entities.aggregate, [self.dataset], state, body)[1]]

    def adjacent(self, name: str, state: RequestedState) -> list[tuple[str, str, bool, bytes | None]] | None:
        entity, rows = self.read(entities.adjacent, self.dataset, state, name, None, 100)
        if entity.line is None:
            return None
        return [(one.property, one.id, one.outgoing, one.line and one.line.json) for one in rows]

    def statement_list(self, state: RequestedState, statement_filter: StatementFilter) -> list[dict[str, Any]]:
        def page(after: Any) -> tuple[list[dict[str, Any]], Any]:
            _, rows, following = self.read(statements.page, self.dataset, state, statement_filter, after, 2 * PAGE)
            return rows, following

        return list(pages(page))

    def statement_stream(
        self, state: RequestedState, statement_filter: StatementFilter, form: str
    ) -> list[dict[str, Any]]:
        def read_all(reading: Reading) -> bytes:
            return b"".join(statements.stream(reading, self.dataset, state, statement_filter, form)[1])

        return parsed(form, self.read(read_all))


def id_of(rows: list[Row]) -> str:
    return rows[0].canonical_id


def node(raw: dict[str, Any] | None) -> Node | None:
    return None if raw is None else _nodes().validate_python(raw)


@cache
def _nodes() -> TypeAdapter[Any]:
    return TypeAdapter(Node)


def pages(page: Callable[[After | None], tuple[list[Found], After | None]]) -> Iterator[Found]:
    """Return all items of a list, page by page."""
    items, after = page(None)
    yield from items
    while after is not None:
        items, after = page(after)
        yield from items


def parsed(form: str, data: bytes) -> list[dict[str, Any]]:
    """Parse statements of any format into dicts as in NDJSON."""
    if form == NDJSON:
        return [orjson.loads(line) for line in data.splitlines()]
    if form == CSV:
        return [_typed(row) for row in csv.DictReader(io.StringIO(data.decode(), newline=""))]
    table = pq.read_table(pa.BufferReader(data)) if form == PARQUET else pa.ipc.open_stream(data).read_all()
    assert form in (PARQUET, ARROW)
    moments = ("first_seen", "last_seen")
    return [
        row | {name: row[name].replace(tzinfo=None).isoformat(timespec="microseconds") + "Z" for name in moments}
        for row in table.to_pylist()
    ]


def _typed(row: dict[str, str]) -> dict[str, Any]:
    return row | {"external": row["external"] == "t", "lang": row["lang"] or None,
                  "original_value": row["original_value"] or None}  # fmt: skip
