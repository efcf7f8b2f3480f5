"""documents.csv: one line for each entity that is a document, with what it takes to find, load and list its file.

A cell has all values of a property, joined as FtM joins them; a cell without one is empty and not quoted.
"""

# ruff: noqa: S608 - put together from constants of ours

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from followthemoney.types import registry

from tarn.model.query_fields import kinds_of
from tarn.query.ftm_model import caption_properties

DOCUMENT = "Document"

PROPERTIES = {
    "file_name": "fileName",
    "title": "title",
    "mime_type": "mimeType",
    "file_size": "fileSize",
    "content_hash": "contentHash",
    "parent": "parent",
    "source_url": "sourceUrl",
    "author": "author",
    "date": "date",
    "authored_at": "authoredAt",
    "published_at": "publishedAt",
    "modified_at": "modifiedAt",
    "languages": "language",
    "countries": "country",
}
"""Columns that have the values of a property, and which one."""

COLUMNS = ("id", "schema", "caption", *PROPERTIES, "origin", "first_seen", "last_seen")
HEADER = ",".join(f'"{name}"' for name in COLUMNS).encode() + b"\n"


def documents(source: str = "live") -> str:
    """A query, in parentheses, for the rows of documents in a relation like `live`, as little of them as is shown.

    An entity is a document if and only if one of its statements says so, unless it is invalid.
    """
    kinds = _listed(kinds_of(DOCUMENT))
    # The texts of documents are long, and no column has them.
    shown = _listed({*PROPERTIES.values(), *caption_properties()})
    return (
        f"(SELECT * REPLACE (CASE WHEN prop IN ({shown}) THEN value ELSE '' END AS value) FROM {source} "
        f"SEMI JOIN (SELECT dataset, canonical_id FROM {source} WHERE schema IN ({kinds})) "
        "USING (dataset, canonical_id))"
    )


def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """The lines of the documents among entities, in batches of `entity_lines`: of all rows, or of those above."""
    # Everything is quoted, as in the CSV of statements: then line ends and spaces are what they were.
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="all_valid")
    for batch in batches:
        lines = batch.filter(pc.invert(batch.column("invalid"))).column("line")
        entities = (orjson.loads(line) for line in lines.to_pylist())
        found = [_cells(entity) for entity in entities if entity["schema"] in _kinds()]
        if found:
            columns = [pa.array(column, pa.string()) for column in zip(*found, strict=True)]
            sink = pa.BufferOutputStream()
            pyarrow.csv.write_csv(pa.table(columns, names=COLUMNS), sink, options)
            yield sink.getvalue().to_pybytes()


def _cells(entity: dict[str, Any]) -> tuple[str | None, ...]:
    join, said = registry.string.join, entity["properties"]
    shown = (join(said[name]) if name in said else None for name in PROPERTIES.values())
    seen = entity["first_seen"], entity["last_seen"]
    return (entity["id"], entity["schema"], entity["caption"], *shown, join(entity["origin"]), *seen)


@cache
def _kinds() -> frozenset[str]:
    return frozenset(kinds_of(DOCUMENT))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
