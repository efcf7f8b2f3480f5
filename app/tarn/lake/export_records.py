"""What was exported of a dataset, and whether that is still what the dataset holds.

SQL says of which snapshot each file was made. A record is written after its file: it never claims more than there is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, delete, select

from tarn.datasets.registry import Dataset
from tarn.db import outbox as events
from tarn.db.tables import exports, tags
from tarn.db.upsert import upsert
from tarn.journal import head as heads
from tarn.journal import overlay, segments
from tarn.journal.head import LAST_UPDATED
from tarn.model.event import EventKind
from tarn.model.export import ExportRecord, Kind
from tarn.model.names import LAKEHOUSE
from tarn.model.snapshot import Head

SOURCES = (LAST_UPDATED, segments.LAST_MOVED)
"""Tags that an export must be newer than."""

NEVER_EXPORTED = "it was never made"


class RequestedFormat(NamedTuple):
    """How a dataset wants its exports: compressed in some way, and with what its configuration tells."""

    compression: str | None
    config: str
    """The entity tag of the configuration."""


@dataclass(frozen=True, slots=True)
class ExportState:
    """A dataset at one moment, as far as exports go."""

    head: Head
    waiting: int
    """Rows that no snapshot holds yet."""
    tags: Mapping[str, datetime]
    made: Mapping[Kind, ExportRecord]

    def is_latest(self, key: str, sources: Iterable[str]) -> bool:
        """Whether a tag is there and strictly newer than every other one that is."""
        at = self.tags.get(key)
        return at is not None and all(at > self.tags[source] for source in sources if source in self.tags)

    def has_moved(self, kind: Kind, asked: RequestedFormat) -> str | None:
        """Why an export does not say what the head does; None: it does, whatever the tags say."""
        made, name = self.made.get(kind), kind.form.named(asked.compression)
        if made is None:
            return NEVER_EXPORTED
        if made.name != name:
            return f"it was made as {made.name}, and the dataset asks for {name}"
        if made.content != self.head.content:
            return f"snapshot {self.head.content} changed what is visible, and it is of snapshot {made.seq}"
        return None

    def stale(self, kind: Kind, asked: RequestedFormat) -> str | None:
        """Why an export is not fresh; None: it is."""
        moved = self.has_moved(kind, asked)
        if moved is not None:
            return moved
        if self.waiting:
            return f"{self.waiting} rows wait in the journal"
        late = [source for source in SOURCES if not self.is_latest(kind.form.tag, [source])]
        if late:
            return f"it is not newer than {' and '.join(late)}"
        return self.behind(asked) if kind is Kind.INDEX else None

    def behind(self, asked: RequestedFormat) -> str | None:
        """What the index does not tell as it is; None: it tells everything."""
        index = self.made.get(Kind.INDEX)
        if index is None:
            return NEVER_EXPORTED
        if index.detail.get("config") != asked.config:
            return "the dataset's configuration has changed"
        told = index.detail.get("told", {})
        for kind, made in self.made.items():
            if kind is not Kind.INDEX and told.get(kind) != made.sha1:
                return f"{made.name} was made after it"
        return None


def state(connection: Connection, dataset: Dataset) -> ExportState:
    """Raises DatasetNotFound."""
    present = overlay.present(connection, dataset)
    own = select(tags.c.key, tags.c.at).where(tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE)
    found = {row.key: row.at for row in connection.execute(own)}
    return ExportState(present.head, present.waiting, found, records_of(connection, dataset))


def records_of(connection: Connection, dataset: Dataset) -> dict[Kind, ExportRecord]:
    """Every export that there is, in the order in which they are made."""
    rows = connection.execute(select(exports).where(exports.c.dataset_id == dataset.id)).all()
    found = {row.kind: _record(row) for row in rows}
    return {kind: found[kind] for kind in Kind if kind in found}


def records_by_dataset(connection: Connection, found: Sequence[Dataset]) -> dict[str, dict[Kind, ExportRecord]]:
    """Every export of many datasets, by their ids."""
    wanted = {dataset.id for dataset in found}
    of_all: dict[str, dict[Kind, ExportRecord]] = {}
    for row in connection.execute(select(exports)):
        if row.dataset_id in wanted:
            of_all.setdefault(row.dataset_id, {})[Kind(row.kind)] = _record(row)
    return {name: {kind: made[kind] for kind in Kind if kind in made} for name, made in of_all.items()}


def index_detail(made: Mapping[Kind, ExportRecord], config: str) -> dict[str, Any]:
    """What an index tells of, to be seen when it does not any more."""
    return {"told": {kind: one.sha1 for kind, one in made.items() if kind is not Kind.INDEX}, "config": config}


def record(connection: Connection, dataset: Dataset, made: ExportRecord) -> None:
    """Say what was made, and move its tag, in the caller's transaction."""
    values = {"dataset_id": dataset.id, **made._asdict()}
    row = upsert(connection, exports).values(**values)
    changed = {name: row.excluded[name] for name in values if name not in ("dataset_id", "kind")}
    connection.execute(row.on_conflict_do_update(index_elements=["dataset_id", "kind"], set_=changed))
    heads.touch(connection, dataset.id, made.kind.form.tag, made.resolved)


def record_event(connection: Connection, dataset: Dataset, made: ExportRecord) -> None:
    """Tell those who follow the dataset what was made, in the transaction that records it."""
    events.record(
        connection,
        dataset.id,
        EventKind.EXPORT_MADE,
        export=made.kind,
        name=made.name,
        snapshot=made.snapshot,
        size=made.size,
    )


def delete_records_below(connection: Connection, dataset: Dataset, seq: int) -> list[ExportRecord]:
    """Say that exports of older snapshots are gone, and their tags with them. Returns what they were."""
    gone = [made for made in records_of(connection, dataset).values() if made.seq < seq]
    delete_records(connection, dataset, [made.kind for made in gone])
    return gone


def delete_records(connection: Connection, dataset: Dataset, kinds: Sequence[Kind]) -> None:
    """Say that exports of these kinds are gone, and their tags with them."""
    connection.execute(delete(exports).where(exports.c.dataset_id == dataset.id, exports.c.kind.in_(kinds)))
    keys = [kind.form.tag for kind in kinds]
    own = tags.c.dataset_id == dataset.id, tags.c.tenant == LAKEHOUSE, tags.c.key.in_(keys)
    connection.execute(delete(tags).where(*own))


def _record(row: Row[Any]) -> ExportRecord:
    return ExportRecord(**{name: getattr(row, name) for name in ExportRecord._fields})._replace(kind=Kind(row.kind))
