"""A dataset of a lake: writing, reading, snapshots, flush and exports."""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tarn_client.errors import InvalidEntitiesWarning, Problem
from tarn_client.events import follow
from tarn_client.jobs import require_success, wait_for_job
from tarn_client.ndjson import NDJSON
from tarn_client.paths import path_of
from tarn_client.records import Entities, Statements
from tarn_client.writer import CHUNK_BYTES, Commit, OnError, ValueMode, Writer

if TYPE_CHECKING:
    from tarn_client.connection import Connection

Values = str | Sequence[str] | None
Fresh = Literal["overlay", "flush", "snapshot"]

ROUTE_NAMES = ("stream", "invalid")
"""Routes below `entities/` that hide entities with the same id: those are read through the list."""


class Dataset:
    """One dataset of a lake."""

    def __init__(self, connection: "Connection", name: str) -> None:
        self._connection = connection
        self.name = name
        self._path = path_of("/v1/datasets", name)

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
        values: ValueMode | None = None,
    ) -> Writer:
        """Return a writer, to be used with `with`. See `Writer` for the options."""
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
        """Return the matching entities, which are read when iterated or converted to a table.

        `where` is a condition in the API's filter language; `at` a snapshot, ref or timestamp. Without `where`, `sort`
        and `limit` they are one stream of one state; with any of them they are read in pages, each of the state that
        is current then, unless `at` pins one.
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
        """Return the matching statements: one stream of one state, read when iterated or converted to a table."""
        filters = {"id": id, "canonical_id": canonical_id, "schema": schema, "schemata": schemata, "origin": origin}
        params = {**_listed({**filters, "prop": prop}), "at": at, "fresh": fresh}
        return Statements(self._connection, f"{self._path}/statements", params)

    def entity(self, entity_id: str, *, at: str | int | None = None, fresh: Fresh | None = None) -> dict[str, Any]:
        """Return one entity, by its id, canonical id or a referent. Raises Problem if it does not exist."""
        state = {"at": at, "fresh": fresh}
        if entity_id in ROUTE_NAMES:
            return self._by_list(entity_id, state)
        return self._connection.read(path_of(f"{self._path}/entities", entity_id), state)

    def invalid_entities(self, *, at: str | int | None = None, fresh: Fresh | None = None) -> Iterator[dict[str, Any]]:
        """Return the entities whose statements do not assemble, ordered by canonical id.

        Each has `id`, `reason`, `schemata`, `by_origin` (the schemata of the first hundred origins) and `origins`.
        """
        return self._connection.each(f"{self._path}/entities/invalid", {"at": at, "fresh": fresh})

    def _by_list(self, entity_id: str, state: dict[str, Any]) -> dict[str, Any]:
        page = self._connection.read(f"{self._path}/entities", {**state, "id": entity_id})
        entities = sorted([*page["results"], *page["invalid"]], key=lambda one: (one["id"] != entity_id, one["id"]))
        if not entities:
            detail = f"there is no entity {entity_id!r} in {self.name!r}"
            raise Problem({"type": "/problems/entity-not-found", "status": 404, "detail": detail})
        entity: dict[str, Any] = entities[0]
        if entity in page["invalid"]:
            detail = f"the statements of entity {entity_id!r} do not assemble: {entity['reason']}"
            raise Problem({"type": "/problems/schema-violation", "status": 422, "detail": detail})
        return entity

    def delete(self, entity_id: str, *, origin: str | None = None) -> int:
        """Delete an entity's statements of one origin, or of all; return the number of deleted statements."""
        path = path_of(f"{self._path}/entities", entity_id)
        return int(self._connection.write("DELETE", path, params={"origin": origin})["tombstones"])

    def snapshot(self, at: str | int | None = None) -> dict[str, Any] | None:
        """Return a snapshot, by default the latest; None if there is none yet."""
        try:
            return self._connection.read(path_of(f"{self._path}/snapshots", str(at or "latest")))
        except Problem as problem:
            if problem.slug == "no-snapshots":
                return None
            raise

    def snapshot_files(self, snapshot: str) -> list[dict[str, Any]]:
        """Return the files of a snapshot, with the statistics that their writers recorded."""
        path = path_of(f"{self._path}/snapshots", snapshot, "files")
        with self._connection.stream(path, NDJSON) as response:
            return [json.loads(line) for line in response.iter_lines() if line]

    def flush(self) -> dict[str, Any]:
        """Flush the journal into a snapshot; return the finished job. Raises Problem if it failed."""
        return self._run_job("flush", {})

    def export(self, kind: str, to: str | Path) -> Path:
        """Download an export, which is generated first if it is stale; `kind` is `entities`, `statements`, and so on.

        Warns with InvalidEntitiesWarning if it leaves out entities whose statements do not assemble.
        """
        self._run_job("export", {"kinds": [kind]})
        exports = self._connection.read(f"{self._path}/exports")["results"]
        (export,) = (export for export in exports if export["kind"] == kind)
        name = export["name"]
        with self._connection.stream(f"{self._path}/exports/{name}", "*/*") as response, Path(to).open("wb") as file:
            for piece in response.iter_bytes():
                file.write(piece)
        if invalid := export.get("invalid"):
            message = f"entities left out of {name} because their statements do not assemble: {invalid}"
            warnings.warn(message, InvalidEntitiesWarning, stacklevel=2)
        return Path(to)

    def events(self, since: int | None = None, kinds: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        """Yield the dataset's events without end: those after the event `since`, or new ones."""
        return follow(self._connection, f"{self._path}/events", since, {"kind": list(kinds)})

    def _run_job(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """Request an operation and wait for its job; return the job. Raises its Problem, or JobCancelled."""
        path = f"{self._path}/operations/{operation}"
        job = self._connection.write("POST", path, body)
        return require_success(wait_for_job(self._connection, job["id"]))


def _list(values: Values) -> list[str]:
    if values is None:
        return []
    return [values] if isinstance(values, str) else list(values)


def _listed(filters: dict[str, Values]) -> dict[str, list[str]]:
    return {name: _list(values) for name, values in filters.items() if values is not None}
