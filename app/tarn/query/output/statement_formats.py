"""Serialisation of live statements for FtM's tools and others: NDJSON, CSV, Parquet, Arrow.

Every format has the same fourteen columns, those of FtM's CSV. Rows keep the order of the query, chunks are written as
rows arrive, and memory is bounded by the size of a batch.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import duckdb
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from followthemoney.statement.serialize import CSV_COLUMNS

from tarn.query.output.column_text import (
    TEXT,
    codes,
    column,
    concatenate,
    hexadecimal,
    json_strings,
    moment,
    moments,
    text_bytes,
)
from tarn.query.output.ftm_model import property_type

NDJSON = "application/x-ndjson"
CSV = "text/csv"
PARQUET = "application/vnd.apache.parquet"
ARROW = "application/vnd.apache.arrow.stream"

BATCH_ROWS = 32_768
MOMENT = pa.timestamp("us", "UTC")
TYPED = {"external": pa.bool_(), "first_seen": MOMENT, "last_seen": MOMENT}

STATEMENTS = pa.schema([(name, TYPED.get(name, pa.string())) for name in CSV_COLUMNS])
"""The schema of statements in Parquet and Arrow: FtM's columns, with types."""

JSON_COLUMNS = ("id", "entity_id", "canonical_id", "prop", "prop_type", "schema", "value", "dataset", "origin", "lang",
                "original_value", "external", "first_seen", "last_seen")  # fmt: skip
CSV_HEADER = ",".join(f'"{name}"' for name in CSV_COLUMNS).encode() + b"\n"


def statement_rows(duck: duckdb.DuckDBPyConnection, query: str, parameters: Any) -> list[dict[str, Any]]:
    """Return the rows of a query with the columns of `live` as FtM statement dicts. For a page, not for a stream."""
    cursor = duck.execute(query, parameters)
    names = [name for name, *_ in cursor.description or ()]
    rows = (dict(zip(names, row, strict=True)) for row in cursor.fetchall())
    converted = (
        row
        | {
            "id": row["id"].hex(),
            "prop_type": property_type(row["schema"], row["prop"]),
            "first_seen": moment(row["first_seen"]),
            "last_seen": moment(row["last_seen"]),
        }
        for row in rows
    )
    return [{name: row[name] for name in JSON_COLUMNS} for row in converted]


def _ndjson(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    for table in tables:
        yield text_bytes(_json_lines(table)).to_pybytes()


def _json_lines(table: pa.Table) -> pa.Array:
    props, schemata = column(table, "prop"), column(table, "schema")
    types = _property_types(props, schemata)
    return concatenate(
        '{"id":"',
        hexadecimal(column(table, "id")),
        '","entity_id":',
        json_strings(column(table, "entity_id")),
        ',"canonical_id":',
        json_strings(column(table, "canonical_id")),
        ',"prop":',
        _json_repeated(props),
        ',"prop_type":',
        _json_repeated(types),
        ',"schema":',
        _json_repeated(schemata),
        ',"value":',
        json_strings(column(table, "value")),
        ',"dataset":',
        _json_repeated(column(table, "dataset")),
        ',"origin":',
        _json_repeated(column(table, "origin")),
        ',"lang":',
        _json_repeated(column(table, "lang")),
        ',"original_value":',
        pc.fill_null(json_strings(column(table, "original_value")), "null"),
        ',"external":',
        _choose_text(column(table, "external"), "true", "false"),
        ',"first_seen":"',
        moments(column(table, "first_seen").to_numpy()),
        '","last_seen":"',
        moments(column(table, "last_seen").to_numpy()),
        '"}\n',
    )


def _csv(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    yield CSV_HEADER
    yield from csv_rows(tables)


def csv_rows(tables: Iterable[pa.Table]) -> Iterator[bytes]:
    """Yield lines of FtM's CSV, without the header."""
    # Everything is quoted, as in FtM's own CSV, which preserves line ends and spaces.
    options = pyarrow.csv.WriteOptions(include_header=False, quoting_style="all_valid", batch_size=16_384)
    for table in tables:
        sink = pa.BufferOutputStream()
        pyarrow.csv.write_csv(_convert(table, _as_text), sink, options)
        yield sink.getvalue().to_pybytes()


def _parquet(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    sink = MemorySink()
    with pq.ParquetWriter(sink, STATEMENTS, compression="zstd") as writer:
        for table in tables:
            writer.write_table(_convert(table, _as_types))
            yield from sink.taken()
    yield from sink.taken()


def _arrow(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    sink = MemorySink()
    with pa.ipc.new_stream(sink, STATEMENTS) as writer:
        for table in tables:
            writer.write_table(_convert(table, _as_types))
            yield from sink.taken()
    yield from sink.taken()


FORMATS: dict[str, Callable[[Iterator[pa.Table]], Iterator[bytes]]] = {
    NDJSON: _ndjson,
    CSV: _csv,
    PARQUET: _parquet,
    ARROW: _arrow,
}


class MemorySink:
    """A write-only file object in memory, whose content is taken out while it is being written."""

    closed = False

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """Do nothing: the content can still be taken."""

    def taken(self) -> list[bytes]:
        """Return what was written since the last call as one chunk, or an empty list."""
        taken = [b"".join(self._chunks)] if self._chunks else []
        self._chunks = []
        return taken


def _convert(table: pa.Table, convert: Callable[[pa.Table], dict[str, pa.Array]]) -> pa.Table:
    """Return FtM's columns in its order; `convert` converts the columns that differ between the formats."""
    converted = convert(table)
    converted["id"] = hexadecimal(column(table, "id")).cast(pa.string())
    converted["prop_type"] = _property_types(column(table, "prop"), column(table, "schema")).cast(pa.string())
    return pa.table({name: converted[name] if name in converted else table.column(name) for name in CSV_COLUMNS})


def _as_types(table: pa.Table) -> dict[str, pa.Array]:
    return {name: table.column(name).cast(MOMENT) for name in ("first_seen", "last_seen")}


def _as_text(table: pa.Table) -> dict[str, pa.Array]:
    converted = {name: moments(column(table, name).to_numpy()) for name in ("first_seen", "last_seen")}
    return {"external": _choose_text(column(table, "external"), "t", "f"), **converted}


def _property_types(props: pa.Array, schemata: pa.Array) -> pa.Array:
    """Return the name of the type of each row's property."""
    prop, prop_names = codes(props)
    schema, schema_names = codes(schemata)
    pairs, indexes = np.unique(schema * len(prop_names) + prop, return_inverse=True)
    types = [
        property_type(schema_names[pair // len(prop_names)], prop_names[pair % len(prop_names)])
        for pair in pairs.tolist()
    ]
    return pa.array(types, TEXT).take(pa.array(indexes))


def _json_repeated(values: pa.Array) -> pa.Array:
    """Return texts as JSON strings; efficient if there are few distinct ones."""
    indexes, distinct = codes(values)
    return pa.array([orjson.dumps(value).decode() for value in distinct], TEXT).take(pa.array(indexes))


def _choose_text(flags: pa.Array, yes: str, no: str) -> pa.Array:
    return pc.if_else(flags, pa.scalar(yes, TEXT), pa.scalar(no, TEXT))
