"""The dataset that is filled: whether it may be, how far an earlier import came, and what it holds in the end."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.failures import Misuse, ProblemAnswered
from tarn.cli.importing.stage import ARROW
from tarn.cli.importing.tables import ImportCounts, engine
from tarn.cli.paths import at

if TYPE_CHECKING:
    from tarn.cli.connection import Client


@dataclass(frozen=True)
class ImportTarget:
    """A dataset of the server, there or not."""

    client: "Client"
    name: str

    def exists(self) -> bool:
        try:
            self.client.document("GET", at(BASE, self.name))
        except ProblemAnswered as problem:
            if problem.slug != "dataset-not-found":
                raise
            return False
        return True

    def held(self) -> list[str]:
        """What it has something of."""
        return [kind for kind in ("statements", "files", "mappings") if any(self.client.each(self._at(kind), limit=1))]

    def create(self, metadata: dict[str, Any]) -> None:
        self.client.document("POST", BASE, metadata | {"name": self.name})

    def mark(self, source: str) -> dict[str, Any] | None:
        """How far an import of this source came, if there was one."""
        try:
            tag = self.client.document("GET", self._at("tag"), params={"key": f"import/{source}"})
        except ProblemAnswered as problem:
            if problem.slug != "tag-not-found":
                raise
            return None
        return tag["value"] if isinstance(tag["value"], dict) else None

    def set_mark(self, source: str, **said: Any) -> None:
        self.client.document("PUT", self._at("tag"), {"value": said}, params={"key": f"import/{source}"})

    def require_empty(self) -> None:
        """Raises Misuse if there is something in it."""
        if held := self.held():
            raise Misuse(
                f"the dataset {self.name} is there and has {' and '.join(held)}: "
                "give --into to add to them, or --as for another name"
            )

    def has_file(self, checksum: str, path: str) -> bool:
        """Whether a content is there already, as what came from this path."""
        try:
            return any(file["path"] == path for file in self.client.each(self._at("files", checksum)))
        except ProblemAnswered as problem:
            if problem.slug != "file-not-found":
                raise
            return False

    def files(self) -> int:
        return sum(1 for _ in self.client.each(self._at("files")))

    def mappings(self) -> int:
        return sum(1 for _ in self.client.each(self._at("mappings")))

    def put_mapping(self, content_hash: str, mapping: Any) -> None:
        self.client.document("PUT", self._at("mappings", content_hash), mapping)

    def count(self) -> ImportCounts:
        """How much of it is live, by reading all of it."""
        import pyarrow as pa

        counts = ImportCounts()
        with self.client.stream(self._at("statements", "stream"), ARROW, {}) as pieces, engine() as found:
            body = _Body(pieces)
            try:
                found.register("live", pa.ipc.open_stream(io.BufferedReader(body, 1 << 20)))
                rows = found.execute(
                    "SELECT origin, count(*), count(DISTINCT entity_id) FROM live GROUP BY GROUPING SETS ((origin), ())"
                ).fetchall()
            except Exception as error:  # noqa: BLE001 - Arrow and DuckDB wrap what broke it off in words of theirs
                raise body.failure or error from None
        for origin, statements, entities in rows:
            if origin is None:
                counts.statements, counts.entities = statements, entities
            else:
                counts.origins[origin] = (statements, entities)
        return counts

    def _at(self, *below: str) -> str:
        return at(BASE, self.name, *below)


class _Body(io.RawIOBase):
    """A body as Arrow reads it. What breaks it off is kept: Arrow would only say that it is cut off."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._ahead = memoryview(b"")
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ahead:
            try:
                piece = next(self._pieces, None)
            except Exception as failure:  # noqa: BLE001 - it is raised where it can be told
                self.failure = failure
                raise OSError(str(failure)) from None
            if piece is None:
                return 0
            self._ahead = memoryview(piece)
        size = min(len(buffer), len(self._ahead))
        buffer[:size] = self._ahead[:size]
        self._ahead = self._ahead[size:]
        return size
