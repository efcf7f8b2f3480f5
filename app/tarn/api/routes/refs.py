"""Refs: names for snapshots, which keep them."""

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import ServicesDep
from tarn.errors import NoSnapshots, RefNotFound, SnapshotGone, SnapshotNotFound
from tarn.lake import refs
from tarn.model.names import RefName
from tarn.model.ref import NewRef, Ref

routes = router("/v1/datasets/{dataset}/refs", "snapshots")


class RefPage(Page[Ref]):
    """Refs by name."""


@routes.get("")
def list_refs(house: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> RefPage:
    """List the refs of a dataset."""
    with house.database.read() as connection:
        found = refs.page(connection, dataset, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda ref: ref.name)
    return RefPage(results=results, next=cursor)


@routes.get("/{ref}", responses=raises(RefNotFound))
def get_ref(house: ServicesDep, dataset: DatasetDep, ref: RefName) -> Ref:
    """Show a ref."""
    with house.database.read() as connection:
        return refs.get(connection, dataset, ref)


@routes.put("/{ref}", responses=raises(NoSnapshots, RefNotFound, SnapshotGone, SnapshotNotFound))
def set_ref(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, ref: RefName, new: NewRef) -> Ref:
    """Make a name stand for a snapshot, which is kept as long as it does."""
    with house.database.write() as connection:
        made = refs.put(connection, dataset, ref, new.snapshot, caller.identity.tenant)
        caller.act.done(connection, snapshot=made.snapshot)
    refs.mirror(house.store, dataset, ref, made)
    return made


@routes.delete("/{ref}", status_code=204, responses=raises(RefNotFound))
def delete_ref(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, ref: RefName) -> None:
    """Take a name away; the snapshot stays as long as retention keeps it."""
    with house.database.write() as connection:
        refs.remove(connection, dataset, ref)
        caller.act.done(connection)
    refs.mirror(house.store, dataset, ref, None)
