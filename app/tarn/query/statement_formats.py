"""Live statements in the forms in which FtM's tools and others read them: NDJSON, CSV, Parquet, Arrow.

Every form shows the same fourteen columns, those of FtM's CSV. Rows keep the order of the query, chunks are made as
rows come, and memory is bounded by a batch, whatever the number of rows.
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

from tarn.query.column_text import (
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
from tarn.query.ftm_model import property_type

NDJSON = "application/x-ndjson"
CSV = "text/csv"
PARQUET = "application/vnd.apache.parquet"
ARROW = "application/vnd.apache.arrow.stream"

BATCH_ROWS = 32_768
MOMENT = pa.timestamp("us", "UTC")
TYPED = {"external": pa.bool_(), "first_seen": MOMENT, "last_seen": MOMENT}

STATEMENTS = pa.schema([(name, TYPED.get(name, pa.string())) for name in CSV_COLUMNS])
"""Statements as Parquet and Arrow have them: FtM's columns, with types."""

JSON_COLUMNS = ("id", "entity_id", "canonical_id", "prop", "prop_type", "schema", "value", "dataset", "origin", "lang",
                "original_value", "external", "first_seen", "last_seen")  # fmt: skip
CSV_HEADER = ",".join(f'"{name}"' for name in CSV_COLUMNS).encode() + b"\n"


def statement_rows(duck: duckdb.DuckDBPyConnection, query: str, parameters: Any) -> list[dict[str, Any]]:
    """The rows of a query with the columns of `live`, as FtM's statement dicts; for a page of them."""
    found = duck.execute(query, parameters)
    names = [name for name, *_ in found.description or ()]
    rows = (dict(zip(names, row, strict=True)) for row in found.fetchall())
    shown = (
        row
        | {
            "id": row["id"].hex(),
            "prop_type": property_type(row["schema"], row["prop"]),
            "first_seen": moment(row["first_seen"]),
            "last_seen": moment(row["last_seen"]),
        }
        for row in rows
    )
    return [{name: row[name] for name in JSON_COLUMNS} for row in shown]


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
    """Lines of FtM's CSV, without what stands above them."""
    # Everything is quoted, as FtM writes it: then line ends and spaces are what they were.
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
    """A file that is only ever written to; what was written is taken from it as it comes."""

    closed = False

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._held.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """What was written can still be taken."""

    def taken(self) -> list[bytes]:
        """What was written since the last time, in one piece, if anything was."""
        taken = [b"".join(self._held)] if self._held else []
        self._held = []
        return taken


def _convert(table: pa.Table, shape: Callable[[pa.Table], dict[str, pa.Array]]) -> pa.Table:
    """FtM's columns, in its order, those that differ between the forms in the shape of one of them."""
    made = shape(table)
    made["id"] = hexadecimal(column(table, "id")).cast(pa.string())
    made["prop_type"] = _property_types(column(table, "prop"), column(table, "schema")).cast(pa.string())
    return pa.table({name: made[name] if name in made else table.column(name) for name in CSV_COLUMNS})


def _as_types(table: pa.Table) -> dict[str, pa.Array]:
    return {name: table.column(name).cast(MOMENT) for name in ("first_seen", "last_seen")}


def _as_text(table: pa.Table) -> dict[str, pa.Array]:
    shown = {name: moments(column(table, name).to_numpy()) for name in ("first_seen", "last_seen")}
    return {"external": _choose_text(column(table, "external"), "t", "f"), **shown}


def _property_types(props: pa.Array, schemata: pa.Array) -> pa.Array:
    """The name of the type of each row's property."""
    prop, prop_names = codes(props)
    schema, schema_names = codes(schemata)
    pairs, place = np.unique(schema * len(prop_names) + prop, return_inverse=True)
    types = [
        property_type(schema_names[pair // len(prop_names)], prop_names[pair % len(prop_names)])
        for pair in pairs.tolist()
    ]
    return pa.array(types, TEXT).take(pa.array(place))


def _json_repeated(values: pa.Array) -> pa.Array:
    """Texts, of which there are few distinct ones, as JSON."""
    place, distinct = codes(values)
    return pa.array([orjson.dumps(value).decode() for value in distinct], TEXT).take(pa.array(place))


def _choose_text(flags: pa.Array, yes: str, no: str) -> pa.Array:
    return pc.if_else(flags, pa.scalar(yes, TEXT), pa.scalar(no, TEXT))
