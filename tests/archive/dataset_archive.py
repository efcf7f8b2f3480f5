"""A dataset's archive in this process: put, list and delete files, and inspect what is stored."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from tarn.access.audit import AuditedAction
from tarn.archive import file_index
from tarn.archive.files import Archive, Reached
from tarn.datasets import registry
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.tables import file_puts, tags, tenants
from tarn.model.datasets.dataset import NewDataset
from tarn.model.file import ArchiveFile, NewFile
from tarn.model.names import LAKEHOUSE
from tarn.model.tenant import ADMIN
from tarn.settings import Settings
from tarn.storage.store import Store

ACT = AuditedAction(None, "put_file", "test", "r")


@dataclass
class DatasetArchive:
    """One dataset and its archive."""

    settings: Settings
    database: Database
    store: Store
    dataset: Dataset

    @classmethod
    def make(cls, settings: Settings, database: Database, store: Store, name: str = "test") -> "DatasetArchive":
        config, _ = registry.create(database, store, NewDataset.model_validate({"name": name}), ACT)
        return cls(settings, database, store, Dataset(config.id, config.name))

    def archive(self, reached: Reached = lambda _: None, store: Store | None = None, **changes: Any) -> Archive:
        settings = self.settings.model_copy(update=changes)
        return Archive(self.database, store or self.store, settings, reached)

    def put(self, path: str, content: bytes | Iterable[bytes] = b"content", **fields: Any) -> ArchiveFile:
        chunks = [content] if isinstance(content, bytes) else content
        return self.archive().put(self.dataset, ADMIN, new_file(path, **fields), chunks)

    def delete(self, file: ArchiveFile) -> None:
        self.archive().delete(self.dataset, file.checksum, file.id, lambda _: None)

    # Inspection

    def files(self, **filters: Any) -> list[ArchiveFile]:
        with self.database.read() as connection:
            return file_index.page(connection, self.dataset, 1000, **filters)

    def content(self, file: ArchiveFile) -> bytes:
        return b"".join(self.archive().open(self.dataset, file.checksum))

    def stored(self) -> list[str]:
        """Return the objects of the archive, by the last two parts of their paths, and those of `uploads`."""
        paths = [entry.path for entry in self.store.list(self.dataset.layout.archive)]
        paths += [entry.path for entry in self.store.list(self.dataset.layout.uploads)]
        return sorted("/".join(path.split("/")[-2:]) for path in paths)

    def announced(self) -> int:
        with self.database.read() as connection:
            return connection.execute(select(func.count()).select_from(file_puts)).scalar_one()

    def used(self) -> int:
        with self.database.read() as connection:
            return connection.execute(select(tenants.c.used_bytes).where(tenants.c.name == ADMIN)).scalar_one()

    def tag(self) -> Any:
        with self.database.read() as connection:
            own = tags.c.tenant == LAKEHOUSE, tags.c.key == file_index.LAST_UPDATED
            return connection.execute(select(tags.c.at).where(*own)).scalar()


def new_file(path: str, **fields: Any) -> NewFile:
    return NewFile.model_validate({"path": path, **fields})


def traces(*files: ArchiveFile) -> list[str]:
    """Return what the archive contains for exactly these files when no request is running."""
    blobs = {f"{file.checksum}/data" for file in files}
    return sorted(blobs | {f"{file.checksum}/{file.id}.json" for file in files})
