"""The writer: collect records into chunks and send each as one idempotent request."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import zstandard

from tarn_client.errors import Problem
from tarn_client.ndjson import NDJSON
from tarn_client.stage import Stage

if TYPE_CHECKING:
    from tarn_client.connection import Connection

Commit = Literal["auto", "wait_for", "force"]
OnError = Literal["abort", "skip", "drop"]
ValueMode = Literal["clean", "as_is"]

CHUNK_BYTES = 4 << 20
"""Bytes of records in one request, before compression."""

HEADERS = {"Content-Type": NDJSON, "Content-Encoding": "zstd"}


class HasDict(Protocol):
    """An object of followthemoney: an entity or a statement."""

    def to_dict(self) -> Any: ...


Record = Mapping[str, Any] | HasDict


@dataclass
class Written:
    """The result of a writer. `errors` lists the first records that were left out, numbered from 1."""

    entities: int = 0
    statements: int = 0
    rejected: int = 0
    commit: int | None = None
    snapshot: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    omitted: dict[str, int] = field(default_factory=dict)
    """The number of values left out of stored records, by property."""
    omitted_values: list[dict[str, Any]] = field(default_factory=list)
    """The first of them in each request, with `line`, `property`, `value` and `reason`."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Fields that entities or statements do not have, with the number of records that had them."""


class Writer:
    """Writes records to a dataset, in requests of about `chunk_bytes`, each applied completely or not at all, once.

    Without `atomic`, a chunk is durable when it is sent, and stays even if the block fails later. With it, all chunks
    go to one stage, which is committed when the block succeeds and aborted when it fails. `commit` defines what the
    end of the block waits for: that all records are durable, or that they are in a snapshot. `on_error="skip"` leaves
    invalid records out, `"drop"` only the property or value that cannot be stored. Entities are cleaned unless
    `values` is `"as_is"`.
    """

    def __init__(
        self,
        connection: "Connection",
        dataset: str,
        origin: str | None,
        records: Literal["entities", "statements"],
        atomic: bool,
        commit: Commit,
        on_error: OnError,
        chunk_bytes: int,
        values: ValueMode | None = None,
    ) -> None:
        self._connection = connection
        self._dataset = dataset
        self._origin = origin
        self._records = records
        self._atomic = atomic
        self._commit = commit
        self._on_error = on_error
        self._values = values
        self._chunk_bytes = chunk_bytes
        self._compressor = zstandard.ZstdCompressor()
        self._pending = bytearray()
        self._pending_records = self._sent_records = 0
        self._stage: Stage | None = None
        self.written = Written()

    def __enter__(self) -> "Writer":
        if self._atomic:
            self._stage = Stage(self._connection, self._dataset, self._origin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._stage is not None:
            self._stage.abort()

    def add(self, record: Record) -> None:
        """Write a record: a dict, or an object of followthemoney. Raises LakeError if a chunk cannot be sent."""
        # Not earlier: the last chunk is sent at the end of the block, where the writer waits for `commit`.
        if len(self._pending) >= self._chunk_bytes:
            self._send("auto")
        document = record if isinstance(record, Mapping) else record.to_dict()
        self._pending += json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self._pending_records += 1

    def add_all(self, records: Iterable[Record]) -> None:
        """Write records one after the other."""
        for record in records:
            self.add(record)

    def _finish(self) -> None:
        if self._pending:
            self._send("auto" if self._stage is not None else self._commit)
        if self._stage is not None:
            self._record(self._stage.commit({"commit": self._commit}))

    def _send(self, commit: Commit) -> None:
        """Send the collected records as one request."""
        params: dict[str, Any] = {"on_error": self._on_error}
        if self._values is not None:
            params["values"] = self._values
        content = self._compressor.compress(bytes(self._pending))
        try:
            if self._stage is not None:
                result = self._stage.send(self._records, content, HEADERS, params)
            else:
                params |= {"origin": self._origin, "commit": commit}
                path = f"{self._dataset}/{self._records}"
                result = self._connection.write("POST", path, params=params, content=content, headers=HEADERS)
        except Problem as problem:
            self._number(problem.errors)
            raise
        written = self.written
        written.entities += result["entities"]
        written.statements += result["statements"]
        written.rejected += result["rejected"]
        written.errors += self._number(result["errors"])
        omitted = result.get("omitted", {"by_property": {}, "first": []})
        written.omitted_values += self._number(omitted["first"])
        for counts, more in ((written.omitted, omitted["by_property"]), (written.ignored, result.get("ignored", {}))):
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count
        self._record(result)
        self._sent_records += self._pending_records
        self._pending, self._pending_records = bytearray(), 0

    def _number(self, faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert line numbers within a chunk to record numbers of the complete write."""
        for fault in faults:
            if fault.get("line") is not None:
                fault["line"] += self._sent_records
        return faults

    def _record(self, result: dict[str, Any]) -> None:
        """Keep the commit that makes what was written durable, and its snapshot."""
        self.written.commit, self.written.snapshot = result["commit"], result["snapshot"]
