"""Ref routes: names of snapshots. A snapshot with a ref does not expire."""

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import ServicesDep
from tarn.errors import NoSnapshots, RefNotFound, SnapshotGone, SnapshotNotFound
from tarn.model.datasets.ref import NewRef, Ref
from tarn.model.names import RefName

routes = router("/v1/datasets/{dataset}/refs", "snapshots")


class RefPage(Page[Ref]):
    """Refs, sorted by name."""


@routes.get("")
def list_refs(services: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> RefPage:
    """List the refs of a dataset."""
    refs = services.refs.page(dataset, paging.after, paging.fetch)
    results, cursor = paging.cut(refs, lambda ref: ref.name)
    return RefPage(results=results, next=cursor)


@routes.get("/{ref}", responses=raises(RefNotFound))
def get_ref(services: ServicesDep, dataset: DatasetDep, ref: RefName) -> Ref:
    """Get a ref."""
    return services.refs.get(dataset, ref)


@routes.put("/{ref}", responses=raises(NoSnapshots, RefNotFound, SnapshotGone, SnapshotNotFound))
def set_ref(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, ref: RefName, new: NewRef) -> Ref:
    """Set a ref to a snapshot, which does not expire while it has a ref."""
    return services.refs.set(dataset, ref, new.snapshot, caller.identity.tenant, caller.act)


@routes.delete("/{ref}", status_code=204, responses=raises(RefNotFound))
def delete_ref(services: ServicesDep, caller: CallerDep, dataset: DatasetDep, ref: RefName) -> None:
    """Delete a ref; its snapshot is kept as long as the retention policy keeps it."""
    services.refs.delete(dataset, ref, caller.act)
