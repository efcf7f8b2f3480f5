"""Splitting of statement files into parts, each of complete records."""

import csv
import gzip
import io
from pathlib import Path

import pytest
import zstandard
from tarn.cli.failures import Misuse
from tarn.cli.importing import split_records
from tarn.cli.importing.split_records import CSV, NDJSON, PACK, parts
from tarn.cli.input.files import open_input

HEADER = ["entity_id", "prop", "schema", "value"]
ROWS = [["jane", "name", "Person", f'Jane "the\nfirst", {number}'] for number in range(200)]


def as_csv(rows: list[list[str]], header: list[str] | None = HEADER) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([*([header] if header else []), *rows])
    return out.getvalue().encode()


def bodies(path: Path, kind: str) -> list[bytes]:
    with open_input(str(path)) as source:
        return [part.body for part in parts(source, kind)]


def read(body: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(body.decode(), newline="")))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_records, "PART_BYTES", 1000)
    monkeypatch.setattr("tarn.cli.input.files.PIECE_BYTES", 300)
    monkeypatch.setattr("tarn.cli.input.files.HEAD_BYTES", 300)


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.csv", bytes), ("a.csv.gz", gzip.compress), ("a.csv.zst", zstandard.ZstdCompressor().compress)],
)
def test_every_part_has_the_header_and_complete_records(tmp_path: Path, name: str, compress):
    (tmp_path / name).write_bytes(compress(as_csv(ROWS)))

    part_bodies = bodies(tmp_path / name, CSV)

    assert len(part_bodies) > 5
    assert max(map(len, part_bodies)) < 1200
    assert all(read(body)[0] == HEADER for body in part_bodies)
    assert [row for body in part_bodies for row in read(body)[1:]] == ROWS


def test_record_longer_than_a_part_is_not_split(tmp_path: Path):
    rows = [ROWS[0], ["jane", "notes", "Person", 'long "\n' * 1000], ROWS[1]]
    (tmp_path / "a.csv").write_bytes(as_csv(rows))

    assert [row for body in bodies(tmp_path / "a.csv", CSV) for row in read(body)[1:]] == rows


def test_gzip_of_several_members_is_read_to_its_end(tmp_path: Path):
    text = as_csv(ROWS)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text[:2000]) + gzip.compress(text[2000:]))

    assert [row for body in bodies(tmp_path / "a.csv.gz", CSV) for row in read(body)[1:]] == ROWS


def test_pack_of_an_older_version_is_split_without_a_header(tmp_path: Path):
    (tmp_path / "a.pack").write_bytes(as_csv(ROWS, header=None))

    assert [row for body in bodies(tmp_path / "a.pack", PACK) for row in read(body)] == ROWS
    with pytest.raises(Misuse, match="is it a pack"):
        bodies(tmp_path / "a.pack", CSV)


def test_ndjson_is_split_at_line_ends(tmp_path: Path):
    text = b"".join(b'{"value": "a \\" quote %d"}\n' % number for number in range(200))
    (tmp_path / "a.ndjson").write_bytes(text)

    part_bodies = bodies(tmp_path / "a.ndjson", NDJSON)

    assert (b"".join(part_bodies), len(part_bodies) > 3) == (text, True)


def test_truncated_file_and_unclosed_quote_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(as_csv(ROWS))[:-20])
    with pytest.raises(Misuse, match="is truncated"):
        bodies(tmp_path / "a.csv.gz", CSV)
    monkeypatch.setattr(split_records, "LONGEST_RECORD", 3000)
    (tmp_path / "b.csv").write_bytes(as_csv([]) + b'jane,name,Person,"' + b"Jane\n" * 1000)
    with pytest.raises(Misuse, match="is a closing quote missing"):
        bodies(tmp_path / "b.csv", CSV)
