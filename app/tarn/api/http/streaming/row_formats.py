"""Row formats and content negotiation: NDJSON, Parquet or an Arrow stream, as `Accept` asks for."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
from fastapi import Depends, Request, Response

from tarn.api.http.problems import Responses
from tarn.api.http.routing import media_type
from tarn.errors import NotAcceptable

Row = dict[str, Any]


@dataclass(frozen=True)
class ResultRows:
    """Rows in memory and the schema of all their columns. A row may lack columns."""

    rows: Sequence[Row]
    schema: pa.Schema

    def ndjson(self) -> bytes:
        """Return one JSON line per row. Columns that a row lacks are omitted, not null."""
        return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in self.rows)

    def parquet(self) -> bytes:
        file = io.BytesIO()
        parquet.write_table(self._table(), file, compression="zstd")
        return file.getvalue()

    def arrow(self) -> bytes:
        file = io.BytesIO()
        with pa.ipc.new_stream(file, self.schema) as stream:
            stream.write_table(self._table())
        return file.getvalue()

    def answer(self, form: str, headers: dict[str, str]) -> Response:
        return Response(SERIALIZERS[form](self), headers=headers, media_type=form)

    def _table(self) -> pa.Table:
        return pa.Table.from_pylist(list(self.rows), schema=self.schema)


SERIALIZERS: dict[str, Callable[[ResultRows], bytes]] = {
    "application/x-ndjson": ResultRows.ndjson,
    "application/vnd.apache.parquet": ResultRows.parquet,
    "application/vnd.apache.arrow.stream": ResultRows.arrow,
}
"""Serializers by media type. The first is the default for callers without a preference."""


def described(headers: dict[str, Any]) -> Responses:
    """Return the OpenAPI description of a response in one of the row formats."""
    content = {form: {"schema": {"type": "string", "format": "binary"}} for form in SERIALIZERS}
    return {200: {"description": "Rows", "content": content, "headers": headers}}


async def _form(request: Request) -> str:
    return preferred(request.headers.get("accept"), tuple(SERIALIZERS))


FormDep = Annotated[str, Depends(_form)]


def preferred(accept: str | None, supported: Sequence[str]) -> str:
    """Return the supported media type that `Accept` ranks highest. Raises NotAcceptable if it accepts none."""
    accepted = dict(media_type(part) for part in (accept or "*/*").split(","))

    def quality(kind: str) -> float:
        ranges = (kind, f"{kind.partition('/')[0]}/*", "*/*")
        return next((accepted[range_] for range_ in ranges if range_ in accepted), 0.0)

    best = max(supported, key=quality)
    if quality(best) <= 0:
        raise NotAcceptable(
            f"this route can respond with {', '.join(supported)}; Accept allows none of these",
            supported=list(supported),
        )
    return best
