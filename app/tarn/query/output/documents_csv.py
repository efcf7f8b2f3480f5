"""The documents.csv export: one line for each Document entity, with the columns to find, load and list its file.

A cell has all values of a property, joined as FtM joins them; a cell without a value is empty and not quoted.
"""

# ruff: noqa: S608 - SQL is built from constants

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from followthemoney.types import registry

from tarn.model.ftm.query_fields import schema_descendants
from tarn.query.output.ftm_model import caption_properties

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
"""Columns of the CSV, and the FtM property whose values each one has."""

COLUMNS = ("id", "schema", "caption", *PROPERTIES, "origin", "first_seen", "last_seen")
HEADER = ",".join(f'"{name}"' for name in COLUMNS).encode() + b"\n"


def documents(source: str = "live") -> str:
    """Return a query, in parentheses, for the rows of documents in a relation like `live`, without unused values.

    A valid entity is a document if and only if one of its statements has a schema that is a Document.
    """
    kinds = _listed(schema_descendants(DOCUMENT))
    # The body texts of documents are long, and no column of the CSV needs them.
    shown = _listed({*PROPERTIES.values(), *caption_properties()})
    return (
        f"(SELECT * REPLACE (CASE WHEN prop IN ({shown}) THEN value ELSE '' END AS value) FROM {source} "
        f"SEMI JOIN (SELECT dataset, canonical_id FROM {source} WHERE schema IN ({kinds})) "
        "USING (dataset, canonical_id))"
    )


def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield the CSV lines of the documents among the entities in batches of `entity_lines`.

    The batches may be of all rows, or of those that `documents` selects.
    """
    # Everything is quoted, as in the CSV of statements, which preserves line ends and spaces.
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="all_valid")
    for batch in batches:
        lines = batch.filter(pc.invert(batch.column("invalid"))).column("line")
        entities = (orjson.loads(line) for line in lines.to_pylist())
        cells = [_cells(entity) for entity in entities if entity["schema"] in _kinds()]
        if cells:
            columns = [pa.array(column, pa.string()) for column in zip(*cells, strict=True)]
            sink = pa.BufferOutputStream()
            pyarrow.csv.write_csv(pa.table(columns, names=COLUMNS), sink, options)
            yield sink.getvalue().to_pybytes()


def _cells(entity: dict[str, Any]) -> tuple[str | None, ...]:
    join, properties = registry.string.join, entity["properties"]
    shown = (join(properties[name]) if name in properties else None for name in PROPERTIES.values())
    seen = entity["first_seen"], entity["last_seen"]
    return (entity["id"], entity["schema"], entity["caption"], *shown, join(entity["origin"]), *seen)


@cache
def _kinds() -> frozenset[str]:
    return frozenset(schema_descendants(DOCUMENT))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
