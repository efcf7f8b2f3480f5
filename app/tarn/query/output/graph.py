"""The graph.cypher export: entities as a property graph, by FtM's rules, in Cypher statements for `cypher-shell`.

An entity is a node, labelled with its schema and all ancestors of that, and its references to other entities are
relationships. If its schema is an edge, it is not a node but a relationship from each of its sources to each of its
targets. As in FtM's own export, relationship types are the names of properties and schemata in upper case, and hidden
properties are omitted.

Every statement merges nodes and relationships by id. So statements can run in any order, a second import changes
nothing, and an entity that is referenced but not exported is a node with only an id. A property is the list of its
unmodified values.

An edge entity with m sources and n targets would become m times n relationships, each with all properties: a record of
19 KB became 239 MB. So there is a limit per entity. Relationships beyond it are omitted, counted in the result of the
export, and reported by a comment in the file.
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

from tarn.model.datasets.export import OmittedEdges

HEADER = b"CREATE CONSTRAINT entity_id IF NOT EXISTS FOR (n:Entity) REQUIRE n.id IS UNIQUE;\n"
"""Every statement looks up nodes by this label and id, which needs an index to be fast."""

MAX_EDGES, MAX_EDGE_BYTES = 10_000, 16 << 20
"""Limits per edge entity: number of relationships, and their total length in characters. The first one is always
written."""

CHUNK = 1 << 20
"""Approximate number of characters yielded at once."""

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
UNCOMMENTED = re.compile(r"[^A-Za-z0-9_.:-]", re.ASCII)
"""Characters of an id that are replaced in a comment."""

ESCAPED = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
"""Characters to escape in a string: quote, backslash, and everything that some tool treats as a line end."""


class Rules(NamedTuple):
    """How the entities of a schema are exported; names are Cypher symbols."""

    edge: tuple[str, str] | None
    """The source and target properties if the schema is an edge. None: the entity is a node."""
    type: str
    """The type of the relationship."""
    labels: str
    """The labels of the node."""
    shown: dict[str, str]
    """The FtM properties of the node or relationship, and their keys."""
    references: dict[str, str]
    """The FtM properties of a node that become relationships, and their types."""


def statements(batches: Iterable[pa.RecordBatch], omitted: OmittedEdges | None = None) -> Iterator[bytes]:
    """Yield Cypher statements, one per line, for the entities in batches of `entity_lines`. Skip invalid entities.

    Relationships beyond the limit per entity are counted in `omitted`.
    """
    counted = OmittedEdges() if omitted is None else omitted
    for batch in batches:
        lines = batch.filter(pc.invert(batch.column("invalid"))).column("line")
        chunk: list[str] = []
        size = 0
        for line in lines.to_pylist():
            for statement in _statements(orjson.loads(line), counted):
                chunk.append(statement)
                size += len(statement)
                if size >= CHUNK:
                    yield "".join(chunk).encode()
                    chunk, size = [], 0
        if chunk:
            yield "".join(chunk).encode()


def _statements(entity: dict[str, Any], omitted: OmittedEdges) -> Iterator[str]:
    rules, values_of = _rules(entity["schema"]), entity["properties"]
    own = _text(entity["id"])
    shown = [f"id: {own}, caption: {_text(entity['caption'])}, schema: {_text(entity['schema'])}"]
    shown += [f"{rules.shown[prop]}: {_list(values)}" for prop, values in values_of.items() if prop in rules.shown]
    properties = f"{{{', '.join(shown)}}}"
    if rules.edge is not None:
        sources, targets = (values_of.get(prop, ()) for prop in rules.edge)
        size = 0
        for count, (source, target) in enumerate(product(sources, targets)):
            statement = (
                f"{_ends(source, target)} MERGE (s)-[r:{rules.type} {{id: {own}}}]->(t) SET r += {properties};\n"
            )
            if count and (count >= MAX_EDGES or size + len(statement) > MAX_EDGE_BYTES):
                left = len(sources) * len(targets) - count
                omitted.add(entity["id"], left)
                # Not as an escaped string: Neo4j replaces escapes in comments, and a line end would end the comment.
                name = UNCOMMENTED.sub("?", entity["id"])
                yield f"// {left} of {left + count} relationships of {name} are left out\n"
                return
            size += len(statement)
            yield statement
        return
    yield f"MERGE (n:Entity {{id: {own}}}) SET n{rules.labels}, n += {properties};\n"
    for prop, values in values_of.items():
        if prop in rules.references:
            for value in values:
                yield f"{_ends(entity['id'], value)} MERGE (s)-[:{rules.references[prop]}]->(t);\n"


@cache
def _rules(schema: str) -> Rules:
    known = Model.instance()[schema]
    source, target, props = known.source_prop, known.target_prop, known.properties.values()
    return Rules(
        edge=None if source is None or target is None else (source.name, target.name),
        type=_symbol(const_case(known.name)),
        labels="".join(f":{_symbol(label)}" for label in sorted(known.names)),
        shown={prop.name: _symbol(prop.name) for prop in props if prop.type != registry.entity and not prop.hidden},
        # FtM's own export omits all other references.
        references={
            prop.name: _symbol(const_case(prop.name))
            for prop in props
            if prop.type == registry.entity and prop.matchable and not prop.stub
        },
    )


def _text(value: str) -> str:
    """Return a Cypher string literal without line ends."""
    return f'"{ESCAPED.sub(_escape, value)}"'


def _list(values: list[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _symbol(name: str) -> str:
    """Return a label, type or key, in backquotes if necessary."""
    return name if PLAIN_NAME.fullmatch(name) else f"`{name.replace('`', '``')}`"


def _ends(source: str, target: str) -> str:
    return f"MERGE (s:Entity {{id: {_text(source)}}}) MERGE (t:Entity {{id: {_text(target)}}})"


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\{character}" if character in '"\\' else f"\\u{ord(character):04x}"
