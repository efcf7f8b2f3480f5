"""Files of a lakehouse's archive."""

import hashlib
from pathlib import Path

import pytest
from tarn.cli.importing.archive import archived_files, file_records, sha256, survey, usable_path

from tests.cli.importing.lakes import archived, archived_first


def test_contents_records_and_texts_of_both_layouts_are_found(tmp_path: Path):
    archived(tmp_path, b"hello", "a.txt", "b/a.txt", texts={"ocr": "Hello"})
    old = archived_first(tmp_path, b"older", "c.txt")

    found = {content.checksum: content for content in archived_files(str(tmp_path / "archive"))}
    seen = survey(str(tmp_path / "archive"))

    assert (seen.files, seen.size, seen.texts, seen.errors) == (3, 15, 1, [])
    assert [record.path for record in file_records(found[old])] == ["c.txt"]
    assert sha256(found[old]) == hashlib.sha256(b"older").hexdigest()


def test_damaged_content_under_its_sha1_is_noticed(tmp_path: Path):
    checksum = archived_first(tmp_path, b"older", "c.txt")
    next((tmp_path / "archive").rglob(checksum)).write_bytes(b"newer")
    (content,) = archived_files(str(tmp_path / "archive"))

    assert sha256(content) is None


def test_what_cannot_be_imported_is_told(tmp_path: Path):
    gone = archived(tmp_path, b"gone", "gone.txt")
    next((tmp_path / "archive").rglob(f"{gone}/blob")).unlink()
    broken = archived(tmp_path, b"broken", "broken.txt")
    next((tmp_path / "archive").rglob(f"{broken}/*.json")).write_text("[")
    archived(tmp_path, b"nameless")
    archived(tmp_path, b"", "empty.txt")
    thumbnailed = archived(tmp_path, b"picture", "picture.png")
    next((tmp_path / "archive").rglob(thumbnailed)).joinpath("thumbnail.webp").write_bytes(b"small")

    seen = survey(str(tmp_path / "archive"))

    assert (seen.files, seen.unrecorded, seen.others) == (2, 1, 1)
    assert sorted(fault.split()[-1] for fault in seen.errors) == sorted([gone, "file"])


@pytest.mark.parametrize(
    ("told", "path"),
    [
        ("a/b.pdf", "a/b.pdf"),
        ("/srv//data/./b.pdf", "srv/data/b.pdf"),
        (r"C\scans\b.pdf", "C/scans/b.pdf"),
        ("../../etc/passwd", "0" * 64),
        ("a\nb", "0" * 64),
    ],
)
def test_paths_become_such_as_tarn_takes(told: str, path: str):
    assert usable_path(told, "0" * 64) == path
