"""Mappings: one document per source file, stored under the file's hash; the result of its last run is in SQL.

Changes of a dataset's mappings are serialized by locking the dataset's row, as those of its configuration are.
"""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from tarn.access.audit import AuditedAction
from tarn.datasets import registry
from tarn.datasets.config_documents import read_document, replace_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import mapping_runs
from tarn.db.upsert import upsert
from tarn.errors import MappingNotFound, PreconditionFailed
from tarn.journal import head
from tarn.model.entity_tags import etag, matches, matches_none_match
from tarn.model.ftm.mapping import MappingDocument, tag_of
from tarn.model.names import Checksum
from tarn.storage.store import ObjectMissing, Store


class Run(NamedTuple):
    """A committed run of a mapping, with its inputs and result."""

    job: str
    mapping: str
    """The entity tag that the mapping had."""
    form: dict[str, Any]
    """The options with which the file was read."""
    processed: datetime
    result: dict[str, Any]


class StoredMapping(NamedTuple):
    """A stored mapping, with its entity tag."""

    document: MappingDocument
    text: bytes

    @property
    def tag(self) -> str:
        return etag(self.text)


def hashes(store: Store, dataset: Dataset, after: str | None, limit: int) -> list[Checksum]:
    """Return the hashes of the source files that have a mapping, in order."""
    names = (name for name in store.folders(dataset.layout.mappings) if after is None or name > after)
    stored: list[Checksum] = []
    for name in names:
        if len(stored) == limit:
            break
        try:
            content_hash = Checksum(name)
        except ValueError:
            continue  # not written by Tarn
        if store.head(dataset.layout.mapping(content_hash)) is not None:
            stored.append(content_hash)
    return stored


def read(store: Store, dataset: Dataset, content_hash: Checksum) -> StoredMapping:
    """Read a mapping. Raises MappingNotFound, and DocumentInvalid if the stored document is invalid."""
    try:
        return StoredMapping(*read_document(store, dataset.layout.mapping(content_hash), MappingDocument.from_yaml))
    except ObjectMissing:
        raise MappingNotFound(f"{dataset.name!r} has no mapping for {content_hash}") from None


def put(
    database: Database,
    store: Store,
    dataset: Dataset,
    content_hash: Checksum,
    document: MappingDocument,
    if_match: str | None,
    if_none_match: str | None,
    act: AuditedAction,
) -> tuple[StoredMapping, bool]:
    """Store a mapping, and keep the former one among its versions. Return what is stored, and whether it is new.

    Raises PreconditionFailed if the stored mapping does not match the caller's conditions, DatasetNotFound.
    """
    path = dataset.layout.mapping(content_hash)
    stored = StoredMapping(document, document.to_yaml(dataset.name))
    with database.write() as connection:
        registry.lock(connection, dataset)
        former = _former(store, path)
        if if_match is not None and (former is None or not matches(if_match, former)):
            raise PreconditionFailed("the mapping has changed: read it again and retry", expected=if_match, head=former)
        if if_none_match is not None and former is not None and matches_none_match(if_none_match, former):
            raise PreconditionFailed("the mapping exists already", expected=if_none_match, head=former)
        act.done(connection, mapping=stored.tag)
        replace_document(connection, store, path, dataset.layout.mapping_versions(content_hash), stored.text)
    return stored, former is None


def last_run(connection: Connection, dataset: Dataset, content_hash: Checksum) -> Run | None:
    """Return the last run of a mapping, or None."""
    own = mapping_runs.c.dataset_id == dataset.id, mapping_runs.c.content_hash == content_hash
    row = connection.execute(select(mapping_runs).where(*own)).first()
    return None if row is None else _run(row)


def last_runs(database: Database, dataset: Dataset) -> dict[str, Run]:
    """Return the last run of every mapping, by its hash."""
    with database.read() as connection:
        rows = connection.execute(select(mapping_runs).where(mapping_runs.c.dataset_id == dataset.id))
        return {row.content_hash: _run(row) for row in rows}


def last_run_of(database: Database, dataset: Dataset, content_hash: Checksum) -> Run | None:
    """Return the last run of a mapping, or None, in a transaction of its own."""
    with database.read() as connection:
        return last_run(connection, dataset, content_hash)


def record(connection: Connection, dataset: Dataset, content_hash: Checksum, run: Run) -> None:
    """Record the run of a mapping and set its tag, in the transaction that makes its result visible."""
    row = upsert(connection, mapping_runs).values(dataset_id=dataset.id, content_hash=content_hash, **run._asdict())
    changed = {name: row.excluded[name] for name in Run._fields}
    connection.execute(row.on_conflict_do_update(index_elements=["dataset_id", "content_hash"], set_=changed))
    head.touch(connection, dataset.id, tag_of(content_hash), run.processed)


def _former(store: Store, path: str) -> str | None:
    """Return the entity tag of the stored document, valid or not, or None."""
    try:
        return etag(store.get(path))
    except ObjectMissing:
        return None


def _run(row: Row[Any]) -> Run:
    return Run(**{name: getattr(row, name) for name in Run._fields})
