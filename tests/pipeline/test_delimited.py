"""Delimited files, cut: only between records, as Python's csv module knows them."""

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
    """As FtM reads them: line ends of any kind are one."""
    return list(csv.reader(io.StringIO(text, newline=None), skipinitialspace=True))


def cut(data: bytes, block: int, target: int, longest: int = 1000) -> list[FilePiece]:
    return list(pieces([data[at : at + block] for at in range(0, len(data), block)], FORM, target, longest))


@settings(max_examples=400, deadline=None)
@given(TEXT, st.integers(1, 30), st.integers(1, 30))
def test_pieces_hold_the_records_of_the_whole(text: str, block: int, target: int):
    data = text.encode()

    made = cut(data, block, target)

    assert b"".join(piece.data for piece in made) == data
    assert [piece.start for piece in made] == [sum(len(one.data) for one in made[:at]) for at in range(len(made))]
    assert [row for piece in made for row in FORM.rows(FORM.decoded(piece.data)[0])] == records(text)


@pytest.mark.parametrize("block", [7, 64, 5000])
def test_quote_that_is_not_closed_costs_its_own_line(block: int):
    good = [f"{number},x\n".encode() for number in range(50)]
    data = b"".join(good[:20]) + b'bad,"not closed\n' + b"".join(good[20:])

    made = cut(data, block, target=50, longest=100)

    assert b"".join(piece.data for piece in made) == b"".join(good)
    assert [piece.start for piece in made if piece.is_left_out] == [len(b"".join(good[:20]))]


def test_quotes_that_are_not_closed_end_the_file_when_there_are_many():
    line = b'"""x,"y"w,"v\n'
    assert list(csv.reader((line * 9).decode().splitlines(keepends=True)))[1:] == []

    with pytest.raises(InvalidFormat, match=r"more than 100 quotes are not closed within 1000 bytes.* at byte 1300"):
        cut(line * 1000, 512, target=100)


def test_record_that_comes_in_many_blocks_is_parsed_a_few_times(monkeypatch: pytest.MonkeyPatch):
    parsed: list[int] = []
    whole = Dialect.whole

    def counted(form: Dialect, data: bytes) -> int:
        parsed.append(len(data))
        return whole(form, data)

    monkeypatch.setattr(Dialect, "whole", counted)
    data = b'1,"' + b"x\n" * 50_000 + b'"\n2,y\n'

    made = cut(data, 100, target=100, longest=200_000)

    assert b"".join(piece.data for piece in made) == data
    assert sum(parsed) < 5 * len(data)


@pytest.mark.parametrize("block", [7, 64])
def test_line_without_an_end_is_left_out_and_not_held(block: int):
    data = b"1,x\n" + b"y" * 5000 + b"\n2,x\n"

    made = cut(data, block, target=50, longest=100)

    assert b"".join(piece.data for piece in made) == b"1,x\n2,x\n"
    assert sum(piece.is_left_out for piece in made) == 1
    assert made[-1].start == len(data) - 4


def test_quote_within_a_field_opens_nothing_and_pieces_stay_small():
    data = b'5" disk,x\n' * 1000

    assert len(cut(data, 100, target=100)) > 50


@pytest.mark.parametrize(
    ("encoding", "transparent"),
    [("utf-8", True), ("latin-1", True), ("cp1252", True), ("koi8-r", True), ("gb18030", True), ("shift_jis", True),
     ("utf-16", False), ("utf-32", False), ("utf-7", False), ("cp037", False), ("iso2022_jp", False), ("hz", False)],
)  # fmt: skip
def test_encoding_is_transparent_if_ascii_is_written_as_itself(encoding: str, transparent: bool):
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
def test_delimiter_is_the_one_under_which_the_header_names_the_columns(head: bytes, columns: list[str], delimiter: str):
    assert detect_delimiter(head, "utf-8", columns) == delimiter
