"""Files as the API sees them: the index of an archive, and files and texts that are stored once per idempotency key."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from tarn.access.audit import AuditedAction
from tarn.archive import file_index
from tarn.archive.file_index import Position
from tarn.archive.files import Archive, Staged
from tarn.datasets.registry import Dataset
from tarn.db import idempotency
from tarn.db.engine import Database
from tarn.db.idempotency import IdempotencyKey, StoreAnswer
from tarn.model.file import ArchiveFile
from tarn.model.names import Checksum, FileId, Origin, TenantName


class FileService:
    """Reads the index of archives, and puts received files and texts into them with their audit records."""

    def __init__(self, database: Database, archive: Archive) -> None:
        self._database = database
        self._archive = archive

    def page(self, dataset: Dataset, limit: int, after: Position | None, **criteria: Any) -> list[ArchiveFile]:
        """Return the files that meet the criteria of `file_index.page`, sorted by path and id."""
        with self._database.read() as connection:
            return file_index.page(connection, dataset, limit, after, **criteria)

    def get(self, dataset: Dataset, checksum: Checksum, file: FileId) -> ArchiveFile:
        """Return a file. Raises FileNotFound."""
        with self._database.read() as connection:
            return file_index.get(connection, dataset, checksum, file)

    def first_of(self, dataset: Dataset, checksum: Checksum) -> ArchiveFile:
        """Return the first file with this content. Raises FileNotFound."""
        with self._database.read() as connection:
            return file_index.first_of(connection, dataset, checksum)

    def is_key_used(self, tenant: TenantName, key: str) -> bool:
        """Return whether an idempotency key was used, for any request."""
        with self._database.read() as connection:
            return idempotency.is_known(connection, tenant, key)

    def commit(
        self,
        dataset: Dataset,
        staged: Staged,
        once: IdempotencyKey | None,
        act: AuditedAction,
        target: Callable[[ArchiveFile], str],
    ) -> ArchiveFile:
        """Put a received file into the archive, or return the file that the same request put there before.

        `target` returns what the audit log names as the file. Raises IdempotencyMismatch, and what `Archive.commit`
        does.
        """

        def put(store: StoreAnswer) -> Any:
            def record(connection: Connection, files: list[ArchiveFile]) -> None:
                (file,) = files
                act.done(connection, target=target(file), size=file.size)
                store(connection, file.model_dump(mode="json"))

            return self._archive.commit(dataset, act.tenant, [staged], record)[0]

        return ArchiveFile.model_validate(self._run_once(act.tenant, once, staged, put))

    def put_text(
        self,
        dataset: Dataset,
        checksum: Checksum,
        origin: Origin,
        staged: Staged,
        once: IdempotencyKey | None,
        act: AuditedAction,
    ) -> int:
        """Store a received text, and return its size; or return the one that the same request stored before.

        Raises IdempotencyMismatch, and what `Archive.put_text` does.
        """
        answer = {"size": staged.size}

        def put(store: StoreAnswer) -> Any:
            def record(connection: Connection) -> None:
                act.done(connection, size=staged.size)
                store(connection, answer)

            self._archive.put_text(dataset, act.tenant, checksum, origin, staged, record)
            return answer

        size: int = self._run_once(act.tenant, once, staged, put)["size"]
        return size

    def _run_once(
        self, tenant: TenantName, once: IdempotencyKey | None, staged: Staged, put: Callable[[StoreAnswer], Any]
    ) -> Any:
        """Put a received file, or drop it and return the stored response of the key. Raises IdempotencyMismatch."""
        unused = [staged]

        def put_staged(store: StoreAnswer) -> Any:
            unused.clear()
            return put(store)

        try:
            return idempotency.answer_once(self._database, tenant, once, put_staged)
        finally:
            if unused:
                self._archive.drop(unused)
