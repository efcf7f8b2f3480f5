"""Refs: named snapshots. SQL is authoritative; the layout mirrors them for people and offline tools."""

import structlog
from sqlalchemy import Connection, delete, select

from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import refs, snapshots
from tarn.db.upsert import upsert
from tarn.errors import RefNotFound, TarnError
from tarn.lake.snapshots import find, find_state
from tarn.model.datasets.ref import Ref
from tarn.model.ids import now
from tarn.model.names import RefName, TenantName
from tarn.storage.store import Store

log = structlog.get_logger(__name__)


class RefService:
    """Reads and changes refs. Each change and its audit record are one transaction; the mirror follows it."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def page(self, dataset: Dataset, after: str | None, limit: int) -> list[Ref]:
        """Return the refs of a dataset, sorted by name."""
        query = select(refs).where(refs.c.dataset_id == dataset.id).order_by(refs.c.name).limit(limit)
        if after is not None:
            query = query.where(refs.c.name > after)
        with self._database.read() as connection:
            return [Ref.model_validate(row._mapping) for row in connection.execute(query)]

    def get(self, dataset: Dataset, name: RefName) -> Ref:
        """Return a ref. Raises RefNotFound."""
        with self._database.read() as connection:
            return get(connection, dataset, name)

    def set(self, dataset: Dataset, name: RefName, snapshot: str, tenant: TenantName, act: AuditedAction) -> Ref:
        """Set a ref to a kept snapshot. Raises SnapshotNotFound, SnapshotGone, NoSnapshots, RefNotFound."""
        with self._database.write() as connection:
            ref = put(connection, dataset, name, snapshot, tenant)
            act.done(connection, snapshot=ref.snapshot)
        mirror(self._store, dataset, name, ref)
        return ref

    def delete(self, dataset: Dataset, name: RefName, act: AuditedAction) -> None:
        """Delete a ref. Raises RefNotFound."""
        with self._database.write() as connection:
            remove(connection, dataset, name)
            act.done(connection)
        mirror(self._store, dataset, name, None)


def get(connection: Connection, dataset: Dataset, name: RefName) -> Ref:
    """Return a ref. Raises RefNotFound."""
    row = connection.execute(select(refs).where(refs.c.dataset_id == dataset.id, refs.c.name == name)).first()
    if row is None:
        raise RefNotFound(f"{dataset.name!r} has no ref {name!r}")
    return Ref.model_validate(row._mapping)


def put(connection: Connection, dataset: Dataset, name: RefName, snapshot: str, tenant: str) -> Ref:
    """Set a ref to a kept snapshot. Raises SnapshotNotFound, SnapshotGone, NoSnapshots, RefNotFound.

    The snapshot's row is locked: a vacuum that expires it at the same time waits and finds the ref, or came first.
    """
    named = find_state(connection, dataset, snapshot)
    connection.execute(
        select(snapshots.c.seq)
        .where(snapshots.c.dataset_id == dataset.id, snapshots.c.seq == named.seq)
        .with_for_update()
    )
    find(connection, dataset, named.id)
    values = {"seq": named.seq, "snapshot": named.id, "tenant": tenant, "updated": now()}
    connection.execute(
        upsert(connection, refs)
        .values(dataset_id=dataset.id, name=name, **values)
        .on_conflict_do_update(index_elements=["dataset_id", "name"], set_=values)
    )
    return get(connection, dataset, name)


def remove(connection: Connection, dataset: Dataset, name: RefName) -> None:
    """Remove a ref. Raises RefNotFound."""
    get(connection, dataset, name)
    connection.execute(delete(refs).where(refs.c.dataset_id == dataset.id, refs.c.name == name))


def remove_below(connection: Connection, dataset: Dataset, seq: int) -> list[RefName]:
    """Remove the refs to snapshots below a number, and return their names."""
    names = connection.execute(
        delete(refs).where(refs.c.dataset_id == dataset.id, refs.c.seq < seq).returning(refs.c.name)
    ).scalars()
    return sorted(RefName(name) for name in names)


def mirror(store: Store, dataset: Dataset, name: RefName, ref: Ref | None) -> None:
    """Mirror a ref or its removal in the layout, after the commit. A failure is only logged."""
    path = dataset.layout.ref(name)
    try:
        if ref is None:
            store.delete([path])
        else:
            store.put_hint(path, ref.model_dump_json().encode())
    except TarnError as error:
        log.warning("cannot write the mirror of a ref", dataset=dataset.name, ref=name, problem=error.slug)
