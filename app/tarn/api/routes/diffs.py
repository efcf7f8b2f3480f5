"""Diff routes: the entities that changed between two snapshots."""

from collections.abc import Iterator
from typing import Annotated, Literal

import orjson
from fastapi import Path, Response
from pydantic import BaseModel, Field

from tarn.api.http.paging import PagingDep, foreign_cursor
from tarn.api.http.reads.read_requests import ReadRequest, ReadRequestDep, read_problems
from tarn.api.http.route_access import DatasetDep
from tarn.api.http.routing import JSON, router
from tarn.api.http.streaming.stream_response import Chunks, EndParam, StreamPiece, stream_response
from tarn.api.routes.entity_reads import NDJSON, STREAM, Entity
from tarn.errors import FieldError, InvalidFormat, NoSnapshots
from tarn.query import diff
from tarn.query.diff import OPS, Difference, DiffPosition
from tarn.query.reader import Reading

routes = router("/v1/datasets/{dataset}/snapshots/{former}/diff", "snapshots")

StateParam = Annotated[
    str,
    Path(
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:+-]*$",
        description="A snapshot's id or number, a ref, a time, or `latest`.",
    ),
]


class DifferenceRead(BaseModel):
    """An entity that differs between the two snapshots."""

    op: Literal["ADD", "DEL", "MOD"]
    id: str
    entity: Entity | None = Field(
        description="The entity in the latter snapshot, or in the former if deleted; null if it does not assemble."
    )


class DiffPage(BaseModel):
    """One page of changes: added entities first, then deleted ones, then modified ones."""

    results: list[DifferenceRead]
    next: str | None


@routes.get("/{latter}/stream", response_class=Response, responses={**STREAM, **read_problems(NoSnapshots)})
async def stream_diff(
    read_request: ReadRequestDep, dataset: DatasetDep, former: StateParam, latter: StateParam, end: EndParam = False
) -> Response:
    """Stream the entities that changed between two snapshots, as JSON lines."""
    _check(read_request)

    def begin(reading: Reading) -> Chunks:
        pair = diff.resolve_pair(reading, dataset, former, latter)
        pieces = _pieces(diff.differences(reading.duck, reading.store, pair))
        return Chunks(pair.latter.snapshot_id, pieces, of_entities=True)

    return await stream_response(read_request, [dataset], NDJSON, end, begin)


@routes.get("/{latter}", response_model=DiffPage, responses=read_problems(NoSnapshots))
async def diff_snapshots(
    read_request: ReadRequestDep, dataset: DatasetDep, former: StateParam, latter: StateParam, page: PagingDep
) -> Response:
    """List the entities that changed between two snapshots."""
    _check(read_request)
    after = None if page.after is None else _place(page.after)

    def read(reading: Reading) -> list[Difference]:
        pair = diff.resolve_pair(reading, dataset, former, latter)
        return [
            change
            for batch in diff.differences(reading.duck, reading.store, pair, after, page.fetch)
            for change in batch
        ]

    changes = await read_request.read([dataset], read)
    results, cursor = page.cut(changes, lambda change: orjson.dumps([change.op, change.id]).decode())
    body = b'{"results":[' + b",".join(map(_json, results)) + b'],"next":' + orjson.dumps(cursor) + b"}"
    return Response(body, media_type=JSON)


def _check(read_request: ReadRequest) -> None:
    if read_request.state.at is not None or read_request.flushes or read_request.state.fresh == "snapshot":
        reason = "the two snapshots are in the path"
        raise InvalidFormat(
            f"this route does not support `at` and `fresh`: {reason}", errors=[FieldError(reason=reason)]
        )


def _pieces(batches: Iterator[list[Difference]]) -> Iterator[StreamPiece]:
    for batch in batches:
        content = b"".join(_json(change) + b"\n" for change in batch)
        yield StreamPiece(content, len(batch), sum(map(_is_invalid, batch)))


def _is_invalid(change: Difference) -> bool:
    return change.line.startswith(b'{"$invalid"')


def _json(change: Difference) -> bytes:
    entity = b"null" if _is_invalid(change) else change.line.strip()
    return b'{"op":"' + change.op.encode() + b'","id":' + orjson.dumps(change.id) + b',"entity":' + entity + b"}"


def _place(text: str) -> DiffPosition:
    try:
        op, name = orjson.loads(text)
    except ValueError:
        raise foreign_cursor() from None
    if op not in OPS or not isinstance(name, str):
        raise foreign_cursor()
    return DiffPosition(op, name)
