"""Spark data source for datasets: `spark.read.format("tarn")`.

A read is of one snapshot, chosen when it is planned: the latest, or `at`. All tasks read that snapshot, whatever is
written meanwhile. Entities are split into ranges of canonical ids, by the statistics of the snapshot's files;
statements are split by origin.

Options: `url`, `key`, `dataset`; `table`, `statements` (the default) or `entities`; `at`; `partitions`, the
maximum number of ranges of entities.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tarn_client import tables
from tarn_client.lake import Lake

PARTITIONS = 8
SCHEMATA = {"statements": tables.STATEMENTS, "entities": tables.ENTITIES}


@dataclass
class SnapshotPart(InputPartition):
    """The part of a snapshot that one task reads: an origin's statements, or entities with ids in [start, stop)."""

    snapshot: str
    origin: str | None = None
    start: str | None = None
    stop: str | None = None


class TarnDataSource(DataSource):
    """The data source `tarn`: one dataset of a lake."""

    @classmethod
    def name(cls) -> str:
        return "tarn"

    def schema(self) -> StructType:
        return from_arrow_schema(SCHEMATA[self._table()])

    def reader(self, schema: StructType) -> DataSourceReader:
        return TarnReader(dict(self.options), self._table(), schema.fieldNames())

    def _table(self) -> str:
        for needed in ("url", "dataset"):
            if needed not in self.options:
                raise ValueError(f'missing option: set .option("{needed}", …)')
        table = self.options.get("table", "statements")
        if table not in SCHEMATA:
            raise ValueError(f"there is no table {table!r}, only {' and '.join(SCHEMATA)}")
        return table


class TarnReader(DataSourceReader):
    """Reads one snapshot in partitions."""

    def __init__(self, options: dict[str, str], table: str, columns: Sequence[str]) -> None:
        self._options = options
        self._table = table
        self._columns = list(columns)

    def partitions(self) -> Sequence[InputPartition]:
        with self._lake() as lake:
            dataset = lake.dataset(self._options["dataset"])
            snapshot = dataset.snapshot(self._options.get("at"))
            if snapshot is None:
                return []
            snapshot_id = str(snapshot["id"])
            files = [file for file in dataset.snapshot_files(snapshot_id) if file["table"] == "statements"]
        if self._table == "statements":
            origins = sorted({str(file["partition"]["origin"]) for file in files})
            return [SnapshotPart(snapshot_id, origin=origin) for origin in origins]
        bounds = boundaries(files, int(self._options.get("partitions", PARTITIONS)))
        return [
            SnapshotPart(snapshot_id, start=start, stop=stop)
            for start, stop in zip([None, *bounds], [*bounds, None], strict=True)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, SnapshotPart)
        with self._lake() as lake:
            dataset = lake.dataset(self._options["dataset"])
            if self._table == "statements":
                batches = dataset.statements(origin=partition.origin, at=partition.snapshot).batches()
            else:
                batches = dataset.entities(where=_between(partition), at=partition.snapshot).batches()
            yield from (batch.select(self._columns) for batch in batches)

    def _lake(self) -> Lake:
        return Lake(self._options["url"], self._options.get("key"))


def boundaries(files: Sequence[dict[str, Any]], partitions: int) -> list[str]:
    """Return canonical ids that split the rows of files into up to this many ranges of similar size.

    Any id is a correct boundary: the statistics of files only make the ranges even.
    """
    starts = sorted((str(file["canonical_id_min"]), int(file["rows"])) for file in files if "canonical_id_min" in file)
    share = sum(rows for _, rows in starts) / max(partitions, 1)
    bounds: list[str] = []
    rows_before = 0.0
    for position, (start, rows) in enumerate(starts):
        if position and rows_before >= share * (len(bounds) + 1) and start not in bounds:
            bounds.append(start)
        rows_before += rows
    return bounds


def _between(part: SnapshotPart) -> dict[str, Any] | None:
    bounds = [("gte", part.start), ("lt", part.stop)]
    edges = [{"field": "canonical_id", "op": op, "value": edge} for op, edge in bounds if edge is not None]
    return {"and": edges} if edges else None
