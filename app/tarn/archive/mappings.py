"""Mappings: a document each, kept below the hash of the source file that it is for; what was last made of it is in SQL.

Mappings of a dataset are changed one after the other, as its configuration is, by holding its row.
"""

from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from tarn.access.audit import AuditedAction
from tarn.datasets import registry as datasets
from tarn.datasets.documents import read_document, replace_document
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import mapping_runs
from tarn.db.upsert import upsert
from tarn.errors import MappingNotFound, PreconditionFailed
from tarn.journal import head as heads
from tarn.model.dataset import etag, matches, matches_none_match
from tarn.model.mapping import MappingDocument, tag_of
from tarn.model.names import Checksum
from tarn.storage.store import Missing, Store


class Run(NamedTuple):
    """A run that was committed, and what it was made of."""

    job: str
    mapping: str
    """The entity tag that the mapping had."""
    form: dict[str, Any]
    """How the file was to be read."""
    processed: datetime
    result: dict[str, Any]


class StoredMapping(NamedTuple):
    """A mapping as it is kept, with its entity tag."""

    document: MappingDocument
    text: bytes

    @property
    def tag(self) -> str:
        return etag(self.text)


def hashes(store: Store, dataset: Dataset, after: str | None, limit: int) -> list[Checksum]:
    """The source files that have a mapping, in their order."""
    found = (name for name in store.folders(dataset.layout.mappings) if after is None or name > after)
    kept: list[Checksum] = []
    for name in found:
        if len(kept) == limit:
            break
        try:
            content_hash = Checksum(name)
        except ValueError:
            continue  # whatever it is, it is none of ours
        if store.head(dataset.layout.mapping(content_hash)) is not None:
            kept.append(content_hash)
    return kept


def read(store: Store, dataset: Dataset, content_hash: Checksum) -> StoredMapping:
    """Raises MappingNotFound, and DocumentInvalid for one that was edited into nothing."""
    try:
        return StoredMapping(*read_document(store, dataset.layout.mapping(content_hash), MappingDocument.from_yaml))
    except Missing:
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
    """Keep a mapping; the former one goes to its versions. What is kept, and whether it is the first.

    Raises PreconditionFailed if what is there is not what the caller says, DatasetNotFound.
    """
    path = dataset.layout.mapping(content_hash)
    kept = StoredMapping(document, document.to_yaml(dataset.name))
    with database.write() as connection:
        datasets.lock(connection, dataset)
        former = _former(store, path)
        if if_match is not None and (former is None or not matches(if_match, former)):
            raise PreconditionFailed("the mapping has changed since", expected=if_match, head=former)
        if if_none_match is not None and former is not None and matches_none_match(if_none_match, former):
            raise PreconditionFailed("there is such a mapping already", expected=if_none_match, head=former)
        act.done(connection, mapping=kept.tag)
        replace_document(connection, store, path, dataset.layout.mapping_versions(content_hash), kept.text)
    return kept, former is None


def last_run(connection: Connection, dataset: Dataset, content_hash: Checksum) -> Run | None:
    """The last run of a mapping."""
    own = mapping_runs.c.dataset_id == dataset.id, mapping_runs.c.content_hash == content_hash
    row = connection.execute(select(mapping_runs).where(*own)).first()
    return None if row is None else _run(row)


def last_runs(connection: Connection, dataset: Dataset) -> dict[str, Run]:
    """The last run of every mapping, by its hash."""
    rows = connection.execute(select(mapping_runs).where(mapping_runs.c.dataset_id == dataset.id))
    return {row.content_hash: _run(row) for row in rows}


def record(connection: Connection, dataset: Dataset, content_hash: Checksum, run: Run) -> None:
    """Say what was made of a mapping, and move its tag, in the transaction that makes it visible."""
    row = upsert(connection, mapping_runs).values(dataset_id=dataset.id, content_hash=content_hash, **run._asdict())
    changed = {name: row.excluded[name] for name in Run._fields}
    connection.execute(row.on_conflict_do_update(index_elements=["dataset_id", "content_hash"], set_=changed))
    heads.touch(connection, dataset.id, tag_of(content_hash), run.processed)


def _former(store: Store, path: str) -> str | None:
    """The entity tag of what is there, whatever it says."""
    try:
        return etag(store.get(path))
    except Missing:
        return None


def _run(row: Row[Any]) -> Run:
    return Run(**{name: getattr(row, name) for name in Run._fields})
