"""Refs in SQL, which decides, and in the layout, where people and offline tools find them."""

import structlog
from sqlalchemy import Connection, delete, select

from tarn.datasets.registry import Dataset
from tarn.db.tables import refs, snapshots
from tarn.db.upsert import upsert
from tarn.errors import RefNotFound, TarnError
from tarn.lake.snapshots import find, find_state
from tarn.model.ids import now
from tarn.model.names import RefName
from tarn.model.ref import Ref
from tarn.storage.store import Store

log = structlog.get_logger(__name__)


def page(connection: Connection, dataset: Dataset, after: str | None, limit: int) -> list[Ref]:
    """Refs by name."""
    query = select(refs).where(refs.c.dataset_id == dataset.id).order_by(refs.c.name).limit(limit)
    if after is not None:
        query = query.where(refs.c.name > after)
    return [Ref.model_validate(row._mapping) for row in connection.execute(query)]


def get(connection: Connection, dataset: Dataset, name: RefName) -> Ref:
    """Raises RefNotFound."""
    row = connection.execute(select(refs).where(refs.c.dataset_id == dataset.id, refs.c.name == name)).first()
    if row is None:
        raise RefNotFound(f"{dataset.name!r} has no ref {name!r}")
    return Ref.model_validate(row._mapping)


def put(connection: Connection, dataset: Dataset, name: RefName, snapshot: str, tenant: str) -> Ref:
    """Set a ref to a snapshot that is kept. Raises SnapshotNotFound, SnapshotGone, NoSnapshots, RefNotFound.

    The snapshot's row is held: whoever gives it up at the same time waits, and finds the ref, or was first.
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
    """Raises RefNotFound."""
    get(connection, dataset, name)
    connection.execute(delete(refs).where(refs.c.dataset_id == dataset.id, refs.c.name == name))


def remove_below(connection: Connection, dataset: Dataset, seq: int) -> list[RefName]:
    """Remove the refs on snapshots below a number; their names."""
    found = connection.execute(
        delete(refs).where(refs.c.dataset_id == dataset.id, refs.c.seq < seq).returning(refs.c.name)
    ).scalars()
    return sorted(RefName(name) for name in found)


def mirror(store: Store, dataset: Dataset, name: RefName, ref: Ref | None) -> None:
    """Mirror a ref, or its absence, after the fact: whether that works changes nothing."""
    path = dataset.layout.ref(name)
    try:
        if ref is None:
            store.delete([path])
        else:
            store.put_hint(path, ref.model_dump_json().encode())
    except TarnError as error:
        log.warning("a ref is not shown in the layout", dataset=dataset.name, ref=name, problem=error.slug)
