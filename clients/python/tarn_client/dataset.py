"""A dataset: written by a writer, read as records and tables."""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from tarn_client.connection import Connection
from tarn_client.errors import InvalidEntitiesWarning, Problem
from tarn_client.pages import pages
from tarn_client.records import Entities, Statements
from tarn_client.writer import CHUNK_BYTES, Commit, HowValues, OnError, Writer

Values = str | Sequence[str] | None
Fresh = Literal["overlay", "flush", "snapshot"]

ROUTE_NAMES = ("stream", "invalid")
"""Names of routes where the id of an entity may stand: entities with these ids are read by a list."""

WAIT = 30
"""Seconds that one request waits for a job: some proxies break off what is silent for longer."""


class Dataset:
    """One dataset of a lake."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self.name = name
        self._path = f"/v1/datasets/{quote(name, safe='')}"

    def __repr__(self) -> str:
        return f"Dataset({self.name!r})"

    def writer(
        self,
        origin: str | None = None,
        *,
        records: Literal["entities", "statements"] = "entities",
        atomic: bool = False,
        commit: Commit = "auto",
        on_error: OnError = "abort",
        chunk_bytes: int = CHUNK_BYTES,
        values: HowValues | None = None,
    ) -> Writer:
        """A writer, to be used with `with`. See `Writer` for what each option promises."""
        return Writer(self._connection, self._path, origin, records, atomic, commit, on_error, chunk_bytes, values)

    def entities(
        self,
        *,
        id: Values = None,
        canonical_id: Values = None,
        schema: Values = None,
        schemata: Values = None,
        origin: Values = None,
        where: dict[str, Any] | None = None,
        sort: Values = None,
        limit: int | None = None,
        at: str | int | None = None,
        fresh: Fresh | None = None,
    ) -> Entities:
        """The entities that match, read when they are iterated or made a table of.

        `where` is a condition in the API's language; `at` a snapshot, ref or moment. All at once they are a stream
        of one state; with `where`, `sort` or `limit` they come in pages, each of the state that there is by then,
        unless `at` pins one.
        """
        filters = {"id": id, "canonical_id": canonical_id, "schema": schema, "schemata": schemata, "origin": origin}
        state = {"at": at, "fresh": fresh}
        return Entities(self._connection, f"{self._path}/entities", _listed(filters), state, where, _list(sort), limit)

    def statements(
        self,
        *,
        id: Values = None,
        canonical_id: Values = None,
        schema: Values = None,
        schemata: Values = None,
        origin: Values = None,
        prop: Values = None,
        at: str | int | None = None,
        fresh: Fresh | None = None,
    ) -> Statements:
        """The statements that match, as one stream of one state, read when they are iterated or made a table of."""
        filters = {"id": id, "canonical_id": canonical_id, "schema": schema, "schemata": schemata, "origin": origin}
        params = {**_listed({**filters, "prop": prop}), "at": at, "fresh": fresh}
        return Statements(self._connection, f"{self._path}/statements", params)

    def entity(self, entity_id: str, *, at: str | int | None = None, fresh: Fresh | None = None) -> dict[str, Any]:
        """One entity, by its id, canonical id or a referent. Raises Problem if there is none."""
        state = {"at": at, "fresh": fresh}
        if entity_id in ROUTE_NAMES:
            return self._named_like_a_route(entity_id, state)
        path = f"{self._path}/entities/{quote(entity_id, safe='')}"
        found: dict[str, Any] = self._connection.read(path, state)
        return found

    def invalid_entities(self, *, at: str | int | None = None, fresh: Fresh | None = None) -> Iterator[dict[str, Any]]:
        """The entities whose statements do not assemble, by canonical id.

        Each has `id`, `reason`, `schemata`, `by_origin` (the schemata of the first hundred origins) and `origins`.
        """
        for page in pages(self._connection, f"{self._path}/entities/invalid", {"at": at, "fresh": fresh}):
            yield from page["results"]

    def _named_like_a_route(self, entity_id: str, state: dict[str, Any]) -> dict[str, Any]:
        page = self._connection.read(f"{self._path}/entities", {**state, "id": entity_id})
        found = sorted([*page["results"], *page["invalid"]], key=lambda one: (one["id"] != entity_id, one["id"]))
        if not found:
            detail = f"there is no entity {entity_id!r} in {self.name!r}"
            raise Problem({"type": "/problems/entity-not-found", "status": 404, "detail": detail})
        if found[0] in page["invalid"]:
            detail = f"the entity {entity_id!r} cannot be put together: {found[0]['reason']}"
            raise Problem({"type": "/problems/schema-violation", "status": 422, "detail": detail})
        entity: dict[str, Any] = found[0]
        return entity

    def delete(self, entity_id: str, *, origin: str | None = None) -> int:
        """Delete what an origin, or every one, says of an entity; how many statements that ended."""
        path = f"{self._path}/entities/{quote(entity_id, safe='')}"
        return int(self._connection.write("DELETE", path, {"origin": origin})["tombstones"])

    def snapshot(self, at: str | int | None = None) -> dict[str, Any] | None:
        """A snapshot, by default the latest; None if there is none yet."""
        try:
            found: dict[str, Any] = self._connection.read(f"{self._path}/snapshots/{at or 'latest'}")
        except Problem as problem:
            if problem.slug == "no-snapshots":
                return None
            raise
        return found

    def snapshot_files(self, snapshot: str) -> list[dict[str, Any]]:
        """The files of a snapshot, with what their writers observed of them."""
        with self._connection.stream(f"{self._path}/snapshots/{snapshot}/files", "application/x-ndjson") as response:
            return [json.loads(line) for line in response.iter_lines() if line]

    def flush(self) -> dict[str, Any]:
        """Flush what waits in the journal into a snapshot; the job, when it is done. Raises Problem if it failed."""
        return self._worked("flush", {})

    def export(self, kind: str, to: str | Path) -> Path:
        """Have an export made where it is stale, and fetch it; `kind` is `entities`, `statements`, and so on.

        Warns with InvalidEntitiesWarning if it leaves out entities whose statements do not assemble.
        """
        self._worked("export", {"kinds": [kind]})
        exports = self._connection.read(f"{self._path}/exports")["results"]
        (found,) = (export for export in exports if export["kind"] == kind)
        name = found["name"]
        with self._connection.stream(f"{self._path}/exports/{name}", "*/*") as response, Path(to).open("wb") as file:
            for piece in response.iter_bytes():
                file.write(piece)
        if invalid := found.get("invalid"):
            message = f"entities left out of {name} because their statements do not assemble: {invalid}"
            warnings.warn(message, InvalidEntitiesWarning, stacklevel=2)
        return Path(to)

    def _worked(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """A job of the server's worker, when it is done. Raises Problem if it failed or was cancelled."""
        path = f"{self._path}/operations/{operation}"
        job: dict[str, Any] = self._connection.write("POST", path, {"wait": WAIT}, body=body)
        while job["finished"] is None:
            job = self._connection.read(f"/v1/jobs/{job['id']}", {"wait": WAIT})
        if job["state"] != "done":
            raise Problem(job["problem"] or {"detail": f"the job {job['id']} was cancelled"})
        return job


def _list(values: Values) -> list[str]:
    if values is None:
        return []
    return [values] if isinstance(values, str) else list(values)


def _listed(filters: dict[str, Values]) -> dict[str, list[str]]:
    return {name: _list(values) for name, values in filters.items() if values is not None}
