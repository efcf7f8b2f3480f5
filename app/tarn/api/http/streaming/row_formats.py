"""Rows in the form that the caller accepts: NDJSON, Parquet or an Arrow stream."""

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
    """Rows that are in memory, and the columns they have between them. A row need not have them all."""

    rows: Sequence[Row]
    schema: pa.Schema

    def ndjson(self) -> bytes:
        """A line a row; what a row does not say is left out of it."""
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
        return Response(FORMS[form](self), headers=headers, media_type=form)

    def _table(self) -> pa.Table:
        return pa.Table.from_pylist(list(self.rows), schema=self.schema)


FORMS: dict[str, Callable[[ResultRows], bytes]] = {
    "application/x-ndjson": ResultRows.ndjson,
    "application/vnd.apache.parquet": ResultRows.parquet,
    "application/vnd.apache.arrow.stream": ResultRows.arrow,
}
"""By media type; the first is for callers that do not care."""


def described(headers: dict[str, Any]) -> Responses:
    """The OpenAPI description of an answer in one of the forms."""
    content = {form: {"schema": {"type": "string", "format": "binary"}} for form in FORMS}
    return {200: {"description": "Rows", "content": content, "headers": headers}}


async def _form(request: Request) -> str:
    return preferred(request.headers.get("accept"), tuple(FORMS))


FormDep = Annotated[str, Depends(_form)]


def preferred(accept: str | None, supported: Sequence[str]) -> str:
    """The type that the caller likes best, of those that can be served. Raises NotAcceptable if there is none."""
    wanted = dict(media_type(part) for part in (accept or "*/*").split(","))

    def quality(kind: str) -> float:
        ranges = (kind, f"{kind.partition('/')[0]}/*", "*/*")
        return next((wanted[range_] for range_ in ranges if range_ in wanted), 0.0)

    best = max(supported, key=quality)
    if quality(best) <= 0:
        raise NotAcceptable(f"this route answers {', '.join(supported)}", supported=list(supported))
    return best
