"""Dataset registry: create, read, change, restore and delete datasets.

The SQL row is authoritative for existence, `config.yml` for everything else. Changes of one document are serialized by
locking the dataset's row from reading the old text until the new text is written.

The row lock belongs to a connection, which may die while a request to the store is in progress. Therefore the
connection is checked right before each put, and every reader of a document compares the id in it with the id of the
row: a different id means a document of another dataset with the same name (docs/decisions/002).
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import orjson
import structlog
from pydantic import ValidationError
from sqlalchemy import Connection, Row, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from tarn.access.audit import AuditedAction
from tarn.access.revision import bump
from tarn.datasets.config_documents import read_document, replace_document, require_alive
from tarn.db import jobs, outbox
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import datasets, journal_head, snapshot_heads
from tarn.errors import (
    AlreadyExists,
    DatasetNotFound,
    DocumentInvalid,
    FieldError,
    PreconditionFailed,
    SchemaViolation,
    Unavailable,
)
from tarn.model.datasets.dataset import DatasetChange, DatasetConfig, NewDataset
from tarn.model.entity_tags import etag, matches
from tarn.model.ids import new_id, now, parse_stamp
from tarn.model.names import DatasetName, FileName
from tarn.model.work.event import EventKind
from tarn.model.work.job import Job, Operation, Progress, ResumeLater
from tarn.storage import versions
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import ObjectMissing, Store
from tarn.storage.store_clock import store_time

log = structlog.get_logger(__name__)

READERS = 16
"""Documents that are read concurrently for a list."""

DELETE_BATCH = 1000
"""Files that one request deletes: the maximum of S3."""

Readable = Callable[[str], bool]
"""Returns whether a caller may read the dataset of this name."""

JobHeartbeat = Callable[[Connection, Progress | None], None]
"""Renews the ownership of a job in the caller's transaction. Raises if the caller does not own the job any more."""

ACTIVE, DELETING, DELETED = "active", "deleting", "deleted"


@dataclass(frozen=True, slots=True)
class Dataset:
    """An existing dataset: its id in SQL and its name in storage."""

    id: str
    name: DatasetName

    @property
    def layout(self) -> DatasetLayout:
        return DatasetLayout(self.name)


def find(connection: Connection, name: DatasetName) -> Dataset | None:
    """Return the active dataset of this name, if there is one."""
    row = connection.execute(_active().where(datasets.c.name == name)).first()
    return None if row is None else _dataset(row)


def page(connection: Connection, readable: Readable, after: str | None, limit: int | None) -> list[Dataset]:
    """Return the datasets for which `readable` is true, by name."""
    query = _active().order_by(datasets.c.name)
    if after is not None:
        query = query.where(datasets.c.name > after)
    result: list[Dataset] = []
    for row in connection.execute(query):
        if limit is not None and len(result) == limit:
            break
        if readable(row.name):
            result.append(_dataset(row))
    return result


def readable_page(database: Database, readable: Readable, after: str | None, limit: int | None) -> list[Dataset]:
    """Return the datasets for which `readable` is true, by name, in a transaction of its own."""
    with database.read() as connection:
        return page(connection, readable, after, limit)


def create(database: Database, store: Store, new: NewDataset, act: AuditedAction) -> tuple[DatasetConfig, str]:
    """Create a dataset: the uncommitted row reserves the name while the documents are written, and commits after them.

    A crash in between leaves documents without a row: the dataset does not exist, and the next one with that name
    overwrites them. `config.yml` is put last: if it exists, the other documents exist.
    """
    config = _valid({**new.model_dump(exclude_unset=True), "id": new_id(), "created": now()})
    with database.write() as connection:
        try:
            connection.execute(
                insert(datasets).values(
                    id=config.id, name=config.name, state=ACTIVE, created=config.created, revision=0
                )
            )
        except IntegrityError:
            raise AlreadyExists(f"the dataset {new.name!r} exists, or is still being deleted") from None
        connection.execute(insert(journal_head).values(dataset_id=config.id, commit=0, segment=1, rows=0, size=0))
        connection.execute(
            insert(snapshot_heads).values(
                dataset_id=config.id, seq=_first_seq(connection, config.name), content=0, segment=0
            )
        )
        outbox.start_stream(connection, config.id, config.name)
        outbox.record(connection, config.id, EventKind.DATASET_CREATED)
        act.done(connection, target=config.name)
        document = config.to_yaml()
        layout = DatasetLayout(config.name)
        for path, text in ((layout.index, index_of(config)), (layout.config, document)):
            require_alive(connection)
            store.put(path, text)
        bump(connection)
    return config, etag(document)


def _first_seq(connection: Connection, name: DatasetName) -> int:
    """Return the number before the first snapshot: above every one that a writer of an earlier dataset of this name may
    still put, which is at most its recorded head plus one."""
    last: int | None = connection.execute(
        select(func.max(snapshot_heads.c.seq))
        .join(datasets, datasets.c.id == snapshot_heads.c.dataset_id)
        .where(datasets.c.name == name, datasets.c.state == DELETED)
    ).scalar()
    return 0 if last is None else last + 1


def read(store: Store, dataset: Dataset) -> tuple[DatasetConfig, str]:
    """Return the configuration and its entity tag. Raises DatasetNotFound, DocumentInvalid."""
    config, tag = _stored(store, dataset)
    if config.id != dataset.id:
        log.error(
            "config.yml belongs to another dataset", path=dataset.layout.config, id=config.id, expected=dataset.id
        )
        raise DocumentInvalid(f"{dataset.layout.config} in the lake belongs to another dataset that had this name")
    return config, tag


def read_all(store: Store, requested: list[Dataset]) -> Iterator[DatasetConfig]:
    """Yield the configurations of many datasets, in their order.

    Datasets deleted meanwhile are skipped, and so are unreadable documents: one broken document, which is logged and
    reported when that dataset is requested, must not make the list fail.
    """

    def config(dataset: Dataset) -> DatasetConfig | None:
        try:
            return read(store, dataset)[0]
        except (DatasetNotFound, DocumentInvalid):
            return None

    with ThreadPoolExecutor(READERS) as pool:
        yield from (config for config in pool.map(config, requested) if config is not None)


IndexBuilder = Callable[[Connection, "DatasetConfig"], bytes]
"""Returns the new `index.json` of a dataset with this configuration, in the transaction that changes it."""


def change(
    database: Database,
    store: Store,
    dataset: Dataset,
    requested: DatasetChange,
    if_match: str | None,
    act: AuditedAction,
    indexed: IndexBuilder = lambda _, config: index_of(config),
) -> tuple[DatasetConfig, str]:
    """Replace the fields that are set in the change; the former documents are kept in `versions/`.

    `config.yml` is put last: until then the change has no effect and can be retried. A `config.yml` of another dataset,
    which a delayed writer put there, is treated as an empty configuration.

    Raises PreconditionFailed if the document's entity tag does not match `if_match`.
    """
    with database.write() as connection:
        created = lock(connection, dataset)
        current, tag = _stored(store, dataset)
        _require(if_match, tag)
        if current.id != dataset.id:
            current = _valid({"name": dataset.name, "id": dataset.id, "created": created})
        config = _valid(requested.applied_to(current))
        document = config.to_yaml()
        act.done(connection, changed=sorted(requested.model_fields_set))
        layout = dataset.layout
        for path, text in ((layout.index, indexed(connection, config)), (layout.config, document)):
            replace_document(connection, store, path, layout.versions, text)
    return config, etag(document)


def restore_configuration(database: Database, store: Store, dataset: Dataset) -> bool:
    """Replace a configuration that is missing, unreadable or of another dataset with the newest former version.

    Returns False if the configuration is intact, or if there is no former version: a configuration is never guessed.
    """
    with database.write() as connection:
        lock(connection, dataset)
        if _is_own(store, dataset):
            return False
        former = next(_former(store, dataset), None)
        if former is None:
            return False
        replace_document(connection, store, dataset.layout.config, dataset.layout.versions, former.to_yaml())
    return True


def has_former_configuration(store: Store, dataset: Dataset) -> bool:
    """Return whether `versions/` has a former configuration of this dataset (same id)."""
    return next(_former(store, dataset), None) is not None


def reset_configuration(database: Database, store: Store, dataset: Dataset) -> None:
    """Replace a lost configuration with the defaults of a new dataset, with name, id and creation time of its row."""
    with database.write() as connection:
        created = lock(connection, dataset)
        config = _valid({"name": dataset.name, "id": dataset.id, "created": created})
        for path, text in ((dataset.layout.index, index_of(config)), (dataset.layout.config, config.to_yaml())):
            replace_document(connection, store, path, dataset.layout.versions, text)


def _is_own(store: Store, dataset: Dataset) -> bool:
    try:
        return _stored(store, dataset)[0].id == dataset.id
    except (DatasetNotFound, DocumentInvalid):
        return False


def _former(store: Store, dataset: Dataset) -> Iterator[DatasetConfig]:
    """Yield the former configurations of this dataset (same id), newest first."""
    name = FileName(dataset.layout.config.rsplit("/", 1)[-1])
    for version in versions.list_versions(store, dataset.layout.versions):
        if version.name == name:
            path = dataset.layout.versions.at(parse_stamp(version.timestamp), name)
            with suppress(DocumentInvalid, ObjectMissing):
                config, _ = read_document(store, path, DatasetConfig.from_yaml)
                if config.id == dataset.id:
                    yield config


def begin_delete(database: Database, store: Store, dataset: Dataset, if_match: str | None, act: AuditedAction) -> Job:
    """Hide the dataset from all callers and enqueue the job that deletes it, in one transaction."""
    with database.write() as connection:
        lock(connection, dataset)
        if if_match is not None:
            _require(if_match, read(store, dataset)[1])
        connection.execute(update(datasets).where(datasets.c.id == dataset.id).values(state=DELETING))
        bump(connection)
        act.done(connection)
        outbox.record(connection, dataset.id, EventKind.DATASET_DELETED)
        return jobs.enqueue(connection, Operation.DELETE, dataset.id, act.tenant, act.request)


def delete(
    database: Database, store: Store, dataset: Dataset, heartbeat: JobHeartbeat, free_from: datetime | None
) -> dict[str, Any]:
    """Delete every file of a dataset, then release its name. Idempotent: after a crash, a rerun continues.

    The row's state is `deleting` until the last file is deleted, so the name cannot be reused while files remain. Files
    have no id, only a path, which the next dataset of that name has too. Hence (docs/decisions/007):
    1. begin    if the name is released already, delete nothing
    2. mark     get the store's time; files modified after it are not deleted
    3. delete   list files, and before each delete request check that this worker still owns the job, and so the name
    4. repeat   from 2 until a listing is empty: a writer may have been active
    5. release  set the state in one transaction with the last check of the job, and not before `free_from`

    Raises what `heartbeat` raises, ResumeLater before `free_from`, and Unavailable if only files newer than the mark
    are left.
    """
    done = 0
    with database.write() as connection:
        heartbeat(connection, None)
        if connection.execute(select(datasets.c.state).where(datasets.c.id == dataset.id)).scalar() != DELETING:
            return {"files": done}
    has_files = True
    while has_files:
        mark, before, has_files = store_time(store), done, False
        store.sweep_unfinished(dataset.layout.root, mark)
        listing = store.list(dataset.layout.root)
        while entries := list(islice(listing, DELETE_BATCH)):
            has_files = True
            old = [entry.path for entry in entries if entry.modified <= mark]
            with database.write() as connection:
                heartbeat(connection, Progress(done=done, unit="files"))
            store.delete(old)
            done += len(old)
        if has_files and done == before:
            raise Unavailable(
                f"files below {dataset.layout.root} have a modification time after the store's current time"
            )
    if free_from is not None:
        with database.read() as connection:
            remaining = free_from - database_time(connection)
        if remaining > timedelta(0):
            raise ResumeLater(now() + remaining)
    with database.write() as connection:
        heartbeat(connection, Progress(done=done, unit="files"))
        connection.execute(update(datasets).where(datasets.c.id == dataset.id).values(state=DELETED))
        bump(connection)
    log.info("dataset deleted", dataset=dataset.name, files=done)
    return {"files": done}


def index_of(config: DatasetConfig, loading: Mapping[str, Any] | None = None, **more: Any) -> bytes:
    """Return `index.json`: the dataset as FtM tools load it, with additional fields that FtM's model does not have."""
    document = config.ftm(**more).model_dump(mode="json", exclude_none=True) | dict(loading or {})
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _stored(store: Store, dataset: Dataset) -> tuple[DatasetConfig, str]:
    """Return the parsed `config.yml`, even if it is of another dataset, and its entity tag."""
    try:
        config, text = read_document(store, dataset.layout.config, DatasetConfig.from_yaml)
    except ObjectMissing:
        # The row outlives its documents only while they are being deleted.
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}") from None
    return config, etag(text)


def lock(connection: Connection, dataset: Dataset) -> datetime:
    """Lock the dataset's row until this transaction ends, and return its creation time. Raises DatasetNotFound."""
    row = connection.execute(
        update(datasets)
        .where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
        .values(revision=datasets.c.revision + 1)
        .returning(datasets.c.created)
    ).first()
    if row is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    created: datetime = row.created
    return created


def lock_active(connection: Connection, dataset: Dataset) -> None:
    """Take a shared lock that prevents a deletion until this transaction ends. Raises DatasetNotFound if the dataset is
    being deleted."""
    active = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    if connection.execute(active.with_for_update(read=True)).first() is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")


def _require(if_match: str | None, tag: str) -> None:
    if if_match is not None and not matches(if_match, tag):
        raise PreconditionFailed(
            "the document has changed: its entity tag does not match If-Match", expected=if_match, head=tag
        )


def _valid(data: dict[str, Any]) -> DatasetConfig:
    try:
        return DatasetConfig.model_validate(data)
    except ValidationError as error:
        faults = [
            FieldError(
                field=".".join(map(str, fault["loc"])) or None, reason=fault["msg"].removeprefix("Value error, ")
            )
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise SchemaViolation("the dataset's metadata is not valid", errors=faults) from None


def _active() -> Any:
    return select(datasets).where(datasets.c.state == ACTIVE)


def _dataset(row: Row[Any]) -> Dataset:
    return Dataset(id=row.id, name=DatasetName(row.name))
