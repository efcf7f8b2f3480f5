"""The journal: how much waits in it, and what was set aside."""

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import ServicesDep
from tarn.errors import Backpressure
from tarn.journal import rejected
from tarn.journal.depth import depth
from tarn.model.journal import Depth, RejectedEvent, RejectedRetry, Retried

routes = router("/v1/datasets/{dataset}/journal", "journal")

ANY = RejectedRetry()


class RejectedPage(Page[RejectedEvent]):
    """Events that were set aside, oldest first."""


@routes.get("")
def get_journal(house: ServicesDep, dataset: DatasetDep) -> Depth:
    """Show how much waits to be flushed, by segment."""
    with house.database.read() as connection:
        return depth(connection, dataset)


@routes.get("/rejected")
def list_rejected(house: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> RejectedPage:
    """List events that a flush could not write, with the reason."""
    with house.database.read() as connection:
        found = rejected.page(connection, dataset, paging.after, paging.fetch)
    results, cursor = paging.cut(found, lambda event: event.id)
    return RejectedPage(results=results, next=cursor)


@routes.post("/rejected/retry", responses=raises(Backpressure))
def retry_rejected(house: ServicesDep, caller: CallerDep, dataset: DatasetDep, which: RejectedRetry = ANY) -> Retried:
    """Put events back into the journal as a new write: these, or the oldest thousand."""
    with house.database.write() as connection:
        retried = rejected.retry(connection, house.settings, dataset, caller.identity.tenant, which.ids)
        caller.act.done(connection, rows=retried.retried)
    return retried
