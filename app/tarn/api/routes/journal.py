"""Journal routes: depth of the journal, and rejected events."""

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import router
from tarn.api.http.services.container import ServicesDep
from tarn.errors import Backpressure
from tarn.model.datasets.journal import Depth, RejectedEvent, RejectedRetry, Retried

routes = router("/v1/datasets/{dataset}/journal", "journal")

ANY = RejectedRetry()


class RejectedPage(Page[RejectedEvent]):
    """Rejected events, oldest first."""


@routes.get("")
def get_journal(services: ServicesDep, dataset: DatasetDep) -> Depth:
    """Get the number of rows to be flushed, by segment."""
    return services.journal.depth(dataset)


@routes.get("/rejected")
def list_rejected(services: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> RejectedPage:
    """List rejected events: those that a flush could not write, with the reason."""
    events = services.rejected_events.page(dataset, paging.after, paging.fetch)
    results, cursor = paging.cut(events, lambda event: event.id)
    return RejectedPage(results=results, next=cursor)


@routes.post("/rejected/retry", responses=raises(Backpressure))
def retry_rejected(
    services: ServicesDep, caller: CallerDep, dataset: DatasetDep, which: RejectedRetry = ANY
) -> Retried:
    """Retry rejected events as a new write to the journal: those with these ids, or the oldest thousand."""
    return services.rejected_events.retry(dataset, caller.identity.tenant, which.ids, caller.act)
