"""A model of a dataset that applies one event at a time, and readers of what its store holds."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tarn.datasets.head import recorded_head
from tarn.datasets.registry import Dataset
from tarn.lake import snapshots
from tarn.model.datasets.snapshot import Snapshot, TableName
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi

Identity = tuple[bytes, str]

# Not prefixed with TARN_: an unknown setting refuses every start.
HISTORIES = range(int(os.environ.get("HISTORIES", "2")))
"""Seeds of random histories; `make faults` runs more of them."""


@dataclass
class Expected:
    """The live rows after batches of events; first and last seen cover the time since a statement was last added."""

    live: dict[Identity, dict[str, Any]] = field(default_factory=dict)

    def commit(self, events: Iterable[dict[str, Any]]) -> None:
        """Apply a batch. A statement that a batch ends and adds again counts as never ended."""
        before = dict(self.live)
        for event in events:
            if event["kind"] == 1:
                self._add(event, before)
            elif event["kind"] == 2:
                self.live.pop((event["id"], event["origin"]), None)
            else:
                self._end(lambda row, event=event: _erased(row, event))

    def _add(self, event: dict[str, Any], before: dict[Identity, dict[str, Any]]) -> None:
        identity = event["id"], event["origin"]
        if event["prop"] == "id":
            self._end(
                lambda row: (
                    (row["prop"], row["entity_id"], row["origin"]) == ("id", event["entity_id"], event["origin"])
                    and row["id"] != event["id"]
                )
            )
        former = before.get(identity)
        row = dict(event)
        row["canonical_id"] = event["canonical_id"] or event["entity_id"]
        if former is not None:
            row["first_seen"] = min(former["first_seen"], row["first_seen"])
            row["last_seen"] = max(former["last_seen"], row["last_seen"])
        self.live[identity] = before[identity] = row

    def _end(self, ends: Any) -> None:
        for identity in [identity for identity, row in self.live.items() if ends(row)]:
            del self.live[identity]


def _erased(row: dict[str, Any], event: dict[str, Any]) -> bool:
    return event["entity_id"] in (None, row["entity_id"]) and event["origin"] in (None, row["origin"])


SHOWN = ("entity_id", "canonical_id", "schema", "prop", "value", "lang", "original_value", "first_seen", "last_seen")


def shown(live: dict[Identity, dict[str, Any]]) -> dict[Identity, tuple[Any, ...]]:
    """Return the visible fields of each statement."""
    return {identity: tuple(row[name] for name in SHOWN) for identity, row in live.items()}


def head(api: InProcessApi, dataset: Dataset) -> Snapshot:
    with api.services.database.read() as connection:
        seq = recorded_head(connection, dataset).seq
    return snapshots.read(api.services.store, dataset, seq)


def rows_of(store: Store, dataset: Dataset, snapshot: Snapshot, table: TableName) -> list[dict[str, Any]]:
    """Return the rows of a table's files, with moments as microseconds."""
    folder = dataset.layout.statements if table == "statements" else dataset.layout.translog
    rows: list[dict[str, Any]] = []
    for file in snapshot.table(table).files:
        data = pq.read_table(pa.BufferReader(store.get(f"{folder}/{file.path}")))
        for name in ("first_seen", "last_seen", "deleted_at"):
            if name in data.column_names:
                column = data.column_names.index(name)
                data = data.set_column(column, name, data.column(name).cast("int64"))
        assert data.num_rows == file.rows
        rows += [row | file.partition for row in data.to_pylist()]
    return rows


def stored(store: Store, dataset: Dataset, snapshot: Snapshot) -> dict[Identity, dict[str, Any]]:
    """Return the live rows of a snapshot: the newest row of each identity, unless a later event deletes it."""
    newest: dict[Identity, dict[str, Any]] = {}
    for row in rows_of(store, dataset, snapshot, "statements"):
        identity = row["id"], row["origin"]
        if identity not in newest or newest[identity]["ord"] < row["ord"]:
            newest[identity] = row
    marks = [row for row in rows_of(store, dataset, snapshot, "translog") if row["kind"] != "insert"]
    deleted = set()
    for mark in marks:
        identity = mark["id"], mark["origin"]
        if identity not in newest or mark["ord"] <= newest[identity]["ord"]:
            continue
        row = newest[identity]
        if mark["kind"] == "delete":
            deleted.add(identity)
        row["first_seen"] = min(row["first_seen"], mark["first_seen"])
        row["last_seen"] = max(row["last_seen"], mark["last_seen"])
    return {identity: row for identity, row in newest.items() if identity not in deleted}
