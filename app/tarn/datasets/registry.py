"""Datasets: a row that says which there are, a `config.yml` that says what they are.

The row is the truth for existence, the document for everything else. Changes of one document are made one after
the other, by holding its row from reading the old text to writing the new one.

The row is held by a connection, which may die while a request to the store is under way. So the connection is asked
right before each put, and whoever reads a document looks whether it is of the dataset that the row speaks of: the id
in it says so (docs/decisions/002).
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import orjson
import structlog
from pydantic import ValidationError
from sqlalchemy import Connection, Row, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from tarn.access.audit import AuditedAction
from tarn.access.revision import bump
from tarn.datasets.documents import read_document, replace_document, require_alive
from tarn.db import jobs
from tarn.db import outbox as events
from tarn.db.engine import Database
from tarn.db.tables import datasets, journal_head, snapshot_heads
from tarn.errors import (
    AlreadyExists,
    DatasetNotFound,
    DocumentInvalid,
    Fault,
    PreconditionFailed,
    SchemaViolation,
    Unavailable,
)
from tarn.model.dataset import DatasetChange, DatasetConfig, NewDataset, etag, matches
from tarn.model.event import EventKind
from tarn.model.ids import new_id, now, parse_stamp
from tarn.model.job import Job, Operation, Progress, ResumeLater
from tarn.model.names import DatasetName, FileName
from tarn.storage import versions
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Missing, Store
from tarn.storage.store_clock import store_time

log = structlog.get_logger(__name__)

READERS = 16
"""Documents that are read at once for a list."""

DELETE_BATCH = 1000
"""Files that one request deletes, as many as S3 takes."""

Readable = Callable[[str], bool]
"""Whether a caller may read the dataset of this name."""

Hold = Callable[[Connection, Progress | None], None]
"""Says in the caller's transaction that a job goes on. Raises if it is no longer the caller's to go on with."""

ACTIVE, DELETING, DELETED = "active", "deleting", "deleted"


@dataclass(frozen=True, slots=True)
class Dataset:
    """One that exists: what names it in SQL and on storage."""

    id: str
    name: DatasetName

    @property
    def layout(self) -> DatasetLayout:
        return DatasetLayout(self.name)


def find(connection: Connection, name: DatasetName) -> Dataset | None:
    row = connection.execute(_active().where(datasets.c.name == name)).first()
    return None if row is None else _dataset(row)


def page(connection: Connection, readable: Readable, after: str | None, limit: int | None) -> list[Dataset]:
    """Datasets by name, those that `readable` lets through."""
    query = _active().order_by(datasets.c.name)
    if after is not None:
        query = query.where(datasets.c.name > after)
    found: list[Dataset] = []
    for row in connection.execute(query):
        if limit is not None and len(found) == limit:
            break
        if readable(row.name):
            found.append(_dataset(row))
    return found


def create(database: Database, store: Store, new: NewDataset, act: AuditedAction) -> tuple[DatasetConfig, str]:
    """Make a dataset: the row holds the name while the documents are written, and commits after them.

    A crash in between leaves documents without a row: no dataset, and the next one of that name writes over them.
    `config.yml` is put last: where it is, the rest is.
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
        events.start_stream(connection, config.id, config.name)
        events.record(connection, config.id, EventKind.DATASET_CREATED)
        act.done(connection, target=config.name)
        document = config.to_yaml()
        layout = DatasetLayout(config.name)
        for path, text in ((layout.index, index_of(config)), (layout.config, document)):
            require_alive(connection)
            store.put(path, text)
        bump(connection)
    return config, etag(document)


def _first_seq(connection: Connection, name: DatasetName) -> int:
    """Where the numbers of snapshots begin: above every one that a writer of an earlier dataset of this name may still
    put, which is at most the one after its recorded head."""
    last: int | None = connection.execute(
        select(func.max(snapshot_heads.c.seq))
        .join(datasets, datasets.c.id == snapshot_heads.c.dataset_id)
        .where(datasets.c.name == name, datasets.c.state == DELETED)
    ).scalar()
    return 0 if last is None else last + 1


def read(store: Store, dataset: Dataset) -> tuple[DatasetConfig, str]:
    """The configuration and its entity tag. Raises DatasetNotFound, DocumentInvalid."""
    config, tag = _stored(store, dataset)
    if config.id != dataset.id:
        log.error("document of another dataset", path=dataset.layout.config, id=config.id, expected=dataset.id)
        raise DocumentInvalid(f"{dataset.layout.config} in the lake is of another dataset that had this name")
    return config, tag


def read_all(store: Store, found: list[Dataset]) -> Iterator[DatasetConfig]:
    """The configurations of many datasets, in their order.

    Those deleted meanwhile are left out, and so are those that cannot be read: one broken document, which is in the
    log and answers for itself, must not take the whole list away.
    """

    def config(dataset: Dataset) -> DatasetConfig | None:
        try:
            return read(store, dataset)[0]
        except (DatasetNotFound, DocumentInvalid):
            return None

    with ThreadPoolExecutor(READERS) as pool:
        yield from (config for config in pool.map(config, found) if config is not None)


Indexed = Callable[[Connection, "DatasetConfig"], bytes]
"""What `index.json` is to say of a dataset with a configuration, in the transaction that changes it."""


def change(
    database: Database,
    store: Store,
    dataset: Dataset,
    wanted: DatasetChange,
    if_match: str | None,
    act: AuditedAction,
    indexed: Indexed = lambda _, config: index_of(config),
) -> tuple[DatasetConfig, str]:
    """Replace the fields that are given; the former documents go to `versions/`.

    `config.yml` is put last: until then nothing has changed that counts, and the same change can be tried again. One
    that is of another dataset, which a forgotten writer put there, is taken for one that says nothing.

    Raises PreconditionFailed if the document is not the one `if_match` names.
    """
    with database.write() as connection:
        created = lock(connection, dataset)
        current, tag = _stored(store, dataset)
        _require(if_match, tag)
        if current.id != dataset.id:
            current = _valid({"name": dataset.name, "id": dataset.id, "created": created})
        config = _valid(wanted.applied_to(current))
        document = config.to_yaml()
        act.done(connection, changed=sorted(wanted.model_fields_set))
        layout = dataset.layout
        for path, text in ((layout.index, indexed(connection, config)), (layout.config, document)):
            replace_document(connection, store, path, layout.versions, text)
    return config, etag(document)


def restore_configuration(database: Database, store: Store, dataset: Dataset) -> bool:
    """Put the newest former configuration in the place of one that is lost, cannot be read or is another dataset's.

    False if there is no need for it, or nothing to be put there: what a dataset is, is not guessed.
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
    """Whether a former configuration of this very dataset is there."""
    return next(_former(store, dataset), None) is not None


def reset_configuration(database: Database, store: Store, dataset: Dataset) -> None:
    """Put the configuration of a new dataset in the place of one that is lost, with all that the row still knows."""
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
    """Former configurations of this very dataset, newest first."""
    name = FileName(dataset.layout.config.rsplit("/", 1)[-1])
    for version in versions.list_versions(store, dataset.layout.versions):
        if version.name == name:
            path = dataset.layout.versions.at(parse_stamp(version.timestamp), name)
            with suppress(DocumentInvalid, Missing):
                config, _ = read_document(store, path, DatasetConfig.from_yaml)
                if config.id == dataset.id:
                    yield config


def begin_delete(database: Database, store: Store, dataset: Dataset, if_match: str | None, act: AuditedAction) -> Job:
    """Hide the dataset from everybody and queue the job that removes it, in one transaction."""
    assert act.identity is not None
    with database.write() as connection:
        lock(connection, dataset)
        if if_match is not None:
            _require(if_match, read(store, dataset)[1])
        connection.execute(update(datasets).where(datasets.c.id == dataset.id).values(state=DELETING))
        bump(connection)
        act.done(connection)
        events.record(connection, dataset.id, EventKind.DATASET_DELETED)
        return jobs.enqueue(connection, Operation.DELETE, dataset.id, act.identity.tenant, act.request)


def delete(
    database: Database, store: Store, dataset: Dataset, hold: Hold, free_from: datetime | None
) -> dict[str, Any]:
    """Remove every file of a dataset, then free its name. Run again after a crash it goes on where it was.

    The row says `deleting` until the last file is gone, so the name cannot be taken while files of it remain. Files
    have no id, only a path, which the next dataset of that name will have too. Hence (docs/decisions/007):
    1. begin   a name that is free already is not ours to delete
    2. mark    ask the store what time it is; what is younger than this is left alone
    3. remove  list, and before each request that deletes make sure that the job, and with it the name, is still ours
    4. again   from 2, until a listing is empty: somebody may have been writing
    5. free    in one transaction with the last look at the job, and not before `free_from`

    Raises what `hold` raises, NotYet before `free_from`, and Unavailable if nothing is left but what is too young.
    """
    done = 0
    with database.write() as connection:
        hold(connection, None)
        if connection.execute(select(datasets.c.state).where(datasets.c.id == dataset.id)).scalar() != DELETING:
            return {"files": done}
    found = True
    while found:
        mark, before, found = store_time(store), done, False
        store.sweep_unfinished(dataset.layout.root, mark)
        listing = store.list(dataset.layout.root)
        while entries := list(islice(listing, DELETE_BATCH)):
            found = True
            old = [entry.path for entry in entries if entry.modified <= mark]
            with database.write() as connection:
                hold(connection, Progress(done=done, unit="files"))
            store.delete(old)
            done += len(old)
        if found and done == before:
            raise Unavailable(f"files below {dataset.layout.root} are younger than the store's own clock says it is")
    if free_from is not None and now() < free_from:
        raise ResumeLater(free_from)
    with database.write() as connection:
        hold(connection, Progress(done=done, unit="files"))
        connection.execute(update(datasets).where(datasets.c.id == dataset.id).values(state=DELETED))
        bump(connection)
    log.info("dataset deleted", dataset=dataset.name, files=done)
    return {"files": done}


def index_of(config: DatasetConfig, loading: Mapping[str, Any] | None = None, **more: Any) -> bytes:
    """`index.json`: the dataset as FtM tools load it, with fields that FtM's own model does not have."""
    document = config.ftm(**more).model_dump(mode="json", exclude_none=True) | dict(loading or {})
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _stored(store: Store, dataset: Dataset) -> tuple[DatasetConfig, str]:
    """What `config.yml` says, whichever dataset it is of, and its entity tag."""
    try:
        config, text = read_document(store, dataset.layout.config, DatasetConfig.from_yaml)
    except Missing:
        # The row outlives its documents only while they are being deleted.
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}") from None
    return config, etag(text)


def lock(connection: Connection, dataset: Dataset) -> datetime:
    """Let nobody else change the dataset before this transaction ends; returns when it was created."""
    held = connection.execute(
        update(datasets)
        .where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
        .values(revision=datasets.c.revision + 1)
        .returning(datasets.c.created)
    ).first()
    if held is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")
    created: datetime = held.created
    return created


def lock_active(connection: Connection, dataset: Dataset) -> None:
    """Raise DatasetNotFound for a dataset that is being deleted; one that is not will not be before this transaction
    ends."""
    found = select(datasets.c.id).where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
    if connection.execute(found.with_for_update(read=True)).first() is None:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")


def _require(if_match: str | None, tag: str) -> None:
    if if_match is not None and not matches(if_match, tag):
        raise PreconditionFailed("the document has changed since", expected=if_match, head=tag)


def _valid(data: dict[str, Any]) -> DatasetConfig:
    try:
        return DatasetConfig.model_validate(data)
    except ValidationError as error:
        faults = [
            Fault(field=".".join(map(str, fault["loc"])) or None, reason=fault["msg"].removeprefix("Value error, "))
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise SchemaViolation("the dataset's metadata is not valid", errors=faults) from None


def _active() -> Any:
    return select(datasets).where(datasets.c.state == ACTIVE)


def _dataset(row: Row[Any]) -> Dataset:
    return Dataset(id=row.id, name=DatasetName(row.name))
