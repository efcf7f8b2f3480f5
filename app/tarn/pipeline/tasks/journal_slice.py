"""A slice of the journal as Arrow, read over ADBC in an executor.

ADBC's SQLite is a library of its own (docs/decisions/008): an executor's process has the database open by nothing else
meanwhile.
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
"""Values of the first row that SQLite gives, text elsewhere: its driver takes types from it, and a NULL has none."""

ORD = 'b."commit" * 4294967296 + j.position'

BATCH_ROWS = 16_384
"""Rows of an Arrow batch; SQLite's driver would make many small ones."""

PACKS = (
    'SELECT p.batch, b."commit", p.position, p.rows, p.checksum, p.data '
    "FROM journal_batches b JOIN journal_packs p ON p.batch = b.id "
    "WHERE b.dataset_id = {0} AND b.state = 'committed' AND b.segment > {1} AND b.segment <= {2} "
    "AND p.high >= {3} AND p.low <= {4}"
)

PACKS_PER_BATCH = 16
"""Packs that SQLite's driver holds at once."""

READ_ONLY = "?mode=ro"

SAMPLE = 1_000
"""Rows of a SQLite that are looked at first."""

TEXT, BYTES = "'text'", "x''"

READABLE = pa.schema(
    [
        ("ord", pa.int64()),
        *(
            (name, pa.binary() if name == "id" else pa.int64() if name in TYPED_DEFAULTS else pa.string())
            for name in COLUMNS
        ),
        ("poison", pa.string()),
    ]
)


EVENTS = pa.schema(list(READABLE)[:-1])


@dataclass(frozen=True, slots=True)
class JournalSlice:
    """Committed events of some segments: of entities in a range of shards, and those that concern every entity."""

    dataset_id: str
    after: int
    upto: int
    shards: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Journal:
    """Where the journal is, as ADBC's drivers want it said. Pickled, it means the same in another process."""

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

    def writing(self) -> "AbstractContextManager[StagePartWriter]":
        """A connection to write parts of stages by."""
        # With SQLAlchemy it is half a second's import, which executors that only read do without.
        from tarn.journal import stage_parts as parts

        return parts.opened(self.uri.removesuffix(READ_ONLY), self.is_sqlite)

    @contextmanager
    def opened(self) -> Iterator["JournalReader"]:
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
    """A connection to read by."""

    def __init__(self, connection: Any, is_sqlite: bool) -> None:
        self._connection = connection
        self.is_sqlite = is_sqlite

    @contextmanager
    def events(self, wanted: JournalSlice) -> Iterator[pa.RecordBatchReader]:
        """The events with their `ord`, in no particular order. A row whose `ord` is 0 is none of them.

        From SQLite, ArrowInvalid or the driver's own error is raised on the way if a value is of another type. Raises
        Damaged on the way for a pack that cannot be read.
        """
        if self.is_sqlite:
            everything = chain(self._from_sqlite(wanted), self._from_packs(wanted, EVENTS))
            yield pa.RecordBatchReader.from_batches(EVENTS, everything)
        else:
            with self._connection.cursor() as cursor:
                cursor.execute(self._query(COLUMNS), self._parameters(wanted))
                rows = cursor.fetch_record_batch()
                everything = chain(rows, self._from_packs(wanted, rows.schema))
                yield pa.RecordBatchReader.from_batches(rows.schema, everything)

    def _from_packs(self, wanted: JournalSlice, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Those of the events that are in packs, in the types of those that are not."""
        marks = ("?",) * 5 if self.is_sqlite else ("$1", "$2", "$3", "$4", "$5")
        low, high = wanted.shards
        with self._connection.cursor() as cursor:
            if self.is_sqlite:
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(PACKS_PER_BATCH)})
            cursor.execute(PACKS.format(*marks), (wanted.dataset_id, wanted.after, wanted.upto, low, high))
            for some in cursor.fetch_record_batch():
                for *place, data in zip(*some.columns, strict=True):
                    batch, commit, position, rows, checksum = (value.as_py() for value in place)
                    pack = Pack(batch, commit, position, rows, checksum, data.as_buffer())
                    events = within(pack.opened(), low, high)
                    if len(events):
                        yield events.select(schema.names).cast(schema)

    def _from_sqlite(self, wanted: JournalSlice) -> Iterator[pa.RecordBatch]:
        """Its driver takes long over every single value, and in most columns most events say the same.

        So columns in which the first rows are all alike are not read where they say that again; and where they do not,
        the whole row is read by a query of its own.
        """
        everything = self._query(COLUMNS)
        sample = pa.Table.from_batches(self._typed(COLUMNS, f"{everything} LIMIT {SAMPLE}", self._parameters(wanted)))
        if len(sample) < SAMPLE:
            yield from sample.to_batches()
            return
        sample.validate(full=True)
        shared = {name: sample.column(name)[-1] for name in COLUMNS if len(sample.column(name)[1:].unique()) == 1}
        varying = [name for name in COLUMNS if name not in shared]
        alike = " AND ".join(["true", *(f'j."{name}" IS ?' for name in shared)])
        values = tuple(value.as_py() for value in shared.values())
        others = 0
        query = self._query(varying, f"CASE WHEN {alike} THEN {ORD} ELSE 0 END")
        for batch in self._typed(varying, query, (*values, *self._parameters(wanted))):
            others += len(batch) - int(np.count_nonzero(batch.column("ord")))
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns |= {name: pa.repeat(value, len(batch)) for name, value in shared.items()}
            yield pa.record_batch([columns[name] for name in EVENTS.names], EVENTS)
        if others > 1:  # the first is the row that is there for its types
            yield from self._typed(COLUMNS, f"{everything} AND NOT ({alike})", (*self._parameters(wanted), *values))

    def _typed(self, names: Sequence[str], query: str, parameters: tuple[Any, ...]) -> Iterator[pa.RecordBatch]:
        """What a query finds in SQLite, after a row that says of which types the columns are."""
        types = "".join(f", {TYPED_DEFAULTS.get(name, TEXT)} AS {name}" for name in names)
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(f"SELECT 0 AS ord{types} UNION ALL {query}", parameters)
            found = cursor.fetch_record_batch()
            if found.schema.types != [EVENTS.field(name).type for name in ("ord", *names)]:
                raise pa.ArrowInvalid("a column holds values of another type")
            yield from found

    def readable_events(self, wanted: JournalSlice) -> pa.Table:
        """The same events from a SQLite in which some cannot be read: a value of another type, or text that is none.

        SQLite keeps in a column whatever somebody put there. Such a value is left out, and `poison` names its column.
        """
        columns = {}
        for name in COLUMNS:
            kinds = {"id": "'blob'"}.get(name, "'integer'" if name in TYPED_DEFAULTS else "'text'")
            value = f'j."{name}"' if name in TYPED_DEFAULTS else f'CAST(j."{name}" AS BLOB)'
            columns[name] = f"CASE WHEN typeof(j.\"{name}\") IN ({kinds}, 'null') THEN {value} END"
            columns[f"{name}_kind"] = f"typeof(j.\"{name}\") NOT IN ({kinds}, 'null')"
        typed = ", ".join(f"{TYPED_DEFAULTS.get(name, BYTES)} AS {name}, 0 AS {name}_kind" for name in COLUMNS)
        chosen = ", ".join(f"{expression} AS {name}" for name, expression in columns.items())
        query = f"SELECT 0 AS ord, {typed} UNION ALL SELECT {ORD} AS ord, {chosen} {self._source()}"
        with self._connection.cursor() as cursor:
            cursor.execute(query, self._parameters(wanted))
            found = cursor.fetch_arrow_table().to_pylist()
        for row in found:
            wrong = [name for name in COLUMNS if row.pop(f"{name}_kind")]
            for name in COLUMNS:
                if name not in TYPED_DEFAULTS and row[name] is not None:
                    try:
                        row[name] = row[name].decode()
                    except UnicodeDecodeError:
                        row[name] = None
                        wrong.append(name)
            row["poison"] = ", ".join(wrong) or None
        packed = pa.Table.from_batches(self._from_packs(wanted, EVENTS), EVENTS)
        poison = pa.nulls(len(packed), pa.string())
        return pa.concat_tables([pa.Table.from_pylist(found, READABLE), packed.append_column("poison", poison)])

    def _parameters(self, wanted: JournalSlice) -> tuple[Any, ...]:
        low, high = wanted.shards
        named = wanted.dataset_id, wanted.after, wanted.upto, low, high
        return (*named, low) if self.is_sqlite else named

    def _query(self, columns: Sequence[str], number: str = ORD) -> str:
        chosen = "".join(f', j."{name}" AS {name}' for name in columns)
        return f"SELECT {number} AS ord{chosen} {self._source()}"

    def _source(self) -> str:
        marks = iter("??????" if self.is_sqlite else ("$1", "$2", "$3", "$4", "$5", "$4"))
        return (
            f"FROM journal_batches b JOIN journal j ON j.batch = b.id "
            f"WHERE b.dataset_id = {next(marks)} AND b.state = 'committed' AND b.segment > {next(marks)} "
            f"AND b.segment <= {next(marks)} "
            f"AND (j.shard_key BETWEEN {next(marks)} AND {next(marks)} "
            # What concerns every entity is for every task; what has no shard otherwise, for the first.
            f"OR (j.shard_key IS NULL AND (j.kind = 3 OR {next(marks)} = 0)))"
        )
