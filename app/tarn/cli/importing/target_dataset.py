"""Target dataset of an import: its state, the progress mark of earlier imports, and its counts afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarn_client.dataset import Dataset
from tarn_client.errors import LakeError, Problem
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS, LONG_TIMEOUT
from tarn.cli.failures import Misuse
from tarn.cli.importing.tables import ImportCounts, open_duckdb

if TYPE_CHECKING:
    from tarn_client.connection import Connection


@dataclass(frozen=True)
class ImportTarget:
    """The dataset that an import writes to. It may not exist yet."""

    connection: "Connection"
    name: str

    def exists(self) -> bool:
        try:
            self.connection.read(path_of(DATASETS, self.name))
        except Problem as problem:
            if problem.slug != "dataset-not-found":
                raise
            return False
        return True

    def contents(self) -> list[str]:
        """Return which of statements, files and mappings it has."""
        return [
            kind for kind in ("statements", "files", "mappings") if any(self.connection.each(self._at(kind), limit=1))
        ]

    def create(self, metadata: dict[str, Any]) -> None:
        self.connection.write("POST", DATASETS, metadata | {"name": self.name})

    def mark(self, source: str) -> dict[str, Any] | None:
        """Return the progress mark of an earlier import of this source, if there was one."""
        try:
            tag = self.connection.read(self._at("tag"), params={"key": f"import/{source}"})
        except Problem as problem:
            if problem.slug != "tag-not-found":
                raise
            return None
        return tag["value"] if isinstance(tag["value"], dict) else None

    def set_mark(self, source: str, **progress: Any) -> None:
        self.connection.write("PUT", self._at("tag"), {"value": progress}, params={"key": f"import/{source}"})

    def require_empty(self) -> None:
        """Raise Misuse if it has data."""
        if kinds := self.contents():
            raise Misuse(
                f"the dataset {self.name} exists and has {' and '.join(kinds)}: "
                "give --into to add to them, or --as for another name"
            )

    def has_file(self, checksum: str, path: str) -> bool:
        """Return whether it already has a file with this content and path."""
        try:
            return any(file["path"] == path for file in self.connection.each(self._at("files", checksum)))
        except Problem as problem:
            if problem.slug != "file-not-found":
                raise
            return False

    def files(self) -> int:
        return sum(1 for _ in self.connection.each(self._at("files")))

    def mappings(self) -> int:
        return sum(1 for _ in self.connection.each(self._at("mappings")))

    def put_mapping(self, content_hash: str, mapping: Any) -> None:
        self.connection.write("PUT", self._at("mappings", content_hash), mapping)

    def count(self) -> ImportCounts:
        """Return the number of live statements and entities, by reading all of them."""
        import pyarrow as pa

        counts, failures = ImportCounts(), []
        # Before its first row the server sorts the statements, which takes long if there are many.
        statements = Dataset(self.connection.with_timeout(LONG_TIMEOUT), self.name).statements()

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                yield from statements.batches()
            except LakeError as failure:
                failures.append(failure)
                raise

        with open_duckdb() as connection:
            connection.register("live", pa.RecordBatchReader.from_batches(statements.schema(), batches()))
            try:
                rows = connection.execute(
                    "SELECT origin, count(*), count(DISTINCT entity_id) FROM live GROUP BY GROUPING SETS ((origin), ())"
                ).fetchall()
            except Exception as error:  # noqa: BLE001 - Arrow and DuckDB replace the error that ended the stream
                raise failures[0] if failures else error from None
        for origin, statement_count, entity_count in rows:
            if origin is None:
                counts.statements, counts.entities = statement_count, entity_count
            else:
                counts.origins[origin] = (statement_count, entity_count)
        return counts

    def _at(self, *below: str) -> str:
        return path_of(DATASETS, self.name, *below)
