"""Properties of every format: a round trip through FtM's own writers, independent of how bytes are chunked."""

from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

import orjson
import pytest
from followthemoney.statement import Statement
from followthemoney.statement.serialize import write_statements
from hypothesis import given, settings
from hypothesis import strategies as st
from tarn.errors import InvalidFormat, UnsupportedMediaType
from tarn.journal.formats import ENTITY_TYPES, STATEMENT_TYPES, BadRecord, entity_records, statement_rows

LONGEST = 1 << 16
NDJSON, JSON, CSV, PACK = "application/x-ndjson", "application/json", "text/csv", "application/x-ftm-pack"

Outcome = tuple[Any, ...]

NO_DEADLINE = settings(deadline=None)


class ChunkedBody:
    """A body that arrives in these chunks, whatever size is requested."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        piece = self._rest or next(self._pieces, b"")
        self._rest = piece[size:]
        return piece[:size]


class UnclosedBuffer(BytesIO):
    """A buffer that stays open when FtM's text wrapper closes it."""

    def close(self) -> None:
        self.flush()


def cut(body: bytes, sizes: list[int]) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        for size in sizes:
            if piece := body[at : at + size]:
                yield piece
            at += size


def parse_all(items: Iterator[Any]) -> list[Outcome]:
    """Return everything that a parser yields and the error that it raises, as comparable values."""
    seen: list[Outcome] = []
    try:
        for item in items:
            seen += [("bad", item.line, item.reason, item.field)] if isinstance(item, BadRecord) else [item]
    except InvalidFormat as error:
        seen.append(("broken", error.detail, error.members["errors"]))
    return seen


def rows(body: bytes, media_type: str, longest: int = LONGEST) -> list[Outcome]:
    return parse_all(statement_rows(BytesIO(body), media_type, longest))


def records(body: bytes, media_type: str, longest: int = LONGEST) -> list[Outcome]:
    return parse_all(entity_records(BytesIO(body), media_type, longest))


def written(statements: list[Statement], form: str) -> bytes:
    body = UnclosedBuffer()
    write_statements(body, form, statements)
    return body.getvalue()


def as_statements(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Return the rows as FtM statements; fail on anything but rows."""
    return [dict(Statement.from_dict(row).to_csv_row()) for _, row in outcomes]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ['say "hi"', "two\nlines", "two\r\nlines", "a\rb", "\r", "a,b", "😀", "\\", '"', "x\x00y", "\u2028"]
)
STATEMENT = st.builds(
    Statement,
    entity_id=st.text("abc-", min_size=1),
    canonical_id=st.none(),
    prop=st.sampled_from(["name", "alias", "notes", "id"]),
    schema=st.sampled_from(["Person", "Company"]),
    value=TEXT,
    dataset=st.just("test"),
    lang=st.sampled_from([None, "eng"]),
    original_value=st.none() | TEXT,
    first_seen=st.sampled_from([None, "2024-01-01T00:00:00"]),
    last_seen=st.sampled_from([None, "2024-02-01T00:00:00"]),
    external=st.booleans(),
    origin=st.sampled_from([None, "crawl"]),
)
STATEMENTS = st.lists(STATEMENT, max_size=6, unique_by=lambda statement: statement.id)


@pytest.mark.parametrize(("form", "media_type"), [("json", NDJSON), ("json", JSON), ("csv", CSV), ("pack", PACK)])
@NO_DEADLINE
@given(statements=STATEMENTS)
def test_statements_of_ftms_writer_are_read_unchanged(form: str, media_type: str, statements: list[Statement]):
    parsed = as_statements(rows(written(statements, form), media_type))
    assert parsed == [dict(statement.to_csv_row()) for statement in statements]


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
# Text similar to each format, so that chunk boundaries are in every position.
NEARLY_JSON = st.lists(
    st.sampled_from(["{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "1", "null", '{"a": "b"}', "é", '"x\\""'])
).map("".join)
NEARLY_CSV = st.lists(st.sampled_from(['"', '""', ",", "\n", "\r", "\r\n", "a", "é", '"x"', "a,b,c,d\n"])).map("".join)


@NO_DEADLINE
@given(body=st.text(st.sampled_from('{}"\n\r a\ufeff')), sizes=SIZES, longest=st.integers(1, 12))
def test_lines_do_not_depend_on_chunks(body: str, sizes: list[int], longest: int):
    split = entity_records(ChunkedBody(cut(body.encode(), sizes)), NDJSON, longest)
    assert parse_all(split) == records(body.encode(), NDJSON, longest)


@NO_DEADLINE
@given(body=NEARLY_JSON, sizes=SIZES, longest=st.integers(1, 12), array=st.booleans())
def test_elements_do_not_depend_on_chunks(body: str, sizes: list[int], longest: int, array: bool):
    content = (f"[{body}]" if array else body).encode()
    split = entity_records(ChunkedBody(cut(content, sizes)), JSON, longest)
    assert parse_all(split) == records(content, JSON, longest)


@NO_DEADLINE
@given(body=NEARLY_CSV, sizes=SIZES, longest=st.integers(28, 40))
def test_csv_does_not_depend_on_chunks(body: str, sizes: list[int], longest: int):
    content = b"entity_id,prop,schema,value\n" + body.encode()
    assert parse_all(statement_rows(ChunkedBody(cut(content, sizes)), CSV, longest)) == rows(content, CSV, longest)


@NO_DEADLINE
@given(body=NEARLY_CSV, sizes=SIZES, longest=st.integers(1, 40))
def test_pack_does_not_depend_on_chunks(body: str, sizes: list[int], longest: int):
    content = body.encode()
    assert parse_all(statement_rows(ChunkedBody(cut(content, sizes)), PACK, longest)) == rows(content, PACK, longest)


@NO_DEADLINE
@given(statements=STATEMENTS, sizes=SIZES, form=st.sampled_from([("json", JSON), ("csv", CSV), ("pack", PACK)]))
def test_statements_do_not_depend_on_chunks(statements, sizes: list[int], form: tuple[str, str]):
    body = written(statements, form[0])
    assert parse_all(statement_rows(ChunkedBody(cut(body, sizes)), form[1], LONGEST)) == rows(body, form[1])


@pytest.mark.parametrize("media_type", STATEMENT_TYPES)
def test_an_empty_body_has_no_statements(media_type: str):
    assert rows(b"", media_type) == []


@pytest.mark.parametrize("media_type", ENTITY_TYPES)
def test_an_empty_body_has_no_entities(media_type: str):
    assert records(b"", media_type) == []


@pytest.mark.parametrize("media_type", [NDJSON, JSON])
def test_a_byte_order_mark_is_not_part_of_the_first_record(media_type: str):
    assert records(b'\xef\xbb\xbf{"id": "a"}', media_type) == [(1, b'{"id": "a"}')]


@pytest.mark.parametrize(("parse", "supported"), [(entity_records, ENTITY_TYPES), (statement_rows, STATEMENT_TYPES)])
def test_unknown_type_is_refused_with_the_supported_ones(parse, supported: tuple[str, ...]):
    with pytest.raises(UnsupportedMediaType) as refused:
        parse(BytesIO(), "image/png", LONGEST)
    assert refused.value.members == {"supported": list(supported)}


def test_types_are_those_of_the_api():
    assert ENTITY_TYPES == (NDJSON, "application/json+ftm", JSON)
    parquet, stream = "application/vnd.apache.parquet", "application/vnd.apache.arrow.stream"
    assert (NDJSON, JSON, CSV, PACK, parquet, stream) == STATEMENT_TYPES


@pytest.mark.parametrize(("media_type", "joined"), [(NDJSON, b"\n"), (JSON, b"\n"), (JSON, b"")])
def test_statement_has_every_field_that_was_sent(media_type: str, joined: bytes):
    sent = [{"entity_id": "a", "value": 5, "unknown": None}, {"id": "b"}]
    assert rows(joined.join(map(orjson.dumps, sent)), media_type) == [(1, sent[0]), (2, sent[1])]
