"""Events of datasets and jobs, as server-sent events."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request, Response

from tarn.api.http.problems import Responses, raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.streaming.event_stream import MEDIA_TYPE, EventStream, Listener
from tarn.api.http.streaming.row_formats import preferred
from tarn.api.routes.jobs import visible
from tarn.db import jobs
from tarn.db import outbox as events
from tarn.errors import JobNotFound, NotAcceptable, RateLimited
from tarn.model.event import Event, EventKind
from tarn.model.job import Job
from tarn.model.webhook import EVENT_HEADER, SIGNATURE_HEADER, TIME_HEADER

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
    status_code=200,
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
    status_code=200,
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


def describe(document: dict[str, Any]) -> None:
    """Say in the OpenAPI document that streams are text with events in it, and what webhooks are sent."""
    answers = [
        operation["responses"]["200"]["content"][MEDIA_TYPE]
        for path in document["paths"].values()
        for operation in path.values()
        if MEDIA_TYPE in operation["responses"].get("200", {}).get("content", {})
    ]
    event = {key: value for key, value in answers[0]["schema"].items() if key not in ("type", "title")}
    for answer in answers:
        answer["schema"] = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    headers = ((EVENT_HEADER, "string"), (TIME_HEADER, "integer"), (SIGNATURE_HEADER, "string"))
    document["webhooks"] = {
        "event": {
            "post": {
                "summary": "An event, sent to a tenant's webhook",
                "description": f"`{SIGNATURE_HEADER}` is `sha256=` and the HMAC-SHA256 of `{TIME_HEADER}`, a full stop "
                f"and the body. `{EVENT_HEADER}` is the same however often it is sent.",
                "parameters": [
                    {"name": name, "in": "header", "required": True, "schema": {"type": kind}} for name, kind in headers
                ],
                "requestBody": {"required": True, "content": {"application/json": {"schema": event}}},
                "responses": {"2XX": {"description": "It has arrived. Anything else is tried again."}},
            }
        }
    }


def _has_more(house: Services, job: Job, since: int | None) -> bool:
    with house.database.read() as connection:
        return bool(events.after(connection, jobs.stream_of(job), since or 0, 1, job.id).told)
