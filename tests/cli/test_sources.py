"""Format detection of input files, by name or first bytes."""

import gzip
from pathlib import Path

import pytest
from tarn.cli.failures import Misuse
from tarn.cli.input.files import entity_type, open_input, statement_type


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "application/x-ndjson"),
        (b'{"id": "a"}', "application/x-ndjson"),
        (b'{"id": "a"}\n{"id"', "application/x-ndjson"),
        (b'\xef\xbb\xbf\n {"id": "a"}\r\n', "application/x-ndjson"),
        (b'{"id": "' + b"a" * 100_000 + b'"}\n', "application/x-ndjson"),
        (b'{\n "id": "a"}\n', "application/json"),
        (b'[{"id": "a"},\n{"id": "b"}]', "application/json"),
        (b" \n[\n", "application/json"),
    ],
)
def test_lines_and_documents_of_json_are_distinguished_by_their_beginning(tmp_path: Path, content: bytes, kind: str):
    (tmp_path / "data").write_bytes(content)

    with open_input(str(tmp_path / "data")) as source:
        assert entity_type(source) == kind


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.csv", b"", "text/csv"),
        ("a.CSV.gz", gzip.compress(b"x", mtime=0), "text/csv"),
        ("a.pack", b"", "application/x-ftm-pack"),
        ("a.parquet", b"", "application/vnd.apache.parquet"),
        ("a.arrow", b"", "application/vnd.apache.arrow.stream"),
        ("a.ndjson", b"", "application/x-ndjson"),
        ("a", b"PAR1...", "application/vnd.apache.parquet"),
        ("a", b"\xff\xff\xff\xff...", "application/vnd.apache.arrow.stream"),
        ("a", b'{"id": "x"}\n', "application/x-ndjson"),
        ("a.json", b'[{"id": "x"}]', "application/json"),
        ("a.txt", b"canonical_id,entity_id,prop\n", "text/csv"),
        ("a.gz", gzip.compress(b'"canonical_id","entity_id"\n', mtime=0), "text/csv"),
    ],
)
def test_format_of_statements_is_detected_by_the_name_or_the_first_bytes(
    tmp_path: Path, name: str, content: bytes, kind: str
):
    (tmp_path / name).write_bytes(content)

    with open_input(str(tmp_path / name)) as source:
        assert statement_type(source) == kind


def test_undetectable_format_is_misuse(tmp_path: Path):
    (tmp_path / "data").write_text("x,Thing:name,y\n")

    with open_input(str(tmp_path / "data")) as source, pytest.raises(Misuse, match="give --format"):
        statement_type(source)


def test_bytes_read_for_detection_are_also_sent(tmp_path: Path):
    content = bytes(range(256)) * 4000
    (tmp_path / "data").write_bytes(content)

    with open_input(str(tmp_path / "data")) as source:
        pieces = list(source.pieces())

    assert (b"".join(pieces), source.size) == (content, len(content))
    assert max(map(len, pieces)) <= 256 << 10
