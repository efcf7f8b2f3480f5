"""What a dataset should hold after events, worked out one event at a time; and what its store does hold."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tarn.datasets.registry import Dataset
from tarn.lake import snapshots
from tarn.model.snapshot import Snapshot, TableName
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi

Identity = tuple[bytes, str]

# No name of a setting: an unknown one of those refuses every start.
HISTORIES = range(int(os.environ.get("HISTORIES", "8")))
"""Random histories that are played; more of them by `make faults`."""


@dataclass
class Expected:
    """Events as they happen, batch by batch: first and last seen are over all since a statement last came to be."""

    live: dict[Identity, dict[str, Any]] = field(default_factory=dict)

    def commit(self, events: Iterable[dict[str, Any]]) -> None:
        """Apply a batch. A statement that a batch ends and says again was never gone for anybody."""
        before = dict(self.live)
        for event in events:
            if event["kind"] == 1:
                self._add(event, before)
            elif event["kind"] == 2:
                self.live.pop((event["id"], event["origin"]), None)
            else:
                self._end(lambda row, event=event: _erased(row, event))

    def _add(self, event: dict[str, Any], before: dict[Identity, dict[str, Any]]) -> None:
        place = event["id"], event["origin"]
        if event["prop"] == "id":
            self._end(
                lambda row: (
                    (row["prop"], row["entity_id"], row["origin"]) == ("id", event["entity_id"], event["origin"])
                    and row["id"] != event["id"]
                )
            )
        former = before.get(place)
        row = dict(event)
        row["canonical_id"] = event["canonical_id"] or event["entity_id"]
        if former is not None:
            row["first_seen"] = min(former["first_seen"], row["first_seen"])
            row["last_seen"] = max(former["last_seen"], row["last_seen"])
        self.live[place] = before[place] = row

    def _end(self, ends: Any) -> None:
        for place in [place for place, row in self.live.items() if ends(row)]:
            del self.live[place]


def _erased(row: dict[str, Any], event: dict[str, Any]) -> bool:
    return event["entity_id"] in (None, row["entity_id"]) and event["origin"] in (None, row["origin"])


SHOWN = ("entity_id", "canonical_id", "schema", "prop", "value", "lang", "original_value", "first_seen", "last_seen")


def shown(live: dict[Identity, dict[str, Any]]) -> dict[Identity, tuple[Any, ...]]:
    """What a reader sees of each statement."""
    return {place: tuple(row[name] for name in SHOWN) for place, row in live.items()}


def head(house: InProcessApi, dataset: Dataset) -> Snapshot:
    with house.services.database.read() as connection:
        seq = snapshots.recorded(connection, dataset).seq
    return snapshots.read(house.services.store, dataset, seq)


def rows_of(store: Store, dataset: Dataset, snapshot: Snapshot, table: TableName) -> list[dict[str, Any]]:
    """The rows of a table's files, moments as microseconds."""
    folder = dataset.layout.statements if table == "statements" else dataset.layout.translog
    found: list[dict[str, Any]] = []
    for file in snapshot.table(table).files:
        data = pq.read_table(pa.BufferReader(store.get(f"{folder}/{file.path}")))
        for name in ("first_seen", "last_seen", "deleted_at"):
            if name in data.column_names:
                place = data.column_names.index(name)
                data = data.set_column(place, name, data.column(name).cast("int64"))
        assert data.num_rows == file.rows
        found += [row | file.partition for row in data.to_pylist()]
    return found


def stored(store: Store, dataset: Dataset, snapshot: Snapshot) -> dict[Identity, dict[str, Any]]:
    """What is live in a snapshot: the newest row of an identity, unless something later deletes it."""
    newest: dict[Identity, dict[str, Any]] = {}
    for row in rows_of(store, dataset, snapshot, "statements"):
        place = row["id"], row["origin"]
        if place not in newest or newest[place]["ord"] < row["ord"]:
            newest[place] = row
    marks = [row for row in rows_of(store, dataset, snapshot, "translog") if row["kind"] != "insert"]
    gone = set()
    for mark in marks:
        place = mark["id"], mark["origin"]
        if place not in newest or mark["ord"] <= newest[place]["ord"]:
            continue
        row = newest[place]
        if mark["kind"] == "delete":
            gone.add(place)
        row["first_seen"] = min(row["first_seen"], mark["first_seen"])
        row["last_seen"] = max(row["last_seen"], mark["last_seen"])
    return {place: row for place, row in newest.items() if place not in gone}
