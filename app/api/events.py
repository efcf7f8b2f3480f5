"""Events of datasets and jobs, as server-sent events."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Header, Query, Request, Response

from app.api.access import CallerDep, DatasetDep
from app.api.event_stream import MEDIA_TYPE, EventStream, Listener
from app.api.jobs import visible
from app.api.problems import Responses, raises
from app.api.routing import IdParam, router
from app.api.rows import preferred
from app.api.services import Services, ServicesDep
from app.db import events, jobs
from app.errors import JobNotFound, NotAcceptable, RateLimited
from app.model.event import Event, EventKind
from app.model.job import Job

routes = router("/v1/datasets/{dataset}", "events")
job_routes = router("/v1/jobs", "events")

LARGEST = 2**63 - 1

SinceParam = Annotated[
    int | None,
    Query(ge=0, le=LARGEST, description="Tell what came after this event, 0 for all that is kept, and then go on."),
]
LastEventIdParam = Annotated[
    int | None,
    Header(
        alias="Last-Event-ID",
        ge=0,
        le=LARGEST,
        description="The last event that was heard, as browsers send it when they come again; counts before `since`.",
    ),
]
KindParam = Annotated[Sequence[EventKind], Query(description="Only these kinds, and `missed`.", max_length=100)]

STREAM: Responses = {
    200: {
        "model": Event,
        "description": "Events as they happen: `id`, `event` (the kind) and `data` (this JSON, on one line) of each; "
        "comments in between while nothing happens. It ends now and then, and is to be asked for again.",
    }
}
OVER: Responses = {204: {"description": "The job is over and nothing is left to tell: do not come again."}}


async def _form(request: Request) -> str:
    return preferred(request.headers.get("accept"), (MEDIA_TYPE,))


async def _since(since: SinceParam = None, last_event_id: LastEventIdParam = None) -> int | None:
    return since if last_event_id is None else last_event_id


SinceDep = Annotated[int | None, Depends(_since)]


@routes.get(
    "/events",
    response_class=EventStream,
    dependencies=[Depends(_form)],
    responses={**STREAM, **raises(NotAcceptable, RateLimited)},
)
async def follow_dataset(
    request: Request, house: ServicesDep, caller: CallerDep, dataset: DatasetDep, since: SinceDep, kind: KindParam = ()
) -> Response:
    """Follow a dataset: snapshots, exports, files, queue items, and the caller's jobs, from now on or since an event.

    What is not kept any more is told by a `missed` event.
    """
    authorization = request.headers.get("authorization")
    listener = Listener(house, authorization, dataset.id, dataset, kinds=frozenset(kind))
    return EventStream(listener, caller.identity.tenant, since)


@job_routes.get(
    "/{job}/events",
    response_class=EventStream,
    dependencies=[Depends(_form)],
    responses={**STREAM, **OVER, **raises(JobNotFound, NotAcceptable, RateLimited)},
)
async def follow_job(
    request: Request, house: ServicesDep, caller: CallerDep, job: IdParam, since: SinceDep
) -> Response:
    """Follow a job, from its beginning or since an event, until it is over."""
    found = await house.hub.run(lambda: visible(house, caller, job))
    if found.state.over and not await house.hub.run(lambda: _has_more(house, found, since)):
        return Response(status_code=204)
    stream = jobs.stream_of(found)
    listener = Listener(house, request.headers.get("authorization"), stream, None, job=found.id)
    return EventStream(listener, caller.identity.tenant, since)


def _has_more(house: Services, job: Job, since: int | None) -> bool:
    with house.database.read() as connection:
        return bool(events.after(connection, jobs.stream_of(job), since or 0, 1, job.id).told)
