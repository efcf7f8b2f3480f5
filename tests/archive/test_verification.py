"""Verification and repair of the archive."""

import pytest
from sqlalchemy import text
from tarn.archive import file_index
from tarn.integrity import archive_checks
from tarn.integrity.findings import Findings
from tarn.model.datasets.finding import FindingKind
from tarn.model.file import ArchiveFile
from tarn.model.names import Origin
from tarn.model.tenant import ADMIN

from tests.archive.dataset_archive import DatasetArchive, new_file, traces
from tests.in_process_api import ONE_DATABASE


def findings_of(dataset_archive: DatasetArchive) -> list[tuple[FindingKind, str]]:
    findings = Findings()
    archive_checks.check(
        dataset_archive.database, dataset_archive.store, dataset_archive.dataset, findings, lambda _: None
    )
    return [(finding.kind, (finding.path or "").rsplit("/", 1)[-1]) for finding in findings.first]


def repair(dataset_archive: DatasetArchive) -> None:
    archive_checks.repair(dataset_archive.database, dataset_archive.store, dataset_archive.dataset, lambda _: None)


def test_consistent_archive_has_no_findings(dataset_archive: DatasetArchive):
    for number in range(5):
        dataset_archive.put(f"{number}.txt", b"%d" % (number // 2))
    dataset_archive.put("empty.txt", b"")
    dataset_archive.delete(dataset_archive.put("deleted.txt", b"deleted"))

    assert findings_of(dataset_archive) == []


@pytest.mark.contract("W9")
def test_lost_index_is_rebuilt_from_the_records(dataset_archive: DatasetArchive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archive_checks, "STEP", 2)
    files = [dataset_archive.put(f"{number}.txt", b"%d" % number, meta={"n": number}) for number in range(5)]
    used = dataset_archive.used()
    with dataset_archive.database.write() as connection:
        connection.execute(text("DELETE FROM files"))
        connection.execute(text("UPDATE tenants SET used_bytes = 0"))
    assert sorted(findings_of(dataset_archive)) == sorted(
        (FindingKind.FILE_UNRECORDED, f"{file.id}.json") for file in files
    )

    repair(dataset_archive)

    assert dataset_archive.files() == files
    assert (findings_of(dataset_archive), dataset_archive.used()) == ([], used)


@ONE_DATABASE
def test_lost_record_is_rewritten_from_the_index(dataset_archive: DatasetArchive):
    file, other = dataset_archive.put("a.txt"), dataset_archive.put("b.txt", b"other")
    dataset_archive.store.delete([dataset_archive.dataset.layout.file_record(file.checksum, file.id)])
    assert findings_of(dataset_archive) == [(FindingKind.FILE_RECORD_MISSING, f"{file.id}.json")]

    repair(dataset_archive)

    assert findings_of(dataset_archive) == []
    assert dataset_archive.stored() == traces(file, other)


@ONE_DATABASE
def test_lost_or_truncated_content_is_reported_and_not_repaired(dataset_archive: DatasetArchive):
    lost, cut = dataset_archive.put("a.txt"), dataset_archive.put("b.txt", b"other")
    dataset_archive.store.delete([dataset_archive.dataset.layout.blob_data(lost.checksum)])
    dataset_archive.store.put(dataset_archive.dataset.layout.blob_data(cut.checksum), b"oth")
    expected = {(FindingKind.BLOB_MISSING, "data"), (FindingKind.BLOB_SIZE, "data")}
    assert set(findings_of(dataset_archive)) == expected

    repair(dataset_archive)

    assert set(findings_of(dataset_archive)) == expected


@ONE_DATABASE
def test_running_put_is_no_finding(dataset_archive: DatasetArchive):
    seen: list[tuple[FindingKind, str]] = []

    def reached(step: str) -> None:
        if step == "written":
            seen.extend(findings_of(dataset_archive))

    dataset_archive.archive(reached).put(dataset_archive.dataset, ADMIN, new_file("a.txt"), [b"content"])

    assert seen == []


# Texts


def put_text(dataset_archive: DatasetArchive, file: ArchiveFile, content: bytes, origin: str = "ocr") -> None:
    staged = dataset_archive.archive().stage_text(dataset_archive.dataset, Origin(origin), [content])
    dataset_archive.archive().put_text(
        dataset_archive.dataset, ADMIN, file.checksum, Origin(origin), staged, lambda _: None
    )


def test_wrong_count_of_text_bytes_is_reported_and_corrected(dataset_archive: DatasetArchive):
    file, used = dataset_archive.put("a.txt"), len(b"content")
    layout = dataset_archive.dataset.layout
    for origin in ("same", "other", "gone"):
        put_text(dataset_archive, file, b"text", origin)
    assert (findings_of(dataset_archive), dataset_archive.used()) == ([], used + 12)
    # As stored by a version that does not count texts.
    dataset_archive.store.put(layout.text(file.checksum, Origin("old")), b"old text")
    dataset_archive.store.put(layout.text(file.checksum, Origin("other")), b"longer text")
    dataset_archive.store.delete([layout.text(file.checksum, Origin("gone"))])
    names = ("gone.txt", "old.txt", "other.txt")
    assert sorted(findings_of(dataset_archive)) == [(FindingKind.TEXT_MISCOUNTED, name) for name in names]

    repair(dataset_archive)

    assert (findings_of(dataset_archive), dataset_archive.used()) == (
        [],
        used + len(b"text" + b"old text" + b"longer text"),
    )
    dataset_archive.delete(file)
    assert (findings_of(dataset_archive), dataset_archive.used()) == ([], 0)


@ONE_DATABASE
def test_texts_of_a_content_without_a_file_are_left_to_a_vacuum(dataset_archive: DatasetArchive):
    file = dataset_archive.put("a.txt")
    dataset_archive.store.put(dataset_archive.dataset.layout.text(file.checksum, Origin("old")), b"old text")
    dataset_archive.delete(file)

    repair(dataset_archive)

    assert (findings_of(dataset_archive), dataset_archive.used()) == ([], 0)


@ONE_DATABASE
def test_text_lost_together_with_its_file_is_not_counted(dataset_archive: DatasetArchive):
    file = dataset_archive.put("a.txt")
    put_text(dataset_archive, file, b"text")
    with dataset_archive.database.write() as connection:
        file_index.forget(connection, dataset_archive.dataset, file)
    dataset_archive.store.delete(
        [entry.path for entry in dataset_archive.store.list(dataset_archive.dataset.layout.archive)]
    )
    assert findings_of(dataset_archive) == [(FindingKind.TEXT_MISCOUNTED, "ocr.txt")]

    repair(dataset_archive)

    assert (findings_of(dataset_archive), dataset_archive.used()) == ([], 0)
