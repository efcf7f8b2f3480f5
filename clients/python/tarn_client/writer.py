"""The writer: records in, requests out, each of them made once."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

import zstandard

from tarn_client.connection import Connection
from tarn_client.errors import LakeError, Problem

Commit = Literal["auto", "wait_for", "force"]
OnError = Literal["abort", "skip", "drop"]
HowValues = Literal["clean", "as_is"]

CHUNK_BYTES = 4 << 20
"""Bytes of records that a request carries, before they are compressed."""


class HasDict(Protocol):
    """An object of followthemoney: an entity or a statement."""

    def to_dict(self) -> Any: ...


Record = Mapping[str, Any] | HasDict


@dataclass
class Written:
    """What a writer has written. `errors` are the first records that were left out, with their numbers from 1."""

    entities: int = 0
    statements: int = 0
    rejected: int = 0
    commit: int | None = None
    snapshot: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    omitted: dict[str, int] = field(default_factory=dict)
    """How many values of each property were left out of records that were stored."""
    omitted_values: list[dict[str, Any]] = field(default_factory=list)
    """The first of them in each request, with `line`, `property`, `value` and `reason`."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Fields that no entity or statement has, and how many records had them."""


class Writer:
    """Writes records to a dataset, in requests of about `chunk_bytes`, each all or nothing and made once.

    Without `atomic`, a chunk is durable when it is sent, and stays though the block fails later. With it, all of them
    go to one stage, which is committed when the block ends well, and given up when it does not. `commit` says for what
    the end of the block waits: that all is durable, or in a snapshot. `on_error="skip"` leaves bad records out,
    `"drop"` only the property or value that cannot be stored. Entities are cleaned unless `values` is `"as_is"`.
    """

    def __init__(
        self,
        connection: Connection,
        dataset: str,
        origin: str | None,
        records: Literal["entities", "statements"],
        atomic: bool,
        commit: Commit,
        on_error: OnError,
        chunk_bytes: int,
        values: HowValues | None = None,
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
        self._gathered = bytearray()
        self._gathered_records = self._sent_records = 0
        self._stage: str | None = None
        self.written = Written()

    def __enter__(self) -> "Writer":
        if self._atomic:
            stage = self._connection.write("POST", f"{self._dataset}/stages", body={"origin": self._origin})
            self._stage = f"{self._dataset}/stages/{stage['id']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._finish()
        elif self._stage is not None:
            self._give_up()

    def add(self, record: Record) -> None:
        """Write a record: a dict, or an object of followthemoney. Raises LakeError if a chunk cannot be sent."""
        # Not before: the last chunk is sent at the end, where `commit` is waited for.
        if len(self._gathered) >= self._chunk_bytes:
            self._send("auto")
        document = record if isinstance(record, Mapping) else record.to_dict()
        self._gathered += json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self._gathered_records += 1

    def add_all(self, records: Iterable[Record]) -> None:
        """Write records, as they come."""
        for record in records:
            self.add(record)

    def _finish(self) -> None:
        if self._gathered:
            self._send("auto" if self._stage is not None else self._commit)
        if self._stage is not None:
            self._commit_stage()

    def _send(self, commit: Commit) -> None:
        """Send what was gathered, as one request."""
        params: dict[str, Any] = {"on_error": self._on_error}
        if self._values is not None:
            params["values"] = self._values
        if self._stage is None:
            params |= {"origin": self._origin, "commit": commit}
        try:
            answer = self._connection.write(
                "POST",
                f"{self._stage or self._dataset}/{self._records}",
                params,
                content=self._compressor.compress(bytes(self._gathered)),
                headers={"Content-Type": "application/x-ndjson", "Content-Encoding": "zstd"},
            )
        except Problem as problem:
            self._number(problem.errors)
            raise
        done = self.written
        done.entities += answer["entities"]
        done.statements += answer["statements"]
        done.rejected += answer["rejected"]
        done.errors += self._number(answer["errors"])
        omitted = answer.get("omitted", {"by_property": {}, "first": []})
        done.omitted_values += self._number(omitted["first"])
        for counts, more in ((done.omitted, omitted["by_property"]), (done.ignored, answer.get("ignored", {}))):
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count
        done.commit, done.snapshot = answer["commit"], answer["snapshot"]
        self._sent_records += self._gathered_records
        self._gathered, self._gathered_records = bytearray(), 0

    def _number(self, faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lines of a chunk as numbers of records among all."""
        for fault in faults:
            if fault.get("line") is not None:
                fault["line"] += self._sent_records
        return faults

    def _commit_stage(self) -> None:
        try:
            answer = self._connection.write("POST", f"{self._stage}/commit", {"commit": self._commit})
        except Problem as problem:
            # The first try may have done it, and died before it kept its answer.
            stage = self._connection.read(str(self._stage)) if problem.slug == "stage-closed" else {}
            if stage.get("state") != "committed":
                raise
            answer = {"commit": stage["commit"], "snapshot": None}
        self.written.commit, self.written.snapshot = answer["commit"], answer["snapshot"]

    def _give_up(self) -> None:
        """Abort the stage. If that fails it expires by itself; what failed before is what the caller must hear of."""
        try:
            self._connection.write("DELETE", str(self._stage))
        except LakeError:
            return
