"""The journal: how much waits in it, and what was set aside."""

from app.api.access import CallerDep, DatasetDep
from app.api.paging import Page, PagingDep
from app.api.problems import raises
from app.api.routing import router
from app.api.services import ServicesDep
from app.errors import Backpressure
from app.journal import rejected
from app.journal.depth import depth
from app.model.journal import Depth, RejectedEvent, RejectedRetry, Retried

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
