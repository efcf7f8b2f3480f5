"""Backup manifests, and reports of a reconciliation after a restore."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tarn.model.datasets.finding import Finding


class DumpedTable(BaseModel):
    """A table of the database dump: its rows, and the size and checksum of its file."""

    table: str
    rows: int
    size: int
    sha256: str


class DumpedHead(BaseModel):
    """A dataset's head at the time of the dump."""

    dataset: str
    id: str
    seq: int
    snapshot: str | None


class MissingFile(BaseModel):
    """A file that was missing in the lake when it was backed up."""

    path: str
    detail: str


class BackupManifest(BaseModel):
    """`backup.json`: the contents of a backup. It is written last: if it exists, the backup is complete."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["tarn-backup"] = "tarn-backup"
    version: Literal[1] = 1
    id: str
    at: datetime = Field(description="The time of the state that was backed up.")
    finished: datetime
    tarn: str
    revision: str
    lake: str = Field(description="The lake's id.")
    tables: list[DumpedTable]
    objects: int
    size: int = Field(description="Bytes of all objects.")
    copied: int = Field(description="Objects that were copied because no earlier backup has them.")
    copied_size: int
    index: DumpedTable = Field(description="The list of objects.")
    heads: list[DumpedHead]
    lacking: list[MissingFile]


class LostSnapshot(BaseModel):
    """A snapshot with files that are missing in the lake."""

    seq: int
    id: str
    created: datetime
    lacks: str = Field(description="The first missing file.")


class Commits(BaseModel):
    """A range of consecutive commit numbers."""

    first: int
    last: int


class RecordedBatch(BaseModel):
    """A batch that is recorded in the database."""

    id: str
    tenant: str
    origin: str | None
    commit: int | None
    entities: int
    rows: int
    message: str | None


class RecordedFile(BaseModel):
    """A file of the archive."""

    id: str
    path: str
    checksum: str
    size: int
    tenant: str


class Losses(BaseModel):
    """Data of one dataset that cannot be recovered."""

    snapshots: list[LostSnapshot] = []
    commits: list[Commits] = Field([], description="Acknowledged commits whose data is lost.")
    batches: list[RecordedBatch] = Field([], description="Lost batches that the database still records.")
    files: list[RecordedFile] = []
    exports: list[str] = Field([], description="Lost exports; they are made again on request.")
    refs: list[str] = []
    history_below: int | None = Field(None, description="Snapshots older than this one are incomplete and expire.")
    rejected: int = Field(0, description="Rejected events whose rows are lost.")
    uploads: list[str] = Field([], description="Uploads in progress with a missing part, which must be sent again.")
    configuration: bool = Field(
        False, description="The configuration is lost; the defaults of a new dataset replace it."
    )
    everything: bool = Field(False, description="All data: the lake has another dataset of this name, created later.")

    @property
    def are_any(self) -> bool:
        return self != Losses()


class Reconciled(BaseModel):
    """The reconciliation of one dataset: differences and changes."""

    dataset: str
    id: str
    found: Literal["same", "lake ahead", "database ahead", "only in the lake", "deleted"]
    head_before: int | None = Field(description="The number of the head that the database had recorded; null: none.")
    head: int | None = Field(description="The number of the snapshot whose state the head has now; null: none.")
    recorded: list[int] = Field([], description="Snapshots of the lake that were not recorded in the database.")
    again: list[RecordedBatch] = Field([], description="Batches that are marked unflushed and will be flushed again.")
    aside: list[str] = Field([], description="Manifests that are not part of the history, moved to `versions/`.")
    returned: list[RecordedFile] = Field([], description="Files of the lake that were not recorded in the database.")
    lost: Losses = Losses()
    findings: list[Finding] = Field([], description="Findings of a verification after the reconciliation.")

    @property
    def is_changed(self) -> bool:
        return self.found != "same" or bool(self.again or self.aside or self.returned) or self.lost.are_any


class Reconciliation(BaseModel):
    """All datasets with differences or changes."""

    applied: bool
    datasets: list[Reconciled]

    @property
    def is_lossy(self) -> bool:
        return any(
            dataset.lost.are_any or any(not finding.harmless for finding in dataset.findings)
            for dataset in self.datasets
        )
