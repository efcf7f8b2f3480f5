"""Snapshots: the log, one manifest, its files."""

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
from tarn.lake import snapshots
from tarn.lake.snapshots import Named
from tarn.model.snapshot import Change, Counts, Snapshot, Table

routes = router("/v1/datasets/{dataset}/snapshots", "snapshots")

HEADER = "Tarn-Snapshot"
HEADERS = {HEADER: {"description": "The id of the snapshot that is served.", "schema": {"type": "string"}}}

READERS = 16
"""Manifests that are read at once for the log."""

SnapshotParam = Annotated[
    str,
    Path(max_length=36, pattern=r"^[A-Za-z0-9-]+$", description="A snapshot's id or number, or `latest`."),
]


class TableEntry(BaseModel):
    """A table in a snapshot, without its files."""

    version: int = Field(description="The version of the Delta table.")
    files: int
    size: int = Field(description="Bytes of all files.")
    added: int = Field(description="Files that the parent does not have.")
    removed: int = Field(description="Files that only the parent has.")

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
    """A snapshot in the log: its manifest without the lists of files and batches."""

    seq: int
    id: str
    content: int = Field(description="The `seq` of the last snapshot that changed what is visible.")
    parent: str | None
    created: datetime
    operation: Change
    author: str
    message: str | None
    metadata: dict[str, Any]
    batches: int = Field(description="Requests and stages that are in it and not in its parent.")
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
    """A snapshot in the log whose manifest cannot be read."""

    seq: int
    id: str
    problem: Problem


class SnapshotPage(Page[SnapshotEntry | InvalidEntry]):
    """Snapshots, newest first."""


@routes.get("")
def list_snapshots(house: ServicesDep, dataset: DatasetDep, paging: PagingDep) -> SnapshotPage:
    """List the snapshots that are kept, newest first; the oldest may name a parent that was given up.

    One whose manifest is invalid stands in its place, with the problem.
    """
    with house.database.read() as connection:
        found = snapshots.kept_page(connection, dataset, paging.after_number, paging.fetch)
    named, cursor = paging.cut(found, lambda one: str(one.seq))
    with ThreadPoolExecutor(READERS) as pool:
        entries = list(pool.map(lambda one: _entry(house, dataset, one), named))
    return SnapshotPage(results=[entry for entry in entries if entry is not None], next=cursor)


@routes.get(
    "/{snapshot}",
    response_model=Snapshot,
    responses={200: {"headers": HEADERS}, **raises(NoSnapshots, SnapshotNotFound, SnapshotGone, ManifestInvalid)},
)
def get_snapshot(house: ServicesDep, dataset: DatasetDep, snapshot: SnapshotParam) -> Response:
    """Show a snapshot's whole manifest, as it is stored."""
    found = _read(house, dataset, snapshot)
    return Response(found.to_json(), headers={HEADER: found.id}, media_type=JSON)


@routes.get(
    "/{snapshot}/files",
    response_class=Response,
    responses={
        **described(HEADERS),
        **raises(NoSnapshots, SnapshotNotFound, SnapshotGone, ManifestInvalid, NotAcceptable),
    },
)
def list_snapshot_files(house: ServicesDep, dataset: DatasetDep, snapshot: SnapshotParam, form: FormDep) -> Response:
    """List a snapshot's files with their statistics: a row a file, a column for each bound and count."""
    found = _read(house, dataset, snapshot)
    return file_rows(found).answer(form, {HEADER: found.id})


def _read(house: Services, dataset: Dataset, name: str) -> Snapshot:
    with house.database.read() as connection:
        named = snapshots.find(connection, dataset, name)
    return snapshots.read_kept(house.database, house.store, dataset, named)


def _entry(house: Services, dataset: Dataset, named: Named) -> SnapshotEntry | InvalidEntry | None:
    """A line of the log; None for a snapshot that was given up since it was found."""
    try:
        return SnapshotEntry.of(snapshots.read_kept(house.database, house.store, dataset, named))
    except SnapshotGone:
        return None
    except ManifestInvalid as error:
        problem = error.problem(f"/v1/datasets/{dataset.name}/snapshots/{named.seq}")
        return InvalidEntry(seq=named.seq, id=named.id, problem=Problem(**problem.model_dump()))
