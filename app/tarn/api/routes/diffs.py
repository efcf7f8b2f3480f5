"""What changed between two snapshots."""

from collections.abc import Iterator
from typing import Annotated, Literal

import orjson
from fastapi import Path, Response
from pydantic import BaseModel, Field

from tarn.api.http.paging import PagingDep, foreign_cursor
from tarn.api.http.reads.read_requests import AskedDep, ReadRequest, read_problems
from tarn.api.http.route_access import DatasetDep
from tarn.api.http.routing import JSON, router
from tarn.api.http.streaming.stream_response import Chunks, EndParam, StreamPiece
from tarn.api.http.streaming.stream_response import stream_response as streamed
from tarn.api.routes.entity_reads import NDJSON, STREAM, Entity
from tarn.errors import Fault, InvalidFormat, NoSnapshots
from tarn.query import diff
from tarn.query.diff import OPS, Difference, DiffPosition
from tarn.query.reader import Reading

routes = router("/v1/datasets/{dataset}/snapshots/{former}/diff", "snapshots")

StateParam = Annotated[
    str,
    Path(
        max_length=128,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:+-]*$",
        description="A snapshot's id or number, a ref, a moment, or `latest`.",
    ),
]


class DifferenceRead(BaseModel):
    """An entity that is not the same in both snapshots."""

    op: Literal["ADD", "DEL", "MOD"]
    id: str
    entity: Entity | None = Field(
        description="As it is in the latter; as it was in the former, if it was deleted; null if it is not valid."
    )


class DiffPage(BaseModel):
    """A part of what changed: first what was added, then what was deleted, then what was modified."""

    results: list[DifferenceRead]
    next: str | None


@routes.get("/{latter}/stream", response_class=Response, responses={**STREAM, **read_problems(NoSnapshots)})
async def stream_diff(
    asked: AskedDep, dataset: DatasetDep, former: StateParam, latter: StateParam, end: EndParam = False
) -> Response:
    """Stream the entities that changed between two snapshots, a line each."""
    _check(asked)

    def begin(reading: Reading) -> Chunks:
        states = diff.between(reading, dataset, former, latter)
        pieces = _pieces(diff.differences(reading.duck, reading.store, states))
        return Chunks(states.latter.snapshot_id, pieces, of_entities=True)

    return await streamed(asked, [dataset], NDJSON, end, begin)


@routes.get("/{latter}", response_model=DiffPage, responses=read_problems(NoSnapshots))
async def diff_snapshots(
    asked: AskedDep, dataset: DatasetDep, former: StateParam, latter: StateParam, page: PagingDep
) -> Response:
    """List the entities that changed between two snapshots."""
    _check(asked)
    after = None if page.after is None else _place(page.after)

    def read(reading: Reading) -> list[Difference]:
        states = diff.between(reading, dataset, former, latter)
        return [
            one for some in diff.differences(reading.duck, reading.store, states, after, page.fetch) for one in some
        ]

    found = await asked.read([dataset], read)
    results, cursor = page.cut(found, lambda one: orjson.dumps([one.op, one.id]).decode())
    body = b'{"results":[' + b",".join(map(_json, results)) + b'],"next":' + orjson.dumps(cursor) + b"}"
    return Response(body, media_type=JSON)


def _check(asked: ReadRequest) -> None:
    if asked.state.at is not None or asked.flushes or asked.state.fresh == "snapshot":
        reason = "the two snapshots are in the path"
        raise InvalidFormat(f"`at` and `fresh` are not for this route: {reason}", errors=[Fault(reason=reason)])


def _pieces(found: Iterator[list[Difference]]) -> Iterator[StreamPiece]:
    for some in found:
        yield StreamPiece(b"".join(_json(one) + b"\n" for one in some), len(some), sum(map(_is_invalid, some)))


def _is_invalid(one: Difference) -> bool:
    return one.line.startswith(b'{"$invalid"')


def _json(one: Difference) -> bytes:
    entity = b"null" if _is_invalid(one) else one.line.strip()
    return b'{"op":"' + one.op.encode() + b'","id":' + orjson.dumps(one.id) + b',"entity":' + entity + b"}"


def _place(text: str) -> DiffPosition:
    try:
        op, name = orjson.loads(text)
    except ValueError:
        raise foreign_cursor() from None
    if op not in OPS or not isinstance(name, str):
        raise foreign_cursor()
    return DiffPosition(op, name)
