"""Splitting of delimited files: only between records, as Python's csv module parses them."""

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.errors import InvalidFormat
from tarn.pipeline.tasks.delimited import Dialect, FilePiece, detect_delimiter, is_transparent, pieces

FORM = Dialect("utf-8", ",")
TEXT = st.text(st.sampled_from('ab," \n\r\tü'), max_size=60)


def records(text: str) -> list[list[str]]:
    """Return the records as FtM reads them: all kinds of line ends are equal."""
    return list(csv.reader(io.StringIO(text, newline=None), skipinitialspace=True))


def cut(data: bytes, block: int, target: int, longest: int = 1000) -> list[FilePiece]:
    return list(pieces([data[at : at + block] for at in range(0, len(data), block)], FORM, target, longest))


@settings(max_examples=400, deadline=None)
@given(TEXT, st.integers(1, 30), st.integers(1, 30))
def test_pieces_have_the_records_of_the_whole_file(text: str, block: int, target: int):
    data = text.encode()

    pieces = cut(data, block, target)

    assert b"".join(piece.data for piece in pieces) == data
    assert [piece.start for piece in pieces] == [sum(len(one.data) for one in pieces[:at]) for at in range(len(pieces))]
    assert [row for piece in pieces for row in FORM.rows(FORM.decoded(piece.data)[0])] == records(text)


@pytest.mark.parametrize("block", [7, 64, 5000])
def test_unclosed_quote_affects_only_its_own_line(block: int):
    good = [f"{number},x\n".encode() for number in range(50)]
    data = b"".join(good[:20]) + b'bad,"not closed\n' + b"".join(good[20:])

    pieces = cut(data, block, target=50, longest=100)

    assert b"".join(piece.data for piece in pieces) == b"".join(good)
    assert [piece.start for piece in pieces if piece.is_skipped] == [len(b"".join(good[:20]))]


def test_many_unclosed_quotes_reject_the_file():
    line = b'"""x,"y"w,"v\n'
    assert list(csv.reader((line * 9).decode().splitlines(keepends=True)))[1:] == []

    with pytest.raises(InvalidFormat, match=r"more than 100 quotes are not closed within 1000 bytes.* at byte 1300"):
        cut(line * 1000, 512, target=100)


def test_record_in_many_blocks_is_parsed_a_few_times(monkeypatch: pytest.MonkeyPatch):
    parsed: list[int] = []
    complete_bytes = Dialect.complete_bytes

    def counted(form: Dialect, data: bytes) -> int:
        parsed.append(len(data))
        return complete_bytes(form, data)

    monkeypatch.setattr(Dialect, "complete_bytes", counted)
    data = b'1,"' + b"x\n" * 50_000 + b'"\n2,y\n'

    pieces = cut(data, 100, target=100, longest=200_000)

    assert b"".join(piece.data for piece in pieces) == data
    assert sum(parsed) < 5 * len(data)


@pytest.mark.parametrize("block", [7, 64])
def test_endless_line_is_omitted_and_not_buffered(block: int):
    data = b"1,x\n" + b"y" * 5000 + b"\n2,x\n"

    pieces = cut(data, block, target=50, longest=100)

    assert b"".join(piece.data for piece in pieces) == b"1,x\n2,x\n"
    assert sum(piece.is_skipped for piece in pieces) == 1
    assert pieces[-1].start == len(data) - 4


def test_quote_within_a_field_is_literal_and_pieces_stay_small():
    data = b'5" disk,x\n' * 1000

    assert len(cut(data, 100, target=100)) > 50


@pytest.mark.parametrize(
    ("encoding", "transparent"),
    [("utf-8", True), ("latin-1", True), ("cp1252", True), ("koi8-r", True), ("gb18030", True), ("shift_jis", True),
     ("utf-16", False), ("utf-32", False), ("utf-7", False), ("cp037", False), ("iso2022_jp", False), ("hz", False)],
)  # fmt: skip
def test_encoding_is_ascii_compatible_if_ascii_bytes_are_unchanged(encoding: str, transparent: bool):
    assert is_transparent(encoding) is transparent


@pytest.mark.parametrize(
    ("head", "columns", "delimiter"),
    [
        (b"a;b;c\n1,2;3;4\n", ["a", "b"], ";"),
        (b"a\tb\n", ["b"], "\t"),
        (b"a,b;c\n", ["a", "b;c"], ","),
        (b"a\n", ["a"], ","),
        (b'"a;b"|c\n', ["a;b", "c"], "|"),
        (b"", ["a"], ","),
    ],
)
def test_delimiter_is_the_one_for_which_the_header_has_the_columns(head: bytes, columns: list[str], delimiter: str):
    assert detect_delimiter(head, "utf-8", columns) == delimiter
