"""Read a slice of the journal as Arrow over ADBC, in an executor.

ADBC has its own copy of the SQLite library (docs/decisions/008): while it is open, nothing else in the executor's
process may have the database open.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from tarn.journal.packs import Pack, within

if TYPE_CHECKING:
    from tarn.journal.stage_parts import StagePartWriter

COLUMNS = (
    "kind",
    "id",
    "entity_id",
    "canonical_id",
    "schema",
    "prop",
    "value",
    "lang",
    "original_value",
    "external",
    "origin",
    "first_seen",
    "last_seen",
)

TYPED_DEFAULTS = {"kind": "0", "id": "x''", "external": "0", "first_seen": "0", "last_seen": "0"}
"""Values of the extra first row of a query on SQLite, from which the driver takes the types; other columns are text."""

ORD = 'b."commit" * 4294967296 + j.position'

BATCH_ROWS = 16_384
"""Rows of an Arrow batch; by default, SQLite's driver makes many small ones."""

PACKS = (
    'SELECT p.batch, b."commit", p.position, p.rows, p.checksum, p.data '
    "FROM journal_batches b JOIN journal_packs p ON p.batch = b.id "
    "WHERE b.dataset_id = {0} AND b.state = 'committed' AND b.segment > {1} AND b.segment <= {2} "
    "AND p.high >= {3} AND p.low <= {4}"
)

PACKS_PER_BATCH = 16
"""Packs that SQLite's driver holds in memory at once."""

READ_ONLY = "?mode=ro"

SAMPLE = 1_000
"""Rows that are read first from SQLite, to find columns in which all values are the same."""

TEXT_DEFAULT, EMPTY_BYTES = "'text'", "x''"

CHECKED_EVENTS = pa.schema(
    [
        ("ord", pa.int64()),
        *(
            (name, pa.binary() if name == "id" else pa.int64() if name in TYPED_DEFAULTS else pa.string())
            for name in COLUMNS
        ),
        ("invalid_columns", pa.string()),
    ]
)


EVENTS = pa.schema(list(CHECKED_EVENTS)[:-1])


@dataclass(frozen=True, slots=True)
class JournalSlice:
    """Committed events of some segments: of the entities in a range of shards, and those that concern every entity."""

    dataset_id: str
    after: int
    upto: int
    shards: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Journal:
    """Address of the journal for ADBC's drivers. It can be pickled and used in another process."""

    uri: str = field(repr=False)
    is_sqlite: bool

    @classmethod
    def at(cls, database_url: str) -> "Journal":
        from sqlalchemy.engine import make_url

        from tarn.db.engine import TASK, adbc_uri

        url = make_url(database_url)
        if url.get_backend_name() == "sqlite":
            path = quote(str(Path(str(url.database)).absolute()))
            return cls(f"file:{path}{READ_ONLY}", is_sqlite=True)
        return cls(adbc_uri(database_url, TASK), is_sqlite=False)

    def open_writer(self) -> "AbstractContextManager[StagePartWriter]":
        """Open a connection that writes parts of stages."""
        # It imports SQLAlchemy, which takes half a second that executors that only read are spared.
        from tarn.journal import stage_parts

        return stage_parts.open_writer(self.uri.removesuffix(READ_ONLY), self.is_sqlite)

    @contextmanager
    def open_reader(self) -> Iterator["JournalReader"]:
        if self.is_sqlite:
            from adbc_driver_sqlite import dbapi as sqlite

            connection = sqlite.connect(self.uri)
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout=20000")
                cursor.fetchall()
        else:
            from adbc_driver_postgresql import dbapi as postgresql

            connection = postgresql.connect(self.uri)
        try:
            yield JournalReader(connection, self.is_sqlite)
        finally:
            connection.close()


class JournalReader:
    """A connection that reads slices."""

    def __init__(self, connection: Any, is_sqlite: bool) -> None:
        self._connection = connection
        self.is_sqlite = is_sqlite

    @contextmanager
    def events(self, slice_: JournalSlice) -> Iterator[pa.RecordBatchReader]:
        """Yield a reader of the events with their `ord`, in any order. Rows whose `ord` is 0 are not events.

        While reading, ArrowInvalid or the driver's own error is raised if a value in SQLite has another type, and
        DamagedPack for a pack that cannot be read.
        """
        if self.is_sqlite:
            batches = chain(self._from_sqlite(slice_), self._from_packs(slice_, EVENTS))
            yield pa.RecordBatchReader.from_batches(EVENTS, batches)
        else:
            with self._connection.cursor() as cursor:
                cursor.execute(self._query(COLUMNS), self._parameters(slice_))
                rows = cursor.fetch_record_batch()
                batches = chain(rows, self._from_packs(slice_, rows.schema))
                yield pa.RecordBatchReader.from_batches(rows.schema, batches)

    def _from_packs(self, slice_: JournalSlice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the events that are in packs, converted to the types of the events in rows."""
        placeholders = ("?",) * 5 if self.is_sqlite else ("$1", "$2", "$3", "$4", "$5")
        low, high = slice_.shards
        with self._connection.cursor() as cursor:
            if self.is_sqlite:
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(PACKS_PER_BATCH)})
            cursor.execute(PACKS.format(*placeholders), (slice_.dataset_id, slice_.after, slice_.upto, low, high))
            for packs in cursor.fetch_record_batch():
                for *fields, data in zip(*packs.columns, strict=True):
                    batch, commit, position, rows, checksum = (value.as_py() for value in fields)
                    pack = Pack(batch, commit, position, rows, checksum, data.as_buffer())
                    events = within(pack.decode(), low, high)
                    if len(events):
                        yield events.select(schema.names).cast(schema)

    def _from_sqlite(self, slice_: JournalSlice) -> Iterator[pa.RecordBatch]:
        """Yield the events that are in rows of SQLite.

        The driver is slow for every single value, and in most columns most values are the same. So a column in which
        the first rows have the same value is read only for rows with another value, by a second query.
        """
        all_rows = self._query(COLUMNS)
        sample = pa.Table.from_batches(
            self._query_typed(COLUMNS, f"{all_rows} LIMIT {SAMPLE}", self._parameters(slice_))
        )
        if len(sample) < SAMPLE:
            yield from sample.to_batches()
            return
        sample.validate(full=True)
        constant = {name: sample.column(name)[-1] for name in COLUMNS if len(sample.column(name)[1:].unique()) == 1}
        varying = [name for name in COLUMNS if name not in constant]
        is_constant = " AND ".join(["true", *(f'j."{name}" IS ?' for name in constant)])
        values = tuple(value.as_py() for value in constant.values())
        others = 0
        query = self._query(varying, f"CASE WHEN {is_constant} THEN {ORD} ELSE 0 END")
        for batch in self._query_typed(varying, query, (*values, *self._parameters(slice_))):
            others += len(batch) - int(np.count_nonzero(batch.column("ord")))
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns |= {name: pa.repeat(value, len(batch)) for name, value in constant.items()}
            yield pa.record_batch([columns[name] for name in EVENTS.names], EVENTS)
        if others > 1:  # the first is the row that defines the types
            yield from self._query_typed(
                COLUMNS, f"{all_rows} AND NOT ({is_constant})", (*self._parameters(slice_), *values)
            )

    def _query_typed(self, names: Sequence[str], query: str, parameters: tuple[Any, ...]) -> Iterator[pa.RecordBatch]:
        """Run a query on SQLite. The result begins with a row that defines the types of the columns."""
        types = "".join(f", {TYPED_DEFAULTS.get(name, TEXT_DEFAULT)} AS {name}" for name in names)
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(f"SELECT 0 AS ord{types} UNION ALL {query}", parameters)
            batches = cursor.fetch_record_batch()
            if batches.schema.types != [EVENTS.field(name).type for name in ("ord", *names)]:
                raise pa.ArrowInvalid("a column holds values of another type")
            yield from batches

    def readable_events(self, slice_: JournalSlice) -> pa.Table:
        """Read the same events from a SQLite database in which some have values of another type, or not in UTF-8.

        SQLite does not enforce types. Invalid values are NULL in the result, and `invalid_columns` names their columns.
        """
        columns = {}
        for name in COLUMNS:
            kinds = {"id": "'blob'"}.get(name, "'integer'" if name in TYPED_DEFAULTS else "'text'")
            value = f'j."{name}"' if name in TYPED_DEFAULTS else f'CAST(j."{name}" AS BLOB)'
            columns[name] = f"CASE WHEN typeof(j.\"{name}\") IN ({kinds}, 'null') THEN {value} END"
            columns[f"{name}_kind"] = f"typeof(j.\"{name}\") NOT IN ({kinds}, 'null')"
        typed = ", ".join(f"{TYPED_DEFAULTS.get(name, EMPTY_BYTES)} AS {name}, 0 AS {name}_kind" for name in COLUMNS)
        selected = ", ".join(f"{expression} AS {name}" for name, expression in columns.items())
        query = f"SELECT 0 AS ord, {typed} UNION ALL SELECT {ORD} AS ord, {selected} {self._source()}"
        with self._connection.cursor() as cursor:
            cursor.execute(query, self._parameters(slice_))
            rows = cursor.fetch_arrow_table().to_pylist()
        for row in rows:
            wrong = [name for name in COLUMNS if row.pop(f"{name}_kind")]
            for name in COLUMNS:
                if name not in TYPED_DEFAULTS and row[name] is not None:
                    try:
                        row[name] = row[name].decode()
                    except UnicodeDecodeError:
                        row[name] = None
                        wrong.append(name)
            row["invalid_columns"] = ", ".join(wrong) or None
        packed = pa.Table.from_batches(self._from_packs(slice_, EVENTS), EVENTS)
        invalid_columns = pa.nulls(len(packed), pa.string())
        packed = packed.append_column("invalid_columns", invalid_columns)
        return pa.concat_tables([pa.Table.from_pylist(rows, CHECKED_EVENTS), packed])

    def _parameters(self, slice_: JournalSlice) -> tuple[Any, ...]:
        low, high = slice_.shards
        named = slice_.dataset_id, slice_.after, slice_.upto, low, high
        return (*named, low) if self.is_sqlite else named

    def _query(self, columns: Sequence[str], number: str = ORD) -> str:
        selected = "".join(f', j."{name}" AS {name}' for name in columns)
        return f"SELECT {number} AS ord{selected} {self._source()}"

    def _source(self) -> str:
        placeholders = iter("??????" if self.is_sqlite else ("$1", "$2", "$3", "$4", "$5", "$4"))
        return (
            f"FROM journal_batches b JOIN journal j ON j.batch = b.id "
            f"WHERE b.dataset_id = {next(placeholders)} AND b.state = 'committed' AND b.segment > {next(placeholders)} "
            f"AND b.segment <= {next(placeholders)} "
            f"AND (j.shard_key BETWEEN {next(placeholders)} AND {next(placeholders)} "
            # Events that concern every entity go to every task; other events without a shard, to the first.
            f"OR (j.shard_key IS NULL AND (j.kind = 3 OR {next(placeholders)} = 0)))"
        )
