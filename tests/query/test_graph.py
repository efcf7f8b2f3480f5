"""The export graph.cypher: FtM's graph in idempotent, order-independent lines that preserve every value."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import duckdb
import orjson
import pytest
from followthemoney.graph import Graph
from followthemoney.model import Model
from followthemoney.proxy import EntityProxy
from followthemoney.types import registry
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.model.datasets.export import OmittedEdges
from tarn.query.output import graph
from tarn.query.output.assembly import entity_lines

from tests.query.live_rows import Row, engine, fill
from tests.query.test_assembly import AWKWARD

TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"|`((?:[^`]|``)*)`|([A-Za-z_][A-Za-z0-9_]*)|(\+=|->|[(){}\[\]:,;.-])|( )')
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\"}


def unescaped(text: str) -> str:
    return ESCAPE.sub(lambda match: chr(int(match[1][1:], 16)) if len(match[1]) > 1 else SIMPLE[match[1]], text)


def tokens(line: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(line):
        match = TOKEN.match(line, place)
        assert match is not None, f"no token of Cypher at {line[place : place + 20]!r}"
        string, quoted, name, sign, _ = match.groups()
        place = match.end()
        if string is not None:
            yield "text", unescaped(string)
        elif quoted is not None:
            yield "name", quoted.replace("``", "`")
        elif name is not None:
            yield "name", name
        elif sign is not None:
            yield "sign", sign


@dataclass
class Database:
    """A minimal interpreter of the Cypher subset that the export uses."""

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    labels: dict[str, set[str]] = field(default_factory=dict)
    edges: dict[tuple[str, str, str, str | None], dict[str, Any]] = field(default_factory=dict)

    def run(self, lines: Iterable[str]) -> "Database":
        for line in lines:
            Statement(self, list(tokens(line))).run()
        return self


class Statement:
    def __init__(self, database: Database, remaining: list[tuple[str, str]]) -> None:
        self.database, self.left = database, remaining
        self.bound: dict[str, Any] = {}

    def run(self) -> None:
        while self.next() != ";":
            pass
        assert self.left == []

    def next(self) -> str:
        match self.take():
            case "MERGE":
                self.merge()
            case "SET":
                self.set()
            case ";":
                return ";"
            case other:
                raise AssertionError(f"no clause begins with {other!r}")
        return ""

    def merge(self) -> None:
        self.take("(")
        variable = self.take()
        if self.left[0][1] == ":":
            self.take(":", "Entity")
            properties = self.map()
            self.take(")")
            assert list(properties) == ["id"]
            self.bound[variable] = properties["id"]
            self.database.nodes.setdefault(properties["id"], {"id": properties["id"]})
            self.database.labels.setdefault(properties["id"], {"Entity"})
            return
        self.take(")", "-", "[")
        name = self.take() if self.left[0][1] != ":" else ""
        self.take(":")
        kind = self.take()
        own = self.map() if self.left[0][1] == "{" else {}
        self.take("]", "->", "(")
        edge = self.bound[variable], self.bound[self.take()], kind, own.get("id")
        self.take(")")
        self.database.edges.setdefault(edge, dict(own))
        self.bound[name] = edge

    def set(self) -> None:
        while True:
            variable = self.take()
            if self.left[0][1] == "+=":
                self.take("+=")
                target = self.bound[variable]
                targets: dict[Any, dict[str, Any]] = {**self.database.nodes, **self.database.edges}
                targets[target].update(self.map())
            while self.left[0][1] == ":":
                self.take(":")
                self.database.labels[self.bound[variable]].add(self.take())
            if self.left[0][1] != ",":
                return
            self.take(",")

    def map(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        self.take("{")
        while self.left[0][1] != "}" or self.left[0][0] != "sign":
            key = self.take()
            self.take(":")
            properties[key] = self.value()
            if self.left[0] == ("sign", ","):
                self.take(",")
        self.take("}")
        return properties

    def value(self) -> Any:
        kind, text = self.left.pop(0)
        if kind == "text":
            return text
        assert (kind, text) == ("sign", "[")
        values = []
        while self.left[0] != ("sign", "]"):
            values.append(self.value())
            if self.left[0] == ("sign", ","):
                self.take(",")
        self.take("]")
        return values

    def take(self, *expected: str) -> str:
        """Consume the next tokens, which are not strings: the given ones, or any one."""
        for expected_token in expected or (None,):
            kind, text = self.left.pop(0)
            assert kind != "text"
            assert expected_token in (None, text)
        return text


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    return engine()


def lines(duck: duckdb.DuckDBPyConnection, given: list[Row]) -> list[str]:
    fill(duck, given)
    text = b"".join(graph.statements(entity_lines(duck, batch_rows=3))).decode()
    statements = text.splitlines(keepends=True)
    assert all(line.endswith(";\n") for line in statements)
    return [line.removesuffix("\n") for line in statements]


def imported(duck: duckdb.DuckDBPyConnection, given: list[Row]) -> Database:
    return Database().run(lines(duck, given))


def entities(duck: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    entities_and_invalid = [
        orjson.loads(line) for batch in entity_lines(duck) for line in batch.column("line").to_pylist()
    ]
    return [entity for entity in entities_and_invalid if "$invalid" not in entity]


def as_neo4j_reads(line: str) -> str:
    """Neo4j replaces \\uXXXX everywhere in a statement before it looks for strings; it takes backslashes in pairs."""
    return ESCAPE.sub(lambda match: chr(int(match[1][1:], 16)) if len(match[1]) > 1 else match[0], line)


IDS = st.sampled_from(["a", "b", "c", 'd"', "e\\", "é", "\U0001f600", "`", "u0041"])
TEXTS = st.sampled_from([*AWKWARD, "C:\\users\\new", "\\u0041", "\\", '\\"', "a;\nb", "// no", "/*", "\x85\u2029\x1c"])
REFERENCES = {
    "Person": ["addressEntity", "parent", "riskSource", "proof"],
    "Company": ["parent"],
    "Ownership": ["owner", "asset", "owner", "asset", "proof"],
    "Documentation": ["document", "entity"],
    "Sanction": ["entity"],
    "Email": ["parent", "ancestors", "sender"],
    "Event": ["involved"],
}
VALUES = {
    "Person": ["name", "notes", "id", "country"],
    "Company": ["name", "id"],
    "Ownership": ["role", "summary"],
    "Documentation": ["role"],
    "Sanction": ["program", "reason"],
    "Email": ["subject", "bodyText", "title"],
    "Event": ["name", "summary"],
}


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    rows = []
    for canonical_id in draw(st.lists(IDS, unique=True, max_size=6)):
        schema = draw(st.sampled_from(sorted(REFERENCES)))
        rows.append(Row(canonical_id, schema, "id", "base"))
        for prop in draw(st.lists(st.sampled_from(VALUES[schema]), max_size=4)):
            value = draw(TEXTS | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9))
            rows.append(Row(canonical_id, schema, prop, value))
        references = draw(st.lists(st.sampled_from(REFERENCES[schema]), max_size=4))
        rows += [Row(canonical_id, schema, prop, draw(IDS)) for prop in references]
    return rows


@given(rows=some_rows())
@settings(max_examples=60, deadline=None)
def test_nodes_and_relationships_are_those_of_ftms_graph(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> None:
    graph = imported(duck, rows)
    theirs = Graph(edge_types=[registry.entity])
    for entity in entities(duck):
        theirs.add(EntityProxy.from_dict(entity, cleaned=True))
    # FtM also creates a node for the target of an unweighted property, and then no edge to it.
    ends = {end for edge in theirs.iteredges() for end in (edge.source_id, edge.target_id)}
    nodes = [node for node in theirs.iternodes() if node.proxy is not None or node.id in ends]
    assert set(graph.nodes) == {node.value for node in nodes}
    values = {node.id: node.value for node in theirs.iternodes()}
    pairs = {
        (values[edge.source_id], values[edge.target_id], edge.type_name.upper(), edge.proxy and edge.proxy.id)
        for edge in theirs.iteredges()
    }
    # FtM keeps one edge between two nodes, that of the last property; here each property has its own.
    assert pairs <= set(graph.edges)
    assert {(*edge[:2], edge[3]) for edge in graph.edges} == {(*pair[:2], pair[3]) for pair in pairs}
    for node in nodes:
        own = node.proxy
        assert graph.labels[node.value] == {"Entity"} | (set() if own is None else own.schema.names)


@given(rows=some_rows())
@settings(max_examples=60, deadline=None)
def test_every_value_is_preserved(duck: duckdb.DuckDBPyConnection, rows: list[Row]) -> None:
    graph = imported(duck, rows)
    for entity in entities(duck):
        schema = Model.instance()[entity["schema"]]
        shown = {
            prop: values
            for prop, values in entity["properties"].items()
            if schema.properties[prop].type != registry.entity and not schema.properties[prop].hidden
        }
        expected = {"id": entity["id"], "caption": entity["caption"], "schema": schema.name, **shown}
        if schema.edge:
            assert all(properties == expected for edge, properties in graph.edges.items() if edge[3] == entity["id"])
        else:
            assert graph.nodes[entity["id"]] == expected


@given(rows=some_rows(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_lines_and_a_second_import_give_the_same_graph(
    duck: duckdb.DuckDBPyConnection, rows: list[Row], data: st.DataObject
) -> None:
    written = lines(duck, rows)
    once = Database().run(written)
    assert Database().run(data.draw(st.permutations(written))) == once
    assert Database().run(written * 2) == once


@given(rows=some_rows())
@settings(max_examples=40, deadline=None)
def test_escapes_are_the_same_when_replaced_before_strings_are_parsed(
    duck: duckdb.DuckDBPyConnection, rows: list[Row]
) -> None:
    written = lines(duck, rows)
    assert Database().run(map(as_neo4j_reads, written)) == Database().run(written)


def test_edge_entity_is_a_relationship_of_every_source_with_every_target_and_no_node(
    duck: duckdb.DuckDBPyConnection,
) -> None:
    values = [("owner", "a"), ("owner", "b"), ("asset", "c"), ("asset", "d"), ("role", "all of it")]
    graph = imported(duck, [Row("o", "Ownership", prop, value) for prop, value in values])
    assert set(graph.nodes) == {"a", "b", "c", "d"}
    assert set(graph.edges) == {(source, target, "OWNERSHIP", "o") for source in "ab" for target in "cd"}
    assert {str(properties) for properties in graph.edges.values()} == {
        "{'id': 'o', 'caption': 'Ownership', 'schema': 'Ownership', 'role': ['all of it']}"
    }


def test_lines_have_the_expected_form(duck: duckdb.DuckDBPyConnection) -> None:
    given = [
        Row("a", "Person", "name", 'Ann "the\n Ace"'),
        Row("a", "Person", "addressEntity", "h"),
        Row("o", "UnknownLink", "subject", "a"),
        Row("o", "UnknownLink", "object", "b"),
    ]
    assert lines(duck, given) == [
        'MERGE (n:Entity {id: "a"}) SET n:LegalEntity:Person:Thing, n += {id: "a", '
        r'caption: "Ann \"the\u000a Ace\"", schema: "Person", name: ["Ann \"the\u000a Ace\""]};',
        'MERGE (s:Entity {id: "a"}) MERGE (t:Entity {id: "h"}) MERGE (s)-[:ADDRESSENTITY]->(t);',
        'MERGE (s:Entity {id: "a"}) MERGE (t:Entity {id: "b"}) MERGE (s)-[r:UNKNOWNLINK {id: "o"}]->(t) '
        'SET r += {id: "o", caption: "Other link", schema: "UnknownLink"};',
    ]


def test_four_byte_characters_are_unescaped_and_line_separators_are_escaped(duck: duckdb.DuckDBPyConnection) -> None:
    ends = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\x00\x7f"
    (line,) = lines(duck, [Row("a", "Address", "full", f"\U0001f600{ends}\\u")])
    shown = "".join(f"\\u{ord(character):04x}" for character in ends)
    assert f'full: ["\U0001f600{shown}\\\\u"]' in line


def test_invalid_entities_and_empty_datasets_leave_no_lines_and_the_header_is_one_statement(
    duck: duckdb.DuckDBPyConnection,
) -> None:
    assert lines(duck, []) == []
    assert lines(duck, [Row("x", "Person", "name", "x"), Row("x", "Address", "full", "x")]) == []
    words = [text for _, text in tokens(graph.HEADER.decode().removesuffix("\n"))]
    assert " ".join(words) == (
        "CREATE CONSTRAINT entity_id IF NOT EXISTS FOR ( n : Entity ) REQUIRE n . id IS UNIQUE ;"
    )


@pytest.mark.parametrize(("name", "symbol"), [("Person", "Person"), ("two words", "`two words`"), ("a`b", "`a``b`")])
def test_names_that_are_not_identifiers_are_quoted(name: str, symbol: str) -> None:
    assert graph._symbol(name) == symbol
    assert list(tokens(symbol)) == [("name", name)]


def edges_of(id: str, owners: int, assets: int, **more: str) -> list[Row]:
    props = [("owner", f"o{number}") for number in range(owners)] + [
        ("asset", f"a{number}") for number in range(assets)
    ]
    return [Row(id, "Ownership", prop, value) for prop, value in [*props, *more.items()]]


def test_edge_with_very_many_ends_has_a_bounded_number_of_relationships_and_the_rest_is_counted(
    duck: duckdb.DuckDBPyConnection,
):
    hostile = "x\nMATCH (n) DETACH DELETE n; \\u000a//"
    fill(duck, [*edges_of(hostile, 120, 120), *edges_of("z", 100, 100), Row("p", "Person", "name", "Jane")])
    omitted = OmittedEdges()

    text = b"".join(graph.statements(entity_lines(duck), omitted)).decode()

    lines_of_file = text.splitlines()
    comments = [line for line in lines_of_file if line.startswith("//")]
    assert omitted == OmittedEdges(count=4_400, entities=1, first=[hostile])
    assert comments == ["// 4400 of 14400 relationships of x?MATCH??n??DETACH?DELETE?n???u000a?? are left out"]
    assert len(lines_of_file) == len(comments) + 10_000 + 10_000 + 1


def test_properties_of_an_edge_are_not_multiplied_beyond_a_bound(duck: duckdb.DuckDBPyConnection):
    fill(duck, edges_of("x", 30, 30, summary="s" * 1_000_000))
    omitted = OmittedEdges()

    size = sum(map(len, graph.statements(entity_lines(duck), omitted)))

    assert size < graph.MAX_EDGE_BYTES + 1000
    assert (omitted.entities, omitted.first) == (1, ["x"])
    assert omitted.count == 900 - graph.MAX_EDGE_BYTES // 1_000_000


def test_omitted_edges_of_ranges_add_up_and_name_the_first_ten():
    total = OmittedEdges()
    for number in range(12):
        part = OmittedEdges()
        part.add(f"e{number}", 3)
        total.merge(part)

    assert (total.count, total.entities, total.first) == (36, 12, [f"e{number}" for number in range(10)])
