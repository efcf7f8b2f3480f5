"""graph.cypher: entities as a property graph, by FtM's rules, in statements that `cypher-shell` runs.

An entity is a node, with its schema and all that it is for labels, and its references to others are relationships of
it. If its schema is an edge, it is no node but a relationship from each of its sources to each of its targets. As in
FtM's own export, types are the names of properties and schemata in upper case, and hidden properties are left out.

Every statement finds or makes what it speaks of by id, so any order is right, a second import changes nothing, and an
entity of which others speak but which is not here is a node with nothing but its id. A property is the list of its
values, as they are.

An entity that is an edge between m sources and n targets would be m times n relationships, each with all properties: of
a record of 19 KB, 239 MB. So there is a limit to what one entity becomes. What is beyond it is left out, counted in the
result of the export, and named by a comment in the file.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from followthemoney.model import Model
from followthemoney.types import registry
from followthemoney.util import const_case

from tarn.model.export import OmittedEdges

HEADER = b"CREATE CONSTRAINT entity_id IF NOT EXISTS FOR (n:Entity) REQUIRE n.id IS UNIQUE;\n"
"""Each statement looks for nodes by this label and their id: without an index that takes ever longer."""

MOST_EDGES, MOST_EDGE_BYTES = 10_000, 16 << 20
"""Relationships that one entity whose schema is an edge becomes at most, and the characters that they take together; it
becomes one in any case."""

CHUNK = 1 << 20
"""Characters that are given at once, about."""

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
UNCOMMENTED = re.compile(r"[^A-Za-z0-9_.:-]", re.ASCII)
"""What is not shown of an id in a comment."""

ESCAPED = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
"""What ends a string, begins an escape, or is the end of a line to somebody."""


class Rules(NamedTuple):
    """What becomes of the entities of a schema; names are as Cypher has them."""

    edge: tuple[str, str] | None
    """The properties between whose values an entity is a relationship. None: it is a node."""
    type: str
    """Of that relationship."""
    labels: str
    """Of the node."""
    shown: dict[str, str]
    """The properties that a node or relationship has, and their keys."""
    references: dict[str, str]
    """The properties of a node that are relationships, and their types."""


def statements(batches: Iterable[pa.RecordBatch], omitted: OmittedEdges | None = None) -> Iterator[bytes]:
    """The entities in batches of `entity_lines`, one statement a line. What is invalid has no place in a graph.

    Relationships beyond the limit for one entity are counted in `omitted`.
    """
    counted = OmittedEdges() if omitted is None else omitted
    for batch in batches:
        lines = batch.filter(pc.invert(batch.column("invalid"))).column("line")
        made: list[str] = []
        size = 0
        for line in lines.to_pylist():
            for statement in _statements(orjson.loads(line), counted):
                made.append(statement)
                size += len(statement)
                if size >= CHUNK:
                    yield "".join(made).encode()
                    made, size = [], 0
        if made:
            yield "".join(made).encode()


def _statements(entity: dict[str, Any], omitted: OmittedEdges) -> Iterator[str]:
    rules, said = _rules(entity["schema"]), entity["properties"]
    own = _text(entity["id"])
    shown = [f"id: {own}, caption: {_text(entity['caption'])}, schema: {_text(entity['schema'])}"]
    shown += [f"{rules.shown[prop]}: {_list(values)}" for prop, values in said.items() if prop in rules.shown]
    properties = f"{{{', '.join(shown)}}}"
    if rules.edge is not None:
        sources, targets = (said.get(prop, ()) for prop in rules.edge)
        size = 0
        for count, (source, target) in enumerate(product(sources, targets)):
            statement = (
                f"{_ends(source, target)} MERGE (s)-[r:{rules.type} {{id: {own}}}]->(t) SET r += {properties};\n"
            )
            if count and (count >= MOST_EDGES or size + len(statement) > MOST_EDGE_BYTES):
                left = len(sources) * len(targets) - count
                omitted.add(entity["id"], left)
                # Not as a string: Neo4j replaces escapes in comments too, and the end of a line would end this one.
                name = UNCOMMENTED.sub("?", entity["id"])
                yield f"// {left} of {left + count} relationships of {name} are left out\n"
                return
            size += len(statement)
            yield statement
        return
    yield f"MERGE (n:Entity {{id: {own}}}) SET n{rules.labels}, n += {properties};\n"
    for prop, values in said.items():
        if prop in rules.references:
            for value in values:
                yield f"{_ends(entity['id'], value)} MERGE (s)-[:{rules.references[prop]}]->(t);\n"


@cache
def _rules(schema: str) -> Rules:
    known = Model.instance()[schema]
    source, target, found = known.source_prop, known.target_prop, known.properties.values()
    return Rules(
        edge=None if source is None or target is None else (source.name, target.name),
        type=_symbol(const_case(known.name)),
        labels="".join(f":{_symbol(label)}" for label in sorted(known.names)),
        shown={prop.name: _symbol(prop.name) for prop in found if prop.type != registry.entity and not prop.hidden},
        # FtM gives other references no weight, and leaves them out.
        references={
            prop.name: _symbol(const_case(prop.name))
            for prop in found
            if prop.type == registry.entity and prop.matchable and not prop.stub
        },
    )


def _text(value: str) -> str:
    """A string of Cypher, on one line whatever is in it."""
    return f'"{ESCAPED.sub(_escape, value)}"'


def _list(values: list[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _symbol(name: str) -> str:
    """A label, a type or a key."""
    return name if PLAIN_NAME.fullmatch(name) else f"`{name.replace('`', '``')}`"


def _ends(source: str, target: str) -> str:
    return f"MERGE (s:Entity {{id: {_text(source)}}}) MERGE (t:Entity {{id: {_text(target)}}})"


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return f"\\{character}" if character in '"\\' else f"\\u{ord(character):04x}"
