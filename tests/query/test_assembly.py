"""Assemble entities from live statements: both implementations compared with followthemoney's own."""

import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import duckdb
import orjson
import pyarrow as pa
import pytest
from followthemoney.dataset import Dataset
from followthemoney.exc import InvalidData
from followthemoney.model import Model
from followthemoney.statement.entity import StatementEntity
from followthemoney.statement.statement import Statement
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.model.ftm.statement import statement_id
from tarn.model.timestamps import FIRST_MOMENT, LAST_MOMENT
from tarn.query.output.assembly import Row, entity_line, entity_lines, ndjson

LIVE = pa.schema(
    [(name, pa.string()) for name in ("dataset", "canonical_id", "entity_id")]
    + [("id", pa.binary())]
    + [(name, pa.string()) for name in ("schema", "prop", "value", "lang", "original_value")]
    + [("external", pa.bool_()), ("origin", pa.string()), ("first_seen", pa.int64()), ("last_seen", pa.int64())]
)

FAMILIES = [
    ["Person", "LegalEntity", "Thing"],
    ["Company", "Organization", "LegalEntity", "Asset", "Thing"],
    ["Person", "Company", "Document"],
    ["Payment"],
    ["Address"],
    ["Email", "Document"],
    ["Trip", "Event"],
    ["Ownership", "Interest", "Interval"],
]
NAMES = ["Jane Doe", "JANE DOE", "Doe, Jane", "Иван Петров", "Ivan Petrov", "Jane Dœ", "-", "J."]
LONG = ["word " * 20, "word " * 20 + "é", "Überlang\n" * 30, "\U0001f600" * 17]
AWKWARD = [
    'say "x"',
    "back\\slash",
    "line\nend",
    "cr\rlf\r\n",
    "\x01\x1f\x7f",
    "\U0001f600",
    "  led",
    "\u2028",
    "/",
    "'",
]
TEXTS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(AWKWARD),
    st.sampled_from(LONG),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20),
)
IDS = st.sampled_from(["a", "b", "c", 'd"', "é", "\U0001f600"])
MOMENTS = st.one_of(st.integers(FIRST_MOMENT, LAST_MOMENT), st.integers(0, 20))


@st.composite
def statements(draw) -> list[Row]:
    """Draw all rows of a few entities in any order, with compatible or incompatible schemata."""
    rows: dict[tuple[bytes, str], Row] = {}
    for canonical_id in draw(st.lists(IDS, unique=True, max_size=4)):
        dataset, family = draw(st.sampled_from(["one", "two"])), draw(st.sampled_from(FAMILIES))
        for _ in range(draw(st.integers(1, 8))):
            schema = Model.instance()[draw(st.sampled_from(family))]
            settable = [name for name, prop in schema.properties.items() if not prop.stub]
            captions = [prop for prop in schema.caption if prop in settable]
            prop = draw(st.sampled_from([*captions[:2] * 3, *sorted(settable), *["id"] * (1 + len(settable) // 8)]))
            origin, entity_id = draw(st.sampled_from(["crawl", "by.hand", "x"])), f"{canonical_id}{draw(IDS)}"[-1:]
            value, lang = draw(TEXTS), draw(st.sampled_from([None, None, "eng", "rus", "mul"]))
            # FtM keeps the language of text only; a statement has any.
            lang = Statement("x", prop, schema.name, value, dataset, lang=lang).lang
            external, first = draw(st.booleans()), draw(MOMENTS)
            identity = statement_id(dataset, entity_id, prop, value, external, lang)
            last = draw(st.integers(first, LAST_MOMENT))
            rows[identity, origin] = Row(
                dataset, canonical_id, entity_id, identity, schema.name, prop, value, lang, None, external, origin,
                first, last,
            )  # fmt: skip
    return draw(st.permutations(list(rows.values())))


def iso(moment: int) -> str:
    return (datetime(1970, 1, 1) + timedelta(microseconds=moment)).isoformat(timespec="microseconds") + "Z"


def relation(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist([row._asdict() for row in rows], schema=LIVE)


@pytest.fixture(scope="module")
def duck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    scratch = str(tmp_path_factory.mktemp("duck") / "scratch")
    with duckdb.connect(config={"preserve_insertion_order": False, "temp_directory": scratch}) as connection:
        yield connection


def assembled(duck: duckdb.DuckDBPyConnection, rows: list[Row], batch_rows: int) -> dict[tuple[str, str], bytes]:
    duck.register("live", relation(rows))
    line_by_id: dict[tuple[str, str], bytes] = {}
    order: list[tuple[str, str]] = []
    for batch in entity_lines(duck, batch_rows=batch_rows):
        lines = bytes(ndjson(batch)).splitlines(keepends=True)
        assert len(lines) == batch.num_rows
        for entity, line in zip(batch.to_pylist(), lines, strict=True):
            assert entity["line"].encode() == line
            assert entity["invalid"] == line.startswith(b'{"$invalid"')
            order.append((entity["canonical_id"], entity["dataset"]))
            line_by_id[entity["dataset"], entity["canonical_id"]] = line
    assert order == sorted(set(order))
    return line_by_id


def by_entity(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.dataset, row.canonical_id), []).append(row)
    return groups


def folded(schemata: set[str]) -> str | None:
    """Return the result of FtM's merge of these schemata, in whichever order it succeeds."""
    results = set()
    for names in itertools.permutations(sorted(schemata)):
        schema = Model.instance()[names[0]]
        try:
            for name in names[1:]:
                schema = Model.instance().common_schema(schema, name)
        except InvalidData:
            continue
        results.add(schema.name)
    assert len(results) <= 1
    return results.pop() if results else None


def of_the_library(rows: list[Row], schema: str) -> StatementEntity:
    """Return the rows as followthemoney's entity, its statements ordered by value."""
    dataset = Dataset({"name": rows[0].dataset, "title": "Test"})
    entity = StatementEntity(dataset, {"schema": schema, "id": rows[0].canonical_id})
    for row in rows:
        moments = {"first_seen": iso(row.first_seen), "last_seen": iso(row.last_seen)}
        entity.add_statement(Statement(**(row._asdict() | {"id": row.id.hex()} | moments)))
    for prop, statements in entity._statements.items():
        in_order = sorted(statements, key=lambda one: (one.value, one.lang or ""))
        entity._statements[prop] = in_order  # type: ignore[assignment]
    return entity


def check(line: bytes, rows: list[Row]) -> None:
    """Compare a line with the library's entity of the same rows."""
    shown: dict[str, Any] = orjson.loads(line)
    assert line == orjson.dumps(shown) + b"\n"
    schemata = {row.schema for row in rows}
    schema = folded(schemata)
    if schema is None:
        assert shown["$invalid"]["id"] == rows[0].canonical_id
        assert shown["$invalid"]["schemata"] == sorted(schemata)
        assert "No common schema" in shown["$invalid"]["reason"]
        return
    library = of_the_library(rows, schema)
    assert list(shown) == [
        "id", "caption", "schema", "properties", "datasets", "referents", "origin", "first_seen", "last_seen",
        "last_change",
    ]  # fmt: skip
    assert shown["id"] == library.id
    assert shown["schema"] == library.schema.name
    assert shown["caption"] == library.caption
    assert shown["properties"] == {prop: sorted(values) for prop, values in library.to_dict()["properties"].items()}
    assert list(shown["properties"]) == sorted(shown["properties"])
    assert shown["datasets"] == [rows[0].dataset]
    assert shown["last_change"] == library.last_change
    # The library keeps one origin per statement; the entity of each origin has the rest.
    properties = [row for row in rows if row.prop != "id"]
    contexts = [
        of_the_library([row for row in properties if row.origin == origin], schema).to_context_dict()
        for origin in {row.origin for row in properties}
    ]
    if contexts:
        assert shown["first_seen"] == min(context["first_seen"] for context in contexts)
        assert shown["last_seen"] == max(context["last_seen"] for context in contexts)
        assert set(shown["referents"]) >= {referent for context in contexts for referent in context["referents"]}
        assert set(shown["origin"]) >= {origin for context in contexts for origin in context["origin"]}
    else:
        assert shown["first_seen"] == min(iso(row.first_seen) for row in rows)
        assert shown["last_seen"] == max(iso(row.last_seen) for row in rows)
    assert shown["referents"] == sorted({row.entity_id for row in rows} - {rows[0].canonical_id})
    assert shown["origin"] == sorted({row.origin for row in rows})


@settings(max_examples=200, deadline=None)
@given(statements(), st.integers(1, 12))
def test_entities_equal_those_of_the_library_at_any_batch_boundary(duck, rows, batch_rows):
    lines = assembled(duck, rows, batch_rows)

    entities = by_entity(rows)
    assert lines.keys() == entities.keys()
    for key, own in entities.items():
        check(lines[key], own)
        assert entity_line(own) == (lines[key], lines[key].startswith(b'{"$invalid"'))


class Exhausted:
    """A connection that runs out of memory in its first query, after a number of batches."""

    def __init__(self, duck: duckdb.DuckDBPyConnection, batches: int) -> None:
        self._duck = duck
        self._batches: int | None = batches

    def execute(self, query: str, parameters: Any = ()) -> Any:
        if self._batches is None:
            return self._duck.execute(query, parameters)
        self._query, self._parameters = query, parameters
        return self

    def to_arrow_reader(self, rows: int) -> Iterator[pa.RecordBatch]:
        batches, self._batches = self._batches, None
        yield from itertools.islice(self._duck.execute(self._query, self._parameters).to_arrow_reader(rows), batches)
        raise duckdb.OutOfMemoryException("failed to pin block")


@settings(max_examples=80, deadline=None)
@given(statements(), st.integers(1, 12), st.integers(0, 5))
def test_sort_that_runs_out_of_memory_resumes_after_the_last_line_with_spilled_values(duck, rows, batch_rows, batches):
    expected = assembled(duck, rows, 100)

    connection = Exhausted(duck, batches)
    resumed = entity_lines(connection, batch_rows=batch_rows)  # type: ignore[arg-type]
    lines = [line for batch in resumed for line in batch["line"]]

    in_order = sorted(expected, key=lambda key: key[::-1])
    assert [line.as_py().encode() for line in lines] == [expected[key] for key in in_order]


def row(prop: str, value: str, schema: str = "Person", lang: str | None = None, **fields: Any) -> Row:
    defaults: dict[str, Any] = {"dataset": "one", "canonical_id": "a", "entity_id": "a", "origin": "crawl",
                                "first_seen": 5, "last_seen": 9, "original_value": None, "external": False}  # fmt: skip
    values = defaults | fields
    identity = statement_id(values["dataset"], values["entity_id"], prop, value, values["external"], lang)
    return Row(**(values | {"id": identity, "schema": schema, "prop": prop, "value": value, "lang": lang}))


def both(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> dict[str, Any]:
    """Return one entity's JSON, after checking that both implementations agree."""
    (line,) = assembled(duck, rows, 100).values()
    assert entity_line(rows)[0] == line
    return orjson.loads(line)


def test_entity_without_properties_has_its_schema_label_and_the_timestamps_of_its_base(duck):
    assert both(duck, [row("id", "checksum")]) == {
        "id": "a", "caption": "Person", "schema": "Person", "properties": {}, "datasets": ["one"], "referents": [],
        "origin": ["crawl"], "first_seen": "1970-01-01T00:00:00.000005Z", "last_seen": "1970-01-01T00:00:00.000009Z",
        "last_change": "1970-01-01T00:00:00.000005Z",
    }  # fmt: skip


def test_entity_without_base_has_no_last_change(duck):
    assert both(duck, [row("name", "Jane Doe")])["last_change"] is None


def test_years_before_1000_have_four_digits(duck):
    shown = both(duck, [row("name", "Jane Doe", first_seen=FIRST_MOMENT, last_seen=LAST_MOMENT)])

    assert shown["first_seen"] == "0001-01-01T00:00:00.000000Z"
    assert shown["last_seen"] == "9999-12-31T23:59:59.999999Z"


def test_name_in_the_preferred_language_is_the_caption(duck):
    names = [row("name", "Иван Петров", lang="rus"), row("name", "Ivan Petrov", lang="eng"), row("name", "Aaron")]

    assert both(duck, names)["caption"] == "Ivan Petrov"


def test_name_of_two_origins_counts_once_and_name_of_two_ids_counts_twice(duck):
    names = [row("name", "Jane Doe"), row("name", "Janet Doe")]

    assert both(duck, [*names, row("name", "Janet Doe", origin="by.hand")])["caption"] == "Jane Doe"
    assert both(duck, [*names, row("name", "Janet Doe", entity_id="b")])["caption"] == "Janet Doe"


def test_caption_that_is_not_a_name_is_the_value_of_the_first_statement(duck):
    amounts = [row("amount", str(amount), "Payment") for amount in range(10)]

    assert both(duck, amounts)["caption"] == min(amounts, key=lambda one: one.id).value


def test_incompatible_schemata_are_reported_between_valid_entities(duck):
    rows = [row("name", "Jane Doe", canonical_id=one) for one in "abc"]
    rows.append(row("fileName", "x.pdf", "Document", canonical_id="b"))

    lines = assembled(duck, rows, 100)

    assert orjson.loads(lines["one", "b"]) == {
        "$invalid": {"id": "b", "reason": "No common schema: Document, Person", "schemata": ["Document", "Person"]}
    }
    assert [orjson.loads(lines["one", one])["caption"] for one in "ac"] == ["Jane Doe", "Jane Doe"]


def test_unknown_schema_is_reported(duck):
    assert both(duck, [row("name", "x", "Unheard")])["$invalid"]["reason"] == "No schema that FollowTheMoney knows"


def test_unknown_schema_is_ignored_next_to_a_known_one(duck):
    shown = both(duck, [row("name", "x", "Unheard"), row("unheard", "y", "Unheard"), row("alias", "z")])

    assert shown["schema"] == "Person"
    assert shown["properties"] == {"alias": ["z"], "name": ["x"], "unheard": ["y"]}


def test_one_id_in_two_datasets_is_two_entities(duck):
    lines = assembled(duck, [row("name", "x"), row("name", "y", dataset="two")], 100)

    assert [orjson.loads(lines[name, "a"])["caption"] for name in ("one", "two")] == ["x", "y"]


def test_relation_without_rows_yields_no_batch(duck):
    duck.register("live", relation([]))

    assert list(entity_lines(duck)) == []


def test_source_may_be_a_query_with_parameters(duck):
    duck.register("live", relation([row("name", "x", canonical_id=one) for one in "abc"]))

    batches = list(entity_lines(duck, "(SELECT * FROM live WHERE canonical_id = ?)", ["b"]))

    assert [batch["canonical_id"].to_pylist() for batch in batches] == [["b"]]


def test_more_text_than_memory_is_assembled(tmp_path):
    with duckdb.connect(config={"memory_limit": "64MB", "threads": 2, "temp_directory": str(tmp_path)}) as small:
        small.execute(
            """CREATE VIEW live AS SELECT 'one' AS dataset, 'e' || i // 5 AS canonical_id, canonical_id AS entity_id,
            unhex(sha1(i::VARCHAR)) AS id, 'Person' AS schema, ['id', 'name', 'notes', 'notes', 'position'][1 + i % 5]
            AS prop, 'row ' || i || repeat(' and so on', 200) AS value, NULL::VARCHAR AS lang,
            NULL::VARCHAR AS original_value, false AS external, 'crawl' AS origin, i AS first_seen, i AS last_seen
            FROM range(50000) t(i)"""
        )
        with pytest.raises(duckdb.OutOfMemoryException):
            small.execute("SELECT * FROM live ORDER BY canonical_id").fetchmany(1)

        batches = list(entity_lines(small))

    ids = [one for batch in batches for one in batch["canonical_id"].to_pylist()]
    assert ids == sorted(f"e{number}" for number in range(10_000))
    assert list(tmp_path.glob("spilled-*")) == []
    first = orjson.loads(bytes(ndjson(batches[0])).splitlines()[0])
    assert [value[:6] for value in first["properties"]["notes"]] == ["row 2 ", "row 3 "]
