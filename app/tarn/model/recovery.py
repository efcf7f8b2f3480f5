"""What backups say of themselves, and what a recovery finds, does and cannot bring back."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tarn.model.finding import Finding


class DumpedTable(BaseModel):
    """A table of the dump: how many rows it has, and what its file is."""

    table: str
    rows: int
    size: int
    sha256: str


class DumpedHead(BaseModel):
    """A dataset's head at the moment of the dump."""

    dataset: str
    id: str
    seq: int
    snapshot: str | None


class Lacking(BaseModel):
    """Something that the lake itself did not have when it was backed up."""

    path: str
    detail: str


class BackupManifest(BaseModel):
    """`backup.json`: what belongs to a backup. It is written last, and where it is, the backup is whole."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["tarn-backup"] = "tarn-backup"
    version: Literal[1] = 1
    id: str
    at: datetime = Field(description="The moment whose state this is.")
    finished: datetime
    tarn: str
    revision: str
    lake: str = Field(description="The lake's id.")
    tables: list[DumpedTable]
    objects: int
    size: int = Field(description="Bytes of all objects.")
    copied: int = Field(description="Objects that no earlier backup had.")
    copied_size: int
    index: DumpedTable = Field(description="The list of objects.")
    heads: list[DumpedHead]
    lacking: list[Lacking]


class LostSnapshot(BaseModel):
    """A snapshot of which the lake has not all that it names."""

    seq: int
    id: str
    created: datetime
    lacks: str = Field(description="The first thing that is missing.")


class Commits(BaseModel):
    """Commit numbers that follow each other."""

    first: int
    last: int


class KnownBatch(BaseModel):
    """A write, as far as the database knows it."""

    id: str
    tenant: str
    origin: str | None
    commit: int | None
    entities: int
    rows: int
    message: str | None


class KnownFile(BaseModel):
    """A file of the archive."""

    id: str
    path: str
    checksum: str
    size: int
    tenant: str


class Losses(BaseModel):
    """What cannot be brought back, of one dataset."""

    snapshots: list[LostSnapshot] = []
    commits: list[Commits] = Field([], description="Writes that were acknowledged, and are nowhere.")
    batches: list[KnownBatch] = Field([], description="Those of them that the database still knows.")
    files: list[KnownFile] = []
    exports: list[str] = Field([], description="Made again when somebody asks for them.")
    refs: list[str] = []
    history_below: int | None = Field(None, description="Older snapshots are not whole, and are given up.")
    rejected: int = Field(0, description="Events set aside for an operator whose rows are gone.")
    uploads: list[str] = Field(
        [], description="Uploads in progress of which a part is missing: it is to be sent again."
    )
    configuration: bool = Field(False, description="The configuration is lost, and is what a new dataset has.")
    everything: bool = Field(False, description="The lake has another dataset of this name, made later.")

    @property
    def are_any(self) -> bool:
        return self != Losses()


class Reconciled(BaseModel):
    """One dataset: what was found, and what was done about it."""

    dataset: str
    id: str
    found: Literal["same", "lake ahead", "database ahead", "only in the lake", "deleted"]
    head_before: int | None = Field(description="The number of the head that the database named; null: none.")
    head: int | None = Field(description="The number of the snapshot that is the head's state now; null: none.")
    recorded: list[int] = Field([], description="Snapshots of the lake that the database did not know.")
    again: list[KnownBatch] = Field([], description="Writes that count as flushed no more, and will be flushed again.")
    aside: list[str] = Field([], description="Manifests that are no part of history, put below `versions/`.")
    returned: list[KnownFile] = Field([], description="Files that the database did not know, and the lake has.")
    lost: Losses = Losses()
    findings: list[Finding] = Field([], description="What a verification finds now.")

    @property
    def is_changed(self) -> bool:
        return self.found != "same" or bool(self.again or self.aside or self.returned) or self.lost.are_any


class Reconciliation(BaseModel):
    """All datasets that anything was found of, or done to."""

    applied: bool
    datasets: list[Reconciled]

    @property
    def is_lossy(self) -> bool:
        return any(one.lost.are_any or any(not found.harmless for found in one.findings) for one in self.datasets)
