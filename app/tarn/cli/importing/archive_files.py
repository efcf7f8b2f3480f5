"""Files and texts of a source's archive, put into the dataset's: each is checked against its hash, and put once."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tarn.cli.commands.datasets.datasets import BASE
from tarn.cli.failures import Incomplete, ProblemAnswered
from tarn.cli.importing.archive import CHUNK_BYTES, ArchivedFile, FileRecord, archived_files, records, sha256
from tarn.cli.importing.stage import patiently
from tarn.cli.importing.target_dataset import ImportTarget
from tarn.cli.paths import at

if TYPE_CHECKING:
    from tarn.cli.output.progress import Passed

OCTETS = "application/octet-stream"
LONGEST_META = 4000
"""Characters of JSON that go into a query; longer ones go as a form."""

BOUNDARY = "tarn-import-7d2f61c4b9e84a03"


class ArchiveUpload:
    """Puts the files of an archive."""

    def __init__(self, target: ImportTarget, passed: "Passed", resumed: bool, skip: bool) -> None:
        """With `resumed`, what is there is not sent again; with `skip`, what is damaged is left out and told."""
        self._target = target
        self._passed = passed
        self._resumed = resumed
        self._skip = skip
        self.faults: list[str] = []
        self.texts = 0

    def put_all(self, folder: str) -> None:
        """Raises Incomplete for a damaged content, ProblemAnswered for what the server refuses."""
        for content in archived_files(folder):
            told = list(records(content))
            if content.blob is None or not told:
                continue
            checksum = sha256(content)
            if checksum is None:
                self._damaged(f"{content.blob} is damaged: its SHA-1 is not {content.checksum}")
                continue
            there = [self._put(content, record, checksum) for record in told]
            if any(there):
                self._put_texts(content, checksum)

    def _put(self, content: ArchivedFile, record: FileRecord, checksum: str) -> bool:
        if self._resumed and self._target.has_file(checksum, record.path):
            self._passed(0, 1)
            return True
        try:
            patiently(lambda: self._sent(content, record, checksum))
        except ProblemAnswered as problem:
            if problem.slug not in ("invalid-path", "schema-violation"):
                raise
            self._damaged(f"{record.path} ({content.blob}): {problem}", problem)
            return False
        self._passed(0, 1)
        return True

    def _sent(self, content: ArchivedFile, record: FileRecord, checksum: str) -> None:
        meta = json.dumps(record.meta, ensure_ascii=False)
        params = {"path": record.path, "origin": record.origin, "checksum": checksum}
        path, client = at(BASE, self._target.name, "files"), self._target.client
        if len(meta) <= LONGEST_META:
            client.upload(
                path, self._pieces(content.blob), {"Content-Type": OCTETS}, params | {"meta": meta}, method="PUT"
            )
        else:
            kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            client.upload(path, _form(meta, self._pieces(content.blob)), kind, params)

    def _pieces(self, path: str | None) -> Iterator[bytes]:
        assert path is not None
        with open(path, "rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece
                self._passed(len(piece), 0)

    def _put_texts(self, content: ArchivedFile, checksum: str) -> None:
        from tarn.model.names import Origin

        for origin, path in content.texts:
            try:
                Origin(origin)
            except ValueError as error:
                self.faults.append(f"{path} is left out: {error}")
                continue
            place = at(BASE, self._target.name, "files", checksum, "text", origin)

            def send(place: str = place, path: str = path) -> Any:
                return self._target.client.upload(place, _read(path), {"Content-Type": OCTETS}, {}, method="PUT")

            patiently(send)
            self.texts += 1

    def _damaged(self, sentence: str, problem: ProblemAnswered | None = None) -> None:
        if not self._skip:
            raise problem or Incomplete(sentence)
        self.faults.append(sentence)


def _read(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


def _form(meta: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The file and what is said of it, as a form."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
    yield (head % ("meta", "")).encode() + meta.encode() + b"\r\n"
    yield (head % ("file", '; filename="file"')).encode()
    yield from pieces
    yield f"\r\n--{BOUNDARY}--\r\n".encode()
