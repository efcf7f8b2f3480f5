"""Import of files: contents, records and texts in the archive of a lakehouse."""

import hashlib
from pathlib import Path

import pytest
from tarn.cli.importing.archive import archived_files, file_records, sha256, survey, usable_path

from tests.cli.importing.lakes import archive_content, archive_content_by_sha1


def test_contents_records_and_texts_of_both_layouts_are_found(tmp_path: Path):
    archive_content(tmp_path, b"hello", "a.txt", "b/a.txt", texts={"ocr": "Hello"})
    old = archive_content_by_sha1(tmp_path, b"older", "c.txt")

    contents = {content.checksum: content for content in archived_files(str(tmp_path / "archive"))}
    totals = survey(str(tmp_path / "archive"))

    assert (totals.files, totals.size, totals.texts, totals.errors) == (3, 15, 1, [])
    assert [record.path for record in file_records(contents[old])] == ["c.txt"]
    assert sha256(contents[old]) == hashlib.sha256(b"older").hexdigest()


def test_damaged_content_under_its_sha1_is_detected(tmp_path: Path):
    checksum = archive_content_by_sha1(tmp_path, b"older", "c.txt")
    next((tmp_path / "archive").rglob(checksum)).write_bytes(b"newer")
    (content,) = archived_files(str(tmp_path / "archive"))

    assert sha256(content) is None


def test_files_that_cannot_be_imported_are_counted_and_listed(tmp_path: Path):
    missing = archive_content(tmp_path, b"missing", "missing.txt")
    next((tmp_path / "archive").rglob(f"{missing}/blob")).unlink()
    broken = archive_content(tmp_path, b"broken", "broken.txt")
    next((tmp_path / "archive").rglob(f"{broken}/*.json")).write_text("[")
    archive_content(tmp_path, b"nameless")
    archive_content(tmp_path, b"", "empty.txt")
    thumbnailed = archive_content(tmp_path, b"picture", "picture.png")
    next((tmp_path / "archive").rglob(thumbnailed)).joinpath("thumbnail.webp").write_bytes(b"small")

    totals = survey(str(tmp_path / "archive"))

    assert (totals.files, totals.unrecorded, totals.others) == (2, 1, 1)
    assert sorted(fault.split()[-1] for fault in totals.errors) == sorted([missing, "file"])


@pytest.mark.parametrize(
    ("recorded", "path"),
    [
        ("a/b.pdf", "a/b.pdf"),
        ("/srv//data/./b.pdf", "srv/data/b.pdf"),
        (r"C\scans\b.pdf", "C/scans/b.pdf"),
        ("../../etc/passwd", "0" * 64),
        ("a\nb", "0" * 64),
    ],
)
def test_recorded_path_is_converted_to_a_valid_one_or_replaced_by_the_checksum(recorded: str, path: str):
    assert usable_path(recorded, "0" * 64) == path
