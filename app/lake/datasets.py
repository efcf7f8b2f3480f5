"""Datasets: a row that says which there are, a `config.yml` that says what they are.

The row is the truth for existence, the document for everything else. Changes of one document are made one after
the other, by holding its row from reading the old text to writing the new one.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import ValidationError
from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError
from yaml import YAMLError

from app.db import jobs
from app.db.engine import Database
from app.db.tables import datasets, journal_head
from app.errors import AlreadyExists, DatasetNotFound, DocumentInvalid, Fault, PreconditionFailed, SchemaViolation
from app.model.dataset import DatasetConfig, DatasetMetadata, NewDataset, etag, names_tag
from app.model.ids import new_id, now
from app.model.job import Job, Operation, Progress
from app.model.names import DatasetName
from app.storage.layout import DatasetLayout
from app.storage.store import Missing, Store
from app.storage.versions import replace
from app.tenancy.audit import Act

log = structlog.get_logger(__name__)

READERS = 16
"""Documents that are read at once for a list."""

Readable = Callable[[str], bool]
"""Whether a caller may read the dataset of this name."""

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


def create(database: Database, store: Store, new: NewDataset, act: Act) -> tuple[DatasetConfig, str]:
    """Make a dataset: the row holds the name while the documents are written, and commits after them.

    A crash in between leaves documents without a row: no dataset, and the next one of that name writes over them.
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
        connection.execute(insert(journal_head).values(dataset_id=config.id, commit=0, segment=1, rows=0))
        act.done(connection, target=config.name)
        document = config.to_yaml()
        layout = DatasetLayout(config.name)
        store.put(layout.config, document)
        store.put(layout.index, _index(config))
    return config, etag(document)


def read(store: Store, dataset: Dataset) -> tuple[DatasetConfig, str]:
    """The configuration and its entity tag. Raises DatasetNotFound, DocumentInvalid."""
    try:
        document = store.get(dataset.layout.config)
    except Missing:
        # The row outlives its documents only while they are being deleted.
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}") from None
    try:
        return DatasetConfig.from_yaml(document), etag(document)
    except (ValidationError, YAMLError) as error:
        log.exception("unreadable document", path=dataset.layout.config)
        raise DocumentInvalid(f"the configuration of {dataset.name!r} in the lake cannot be read") from error


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


def change(
    database: Database, store: Store, dataset: Dataset, wanted: DatasetMetadata, if_match: str | None, act: Act
) -> tuple[DatasetConfig, str]:
    """Replace the fields that are given; the former document goes to `versions/`.

    Raises PreconditionFailed if the document is not the one `if_match` names.
    """
    with database.write() as connection:
        _hold(connection, dataset)
        current, tag = read(store, dataset)
        _require(if_match, tag)
        config = _valid(current.model_dump() | wanted.model_dump(exclude_unset=True))
        document = config.to_yaml()
        act.done(connection, changed=sorted(wanted.model_fields_set))
        layout = dataset.layout
        replace(store, layout.config, layout.versions, document, now())
        replace(store, layout.index, layout.versions, _index(config), now())
    return config, etag(document)


def begin_delete(database: Database, store: Store, dataset: Dataset, if_match: str | None, act: Act) -> Job:
    """Hide the dataset from everybody and queue the job that removes it, in one transaction."""
    assert act.identity is not None
    with database.write() as connection:
        _hold(connection, dataset)
        if if_match is not None:
            _require(if_match, read(store, dataset)[1])
        connection.execute(update(datasets).where(datasets.c.id == dataset.id).values(state=DELETING))
        act.done(connection)
        return jobs.enqueue(connection, Operation.DELETE, dataset.id, act.identity.tenant, act.request)


def delete(database: Database, store: Store, dataset: Dataset, progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Remove everything of a dataset, then free its name. Run again after a crash it goes on where it was.

    The row says `deleting` until the last file is gone, so the name cannot be taken while files of it remain.
    """
    done = 0
    batch: list[str] = []
    for entry in store.list(dataset.layout.root):
        batch.append(entry.path)
        if len(batch) == 1000:
            store.delete(batch)
            done += len(batch)
            batch = []
            progress(Progress(done=done, unit="files"))
    store.delete(batch)
    done += len(batch)
    with database.write() as connection:
        connection.execute(
            update(datasets).where(datasets.c.id == dataset.id, datasets.c.state == DELETING).values(state=DELETED)
        )
    log.info("dataset deleted", dataset=dataset.name, files=done)
    return {"files": done}


def _index(config: DatasetConfig) -> bytes:
    """`index.json`: the dataset as FtM tools load it."""
    text = config.ftm().model_dump_json(exclude_none=True, indent=2)
    return f"{text}\n".encode()


def _hold(connection: Connection, dataset: Dataset) -> None:
    held = connection.execute(
        update(datasets)
        .where(datasets.c.id == dataset.id, datasets.c.state == ACTIVE)
        .values(revision=datasets.c.revision + 1)
    )
    if held.rowcount != 1:
        raise DatasetNotFound(f"there is no dataset {dataset.name!r}")


def _require(if_match: str | None, tag: str) -> None:
    if if_match is not None and not names_tag(if_match, tag):
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
