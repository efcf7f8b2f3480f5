"""Records of exports in SQL: the snapshot each exported file was made from, and whether the file is stale.

A record is written after its file is stored, so it never refers to a file that does not exist.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, select

from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db import outbox
from tarn.db.engine import Database
from tarn.db.tables import exports, tags
from tarn.db.upsert import upsert
from tarn.journal import head as heads
from tarn.journal import overlay, segments
from tarn.journal.head import LAST_UPDATED
from tarn.model.datasets.export import ExportKind, ExportRecord
from tarn.model.datasets.snapshot import Head
from tarn.model.names import LAKEHOUSE
from tarn.model.work.event import EventKind
from tarn.storage.store import Store

SOURCES = (LAST_UPDATED, segments.LAST_MOVED)
"""Tags that an export's own tag must be newer than."""

NEVER_EXPORTED = "it was never made"


class RequestedFormat(NamedTuple):
    """The requested form of a dataset's exports: their compression, and the configuration that the index describes."""

    compression: str | None
    config: str
    """The entity tag of the configuration."""


@dataclass(frozen=True, slots=True)
class ExportState:
    """The state of a dataset at one moment that decides whether its exports are stale."""

    head: Head
    waiting: int
    """Rows in the journal that no snapshot contains yet."""
    tags: Mapping[str, datetime]
    records: Mapping[ExportKind, ExportRecord]

    def is_latest(self, key: str, sources: Iterable[str]) -> bool:
        """Return whether a tag is set and strictly newer than every one of `sources` that is set."""
        at = self.tags.get(key)
        return at is not None and all(at > self.tags[source] for source in sources if source in self.tags)

    def content_difference(self, kind: ExportKind, requested: RequestedFormat) -> str | None:
        """Return why an export differs from the head, or None if it has the head's content. Ignores tags."""
        export, name = self.records.get(kind), kind.form.named(requested.compression)
        if export is None:
            return NEVER_EXPORTED
        if export.name != name:
            return f"it was made as {export.name}, and the dataset's compression requires {name}"
        if export.content != self.head.content:
            return f"snapshot {self.head.content} changed what is visible, and it is of snapshot {export.seq}"
        return None

    def stale(self, kind: ExportKind, requested: RequestedFormat) -> str | None:
        """Return why an export is stale, or None if it is fresh."""
        difference = self.content_difference(kind, requested)
        if difference is not None:
            return difference
        if self.waiting:
            return f"{self.waiting} rows wait in the journal"
        newer = [source for source in SOURCES if not self.is_latest(kind.form.tag, [source])]
        if newer:
            return f"it is not newer than {' and '.join(newer)}"
        return self.index_stale_reason(requested) if kind is ExportKind.INDEX else None

    def index_stale_reason(self, requested: RequestedFormat) -> str | None:
        """Return why the index is out of date with the configuration or the other exports, or None if it is not."""
        index = self.records.get(ExportKind.INDEX)
        if index is None:
            return NEVER_EXPORTED
        if index.detail.get("config") != requested.config:
            return "the dataset's configuration has changed"
        checksums = index.detail.get("told", {})
        for kind, export in self.records.items():
            if kind is not ExportKind.INDEX and checksums.get(kind) != export.sha1:
                return f"{export.name} was made after it"
        return None


class ExportService:
    """Reads the records of exports and the state of a dataset that their freshness depends on."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def state(self, dataset: Dataset) -> tuple[ExportState, RequestedFormat]:
        """Return the state of a dataset and the form that its exports should have.

        Raises DatasetNotFound, DocumentInvalid.
        """
        config, tag = registry.read(self._store, dataset)
        with self._database.read() as connection:
            return state(connection, dataset), RequestedFormat(config.compression, tag)

    def records(self, dataset: Dataset) -> dict[ExportKind, ExportRecord]:
        """Return the records of a dataset's exports, in the order in which exports are made."""
        with self._database.read() as connection:
            return records_of(connection, dataset)


def state(connection: Connection, dataset: Dataset) -> ExportState:
    """Return the state of a dataset that its exports depend on. Raises DatasetNotFound."""
    present = overlay.present(connection, dataset)
    own = select(tags.c.key, tags.c.at).where(tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE)
    own_tags = {row.key: row.at for row in connection.execute(own)}
    return ExportState(present.head, present.waiting, own_tags, records_of(connection, dataset))


def records_of(connection: Connection, dataset: Dataset) -> dict[ExportKind, ExportRecord]:
    """Return the records of a dataset's exports, in the order in which exports are made."""
    rows = connection.execute(select(exports).where(exports.c.dataset_id == dataset.id)).all()
    by_kind = {row.kind: _record(row) for row in rows}
    return {kind: by_kind[kind] for kind in ExportKind if kind in by_kind}


def records_by_dataset(
    connection: Connection, requested: Sequence[Dataset]
) -> dict[str, dict[ExportKind, ExportRecord]]:
    """Return the records of the exports of many datasets, by dataset id."""
    ids = {dataset.id for dataset in requested}
    of_all: dict[str, dict[ExportKind, ExportRecord]] = {}
    for row in connection.execute(select(exports)):
        if row.dataset_id in ids:
            of_all.setdefault(row.dataset_id, {})[ExportKind(row.kind)] = _record(row)
    return {name: {kind: records[kind] for kind in ExportKind if kind in records} for name, records in of_all.items()}


def index_detail(records: Mapping[ExportKind, ExportRecord], config: str) -> dict[str, Any]:
    """Return the checksums and the configuration that an index describes, to detect later when it is out of date."""
    return {
        "told": {kind: export.sha1 for kind, export in records.items() if kind is not ExportKind.INDEX},
        "config": config,
    }


def record(connection: Connection, dataset: Dataset, export: ExportRecord) -> None:
    """Record an export and set its tag, in the caller's transaction."""
    values = {"dataset_id": dataset.id, **export._asdict()}
    row = upsert(connection, exports).values(**values)
    changed = {name: row.excluded[name] for name in values if name not in ("dataset_id", "kind")}
    connection.execute(row.on_conflict_do_update(index_elements=["dataset_id", "kind"], set_=changed))
    heads.touch(connection, dataset.id, export.kind.form.tag, export.resolved)


def record_event(connection: Connection, dataset: Dataset, export: ExportRecord) -> None:
    """Write the event of a new export to the outbox, in the transaction that records the export."""
    outbox.record(
        connection,
        dataset.id,
        EventKind.EXPORT_MADE,
        export=export.kind,
        name=export.name,
        snapshot=export.snapshot,
        size=export.size,
    )


def delete_records_below(connection: Connection, dataset: Dataset, seq: int) -> list[ExportRecord]:
    """Delete the records and tags of exports of snapshots below a number. Returns the deleted records."""
    deleted = [export for export in records_of(connection, dataset).values() if export.seq < seq]
    delete_records(connection, dataset, [export.kind for export in deleted])
    return deleted


def delete_records(connection: Connection, dataset: Dataset, kinds: Sequence[ExportKind]) -> None:
    """Delete the records and tags of exports of these kinds."""
    connection.execute(delete(exports).where(exports.c.dataset_id == dataset.id, exports.c.kind.in_(kinds)))
    keys = [kind.form.tag for kind in kinds]
    own = tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_(keys)
    connection.execute(delete(tags).where(*own))


def _record(row: Row[Any]) -> ExportRecord:
    return ExportRecord(**{name: getattr(row, name) for name in ExportRecord._fields})._replace(
        kind=ExportKind(row.kind)
    )
