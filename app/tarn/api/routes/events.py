"""Event routes: server-sent events of datasets and jobs."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request, Response

from tarn.api.http.problems import Responses, raises
from tarn.api.http.route_access import CallerDep, DatasetDep
from tarn.api.http.routing import IdParam, router
from tarn.api.http.services.container import ServicesDep
from tarn.api.http.streaming.event_stream import MEDIA_TYPE, EventStream, Listener
from tarn.api.http.streaming.row_formats import preferred
from tarn.errors import JobNotFound, NotAcceptable, RateLimited
from tarn.model.work.event import Event, EventKind
from tarn.model.work.webhook import EVENT_HEADER, SIGNATURE_HEADER, TIME_HEADER

routes = router("/v1/datasets/{dataset}", "events")
job_routes = router("/v1/jobs", "events")

LARGEST = 2**63 - 1

SinceParam = Annotated[
    int | None,
    Query(
        ge=0,
        le=LARGEST,
        description="Begin after this event; 0: all stored events. Default: only new events; of a job, all.",
    ),
]
LastEventIdParam = Annotated[
    int | None,
    Header(
        alias="Last-Event-ID",
        ge=0,
        le=LARGEST,
        description="The id of the last event received, as browsers send it on reconnecting; overrides `since`.",
    ),
]
KindParam = Annotated[
    Sequence[EventKind], Query(description="Send only events of these kinds, and `missed`.", max_length=100)
]

STREAM: Responses = {
    200: {
        "model": Event,
        "description": "Events as they happen, each with `id`, `event` (the kind) and `data` (this JSON on one line). "
        "While there are none, comments are sent. The server ends the stream from time to time: reconnect then.",
    }
}
OVER: Responses = {204: {"description": "The job has ended and there are no more events: do not reconnect."}}


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
    request: Request,
    services: ServicesDep,
    caller: CallerDep,
    dataset: DatasetDep,
    since: SinceDep,
    kind: KindParam = (),
) -> Response:
    """Stream a dataset's events: snapshots, exports, files, queue items and the caller's jobs.

    A `missed` event is sent in place of events that are no longer stored.
    """
    authorization = request.headers.get("authorization")
    listener = Listener(services, authorization, dataset.id, dataset, kinds=frozenset(kind))
    return EventStream(listener, caller.identity.tenant, since)


@job_routes.get(
    "/{job}/events",
    status_code=200,
    response_class=EventStream,
    dependencies=[Depends(_form)],
    responses={**STREAM, **OVER, **raises(JobNotFound, NotAcceptable, RateLimited)},
)
async def follow_job(
    request: Request, services: ServicesDep, caller: CallerDep, job: IdParam, since: SinceDep
) -> Response:
    """Stream a job's events until it has ended, from its beginning or after an event."""
    followed = await services.hub.run(lambda: services.jobs.get_visible(job, caller.identity))
    stream, above = followed.event_stream, since or 0
    if followed.state.over and not await services.hub.run(lambda: services.events.has_more(stream, above, followed.id)):
        return Response(status_code=204)
    listener = Listener(services, request.headers.get("authorization"), stream, None, job=followed.id)
    return EventStream(listener, caller.identity.tenant, since)


def describe(document: dict[str, Any]) -> None:
    """Describe event streams and webhooks in the OpenAPI document."""
    responses = [
        operation["responses"]["200"]["content"][MEDIA_TYPE]
        for path in document["paths"].values()
        for operation in path.values()
        if MEDIA_TYPE in operation["responses"].get("200", {}).get("content", {})
    ]
    event = {key: value for key, value in responses[0]["schema"].items() if key not in ("type", "title")}
    for response in responses:
        response["schema"] = {"type": "string", "contentMediaType": "application/json", "contentSchema": event}
    headers = ((EVENT_HEADER, "string"), (TIME_HEADER, "integer"), (SIGNATURE_HEADER, "string"))
    document["webhooks"] = {
        "event": {
            "post": {
                "summary": "Send an event to a tenant's webhook",
                "description": f"`{SIGNATURE_HEADER}` is `sha256=` and the HMAC-SHA256 of `{TIME_HEADER}`, a full stop "
                f"and the body. `{EVENT_HEADER}` is the same in every attempt to deliver an event.",
                "parameters": [
                    {"name": name, "in": "header", "required": True, "schema": {"type": kind}} for name, kind in headers
                ],
                "requestBody": {"required": True, "content": {"application/json": {"schema": event}}},
                "responses": {"2XX": {"description": "Delivered. After any other status, delivery is retried."}},
            }
        }
    }
