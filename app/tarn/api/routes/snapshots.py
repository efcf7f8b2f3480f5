"""Snapshot routes: list snapshots, get a manifest, list its files."""

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Annotated, Any, Self

from fastapi import Path, Response
from pydantic import BaseModel, Field

from tarn.api.http.paging import Page, PagingDep
from tarn.api.http.problems import raises
from tarn.api.http.route_access import DatasetDep
from tarn.api.http.routing import JSON, router
from tarn.api.http.services.container import Services, ServicesDep
from tarn.api.http.streaming.row_formats import FormDep, described
from tarn.api.routes.snapshot_files import file_rows
from tarn.datasets.registry import Dataset
from tarn.errors import ManifestInvalid, NoSnapshots, NotAcceptable, Problem, SnapshotGone, SnapshotNotFound
from tarn.lake.snapshots import SnapshotKey
from tarn.model.datasets.snapshot import Counts, Snapshot, SnapshotOperation, Table

routes = router("/v1/datasets/{dataset}/snapshots", "snapshots")

HEADER = "Tarn-Snapshot"
HEADERS = {HEADER: {"description": "The id of the snapshot that was read.", "schema": {"type": "string"}}}

READERS = 16
"""Manifests that are read concurrently for a list."""

SnapshotParam = Annotated[
    str,
    Path(max_length=36, pattern=r"^[A-Za-z0-9-]+$", description="A snapshot's id or number, or `latest`."),
]


class TableEntry(BaseModel):
    """A table in a snapshot, without its files."""

    version: int = Field(description="The version of the Delta table.")
    files: int
    size: int = Field(description="Bytes of all files.")
    added: int = Field(description="Number of files that the parent does not have.")
    removed: int = Field(description="Number of files that only the parent has.")

    @classmethod
    def of(cls, table: Table) -> Self:
        return cls(
            version=table.version,
            files=len(table.files),
            size=sum(file.size for file in table.files),
            added=len(table.added),
            removed=len(table.removed),
        )


class SnapshotEntry(BaseModel):
    """A snapshot in a list: its manifest without the lists of files and batches."""

    seq: int
    id: str
    content: int = Field(description="The `seq` of the last snapshot that changed the visible state.")
    parent: str | None
    created: datetime
    operation: SnapshotOperation
    author: str
    message: str | None
    metadata: dict[str, Any]
    batches: int = Field(description="Number of batches (requests and stages) that its parent does not have.")
    segment: int
    statements: TableEntry
    translog: TableEntry
    rows: Counts
    first_seen: datetime | None
    last_seen: datetime | None

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        summary = {
            "batches": len(snapshot.batches),
            "statements": TableEntry.of(snapshot.statements),
            "translog": TableEntry.of(snapshot.translog),
        }
        same = {name: getattr(snapshot, name) for name in cls.model_fields.keys() - summary.keys()}
        return cls(**same, **summary)


class InvalidEntry(BaseModel):
    """A snapshot in a list whose manifest is invalid."""

    seq: int
    id: str
    problem: Problem


class SnapshotPage(Page[SnapshotEntry | InvalidEntry]):
    """Snapshots, newest first."""


@routes.get("")
def list_snapshots(services: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> SnapshotPage:
    """List the snapshots, newest first; the oldest may name a parent that has expired.

    A snapshot whose manifest is invalid is listed with the problem.
    """
    kept = services.snapshots.page(dataset, paging.after_number, paging.fetch)
    page, cursor = paging.cut(kept, lambda named: str(named.seq))
    with ThreadPoolExecutor(READERS) as pool:
        entries = list(pool.map(lambda named: _entry(services, dataset, named), page))
    return SnapshotPage(results=[entry for entry in entries if entry is not None], next=cursor)


@routes.get(
    "/{snapshot}",
    response_model=Snapshot,
    responses={200: {"headers": HEADERS}, **raises(NoSnapshots, SnapshotNotFound, SnapshotGone, ManifestInvalid)},
)
def get_snapshot(services: ServicesDep, dataset: DatasetDep, snapshot: SnapshotParam) -> Response:
    """Get the manifest of a snapshot, as stored."""
    manifest = services.snapshots.get(dataset, snapshot)
    return Response(manifest.to_json(), headers={HEADER: manifest.id}, media_type=JSON)


@routes.get(
    "/{snapshot}/files",
    response_class=Response,
    responses={
        **described(HEADERS),
        **raises(NoSnapshots, SnapshotNotFound, SnapshotGone, ManifestInvalid, NotAcceptable),
    },
)
def list_snapshot_files(services: ServicesDep, dataset: DatasetDep, snapshot: SnapshotParam, form: FormDep) -> Response:
    """List a snapshot's files with their statistics: one row per file, one column per bound and count."""
    manifest = services.snapshots.get(dataset, snapshot)
    return file_rows(manifest).answer(form, {HEADER: manifest.id})


def _entry(services: Services, dataset: Dataset, named: SnapshotKey) -> SnapshotEntry | InvalidEntry | None:
    """Return the list entry of a snapshot; None if it has expired meanwhile."""
    try:
        return SnapshotEntry.of(services.snapshots.read(dataset, named))
    except SnapshotGone:
        return None
    except ManifestInvalid as error:
        problem = error.problem(f"/v1/datasets/{dataset.name}/snapshots/{named.seq}")
        return InvalidEntry(seq=named.seq, id=named.id, problem=Problem(**problem.model_dump()))
