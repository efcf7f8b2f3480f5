"""The archive, verified and mended."""

import pytest
from sqlalchemy import text
from tarn.archive import file_index as records
from tarn.integrity import archive_checks as checks
from tarn.integrity.findings import Findings
from tarn.model.file import ArchiveFile
from tarn.model.finding import FindingKind
from tarn.model.names import Origin
from tarn.model.tenant import ADMIN

from tests.archive.dataset_archive import DatasetArchive, new_file, traces
from tests.in_process_api import ONE_DATABASE


def findings_of(desk: DatasetArchive) -> list[tuple[FindingKind, str]]:
    findings = Findings()
    checks.check(desk.database, desk.store, desk.dataset, findings, lambda _: None)
    return [(finding.kind, (finding.path or "").rsplit("/", 1)[-1]) for finding in findings.first]


def mend(desk: DatasetArchive) -> None:
    checks.repair(desk.database, desk.store, desk.dataset, lambda _: None)


def test_archive_that_is_whole_has_no_findings(desk: DatasetArchive):
    for number in range(5):
        desk.put(f"{number}.txt", b"%d" % (number // 2))
    desk.put("empty.txt", b"")
    desk.delete(desk.put("deleted.txt", b"deleted"))

    assert findings_of(desk) == []


@pytest.mark.contract("W9")
def test_index_that_is_lost_is_made_again_from_the_records(desk: DatasetArchive, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "STEP", 2)
    files = [desk.put(f"{number}.txt", b"%d" % number, meta={"n": number}) for number in range(5)]
    used = desk.used()
    with desk.database.write() as connection:
        connection.execute(text("DELETE FROM files"))
        connection.execute(text("UPDATE tenants SET used_bytes = 0"))
    assert sorted(findings_of(desk)) == sorted((FindingKind.FILE_UNRECORDED, f"{file.id}.json") for file in files)

    mend(desk)

    assert desk.files() == files
    assert (findings_of(desk), desk.used()) == ([], used)


@ONE_DATABASE
def test_record_that_is_lost_is_put_again_from_the_index(desk: DatasetArchive):
    file, other = desk.put("a.txt"), desk.put("b.txt", b"other")
    desk.store.delete([desk.dataset.layout.file_record(file.checksum, file.id)])
    assert findings_of(desk) == [(FindingKind.FILE_RECORD_MISSING, f"{file.id}.json")]

    mend(desk)

    assert findings_of(desk) == []
    assert desk.stored() == traces(file, other)


@ONE_DATABASE
def test_content_that_is_lost_or_cut_is_told_and_not_made_up(desk: DatasetArchive):
    lost, cut = desk.put("a.txt"), desk.put("b.txt", b"other")
    desk.store.delete([desk.dataset.layout.blob_data(lost.checksum)])
    desk.store.put(desk.dataset.layout.blob_data(cut.checksum), b"oth")
    expected = {(FindingKind.BLOB_MISSING, "data"), (FindingKind.BLOB_SIZE, "data")}
    assert set(findings_of(desk)) == expected

    mend(desk)

    assert set(findings_of(desk)) == expected


@ONE_DATABASE
def test_file_that_is_being_put_is_no_finding(desk: DatasetArchive):
    seen: list[tuple[FindingKind, str]] = []

    def reached(step: str) -> None:
        if step == "written":
            seen.extend(findings_of(desk))

    desk.archive(reached).put(desk.dataset, ADMIN, new_file("a.txt"), [b"content"])

    assert seen == []


# Texts


def put_text(desk: DatasetArchive, file: ArchiveFile, content: bytes, origin: str = "ocr") -> None:
    staged = desk.archive().stage_text(desk.dataset, Origin(origin), [content])
    desk.archive().put_text(desk.dataset, ADMIN, file.checksum, Origin(origin), staged, lambda _: None)


def test_texts_that_are_not_counted_as_they_are_are_found_and_counted(desk: DatasetArchive):
    file, used = desk.put("a.txt"), len(b"content")
    layout = desk.dataset.layout
    for origin in ("same", "other", "gone"):
        put_text(desk, file, b"text", origin)
    assert (findings_of(desk), desk.used()) == ([], used + 12)
    # As a version that counts no texts leaves them.
    desk.store.put(layout.text(file.checksum, Origin("old")), b"old text")
    desk.store.put(layout.text(file.checksum, Origin("other")), b"longer text")
    desk.store.delete([layout.text(file.checksum, Origin("gone"))])
    names = ("gone.txt", "old.txt", "other.txt")
    assert sorted(findings_of(desk)) == [(FindingKind.TEXT_MISCOUNTED, name) for name in names]

    mend(desk)

    assert (findings_of(desk), desk.used()) == ([], used + len(b"text" + b"old text" + b"longer text"))
    desk.delete(file)
    assert (findings_of(desk), desk.used()) == ([], 0)


@ONE_DATABASE
def test_texts_of_a_content_that_no_file_has_are_left_to_a_vacuum(desk: DatasetArchive):
    file = desk.put("a.txt")
    desk.store.put(desk.dataset.layout.text(file.checksum, Origin("old")), b"old text")
    desk.delete(file)

    mend(desk)

    assert (findings_of(desk), desk.used()) == ([], 0)


@ONE_DATABASE
def test_text_whose_file_is_lost_with_it_is_not_counted(desk: DatasetArchive):
    file = desk.put("a.txt")
    put_text(desk, file, b"text")
    with desk.database.write() as connection:
        records.forget(connection, desk.dataset, file)
    desk.store.delete([entry.path for entry in desk.store.list(desk.dataset.layout.archive)])
    assert findings_of(desk) == [(FindingKind.TEXT_MISCOUNTED, "ocr.txt")]

    mend(desk)

    assert (findings_of(desk), desk.used()) == ([], 0)
