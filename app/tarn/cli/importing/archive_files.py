"""Upload of a source archive's files and texts: each is checked against its hash and sent once."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tarn_client.errors import Problem
from tarn_client.paths import path_of

from tarn.cli.connection import DATASETS, LONG_TIMEOUT
from tarn.cli.failures import Incomplete
from tarn.cli.importing.archive import CHUNK_BYTES, ArchivedFile, FileRecord, archived_files, file_records, sha256
from tarn.cli.importing.stage import RETRY_TIMEOUT
from tarn.cli.importing.target_dataset import ImportTarget

if TYPE_CHECKING:
    from tarn.cli.output.progress import Advance

OCTETS = "application/octet-stream"
LONGEST_META = 4000
"""Characters of JSON that are sent in the query; longer metadata is sent as a form."""

BOUNDARY = "tarn-import-7d2f61c4b9e84a03"


class ArchiveUpload:
    """Uploads the files of an archive to the target dataset."""

    def __init__(self, target: ImportTarget, advance: "Advance", resumed: bool, skip: bool) -> None:
        """With `resumed`, files that the target has are not sent again; with `skip`, damaged ones are left out."""
        self._target = target
        self._connection = target.connection.with_retries(RETRY_TIMEOUT)
        self._advance = advance
        self._resumed = resumed
        self._skip = skip
        self.warnings: list[str] = []
        self.texts = 0

    def upload_all(self, folder: str) -> None:
        """Upload every file that has a record. Raises Incomplete for a damaged one, and LakeError."""
        for file in archived_files(folder):
            records = list(file_records(file))
            if file.blob is None or not records:
                continue
            checksum = sha256(file)
            if checksum is None:
                self._damaged(f"{file.blob} is damaged: its SHA-1 is not {file.checksum}")
                continue
            uploaded = [self._upload(file, record, checksum) for record in records]
            if any(uploaded):
                self._upload_texts(file, checksum)

    def _upload(self, file: ArchivedFile, record: FileRecord, checksum: str) -> bool:
        if self._resumed and self._target.has_file(checksum, record.path):
            self._advance(0, 1)
            return True
        try:
            self._send(file, record, checksum)
        except Problem as problem:
            if problem.slug not in ("invalid-path", "schema-violation"):
                raise
            self._damaged(f"{record.path} ({file.blob}): {problem.detail}", problem)
            return False
        self._advance(0, 1)
        return True

    def _send(self, file: ArchivedFile, record: FileRecord, checksum: str) -> None:
        """Send a file with its metadata. A repeated request changes nothing, so that it needs no idempotency key."""
        assert file.blob is not None
        blob, meta = file.blob, json.dumps(record.meta, ensure_ascii=False)
        path = path_of(DATASETS, self._target.name, "files")
        params = {"path": record.path, "origin": record.origin, "checksum": checksum}
        if len(meta) <= LONGEST_META:
            self._connection.request(
                "PUT",
                path,
                params={**params, "meta": meta},
                content=lambda: self._chunks(blob),
                headers={"Content-Type": OCTETS},
                timeout=LONG_TIMEOUT,
            )
        else:
            self._connection.request(
                "POST",
                path,
                params=params,
                content=lambda: _form(meta, self._chunks(blob)),
                headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"},
                timeout=LONG_TIMEOUT,
            )

    def _chunks(self, path: str) -> Iterator[bytes]:
        for chunk in _read(path):
            yield chunk
            self._advance(len(chunk), 0)

    def _upload_texts(self, file: ArchivedFile, checksum: str) -> None:
        from tarn.model.names import Origin

        for origin, text_file in file.texts:
            try:
                Origin(origin)
            except ValueError as error:
                self.warnings.append(f"{text_file} is left out: {error}")
                continue
            self._upload_text(checksum, origin, text_file)
            self.texts += 1

    def _upload_text(self, checksum: str, origin: str, text_file: str) -> None:
        self._connection.request(
            "PUT",
            path_of(DATASETS, self._target.name, "files", checksum, "text", origin),
            content=lambda: _read(text_file),
            headers={"Content-Type": OCTETS},
            timeout=LONG_TIMEOUT,
        )

    def _damaged(self, message: str, problem: Problem | None = None) -> None:
        if not self._skip:
            raise problem or Incomplete(message)
        self.warnings.append(message)


def _read(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _form(meta: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the metadata and the file as a form."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
    yield (head % ("meta", "")).encode() + meta.encode() + b"\r\n"
    yield (head % ("file", '; filename="file"')).encode()
    yield from chunks
    yield f"\r\n--{BOUNDARY}--\r\n".encode()
