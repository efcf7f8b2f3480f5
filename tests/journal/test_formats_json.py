"""NDJSON and JSON: records, bad records, and where reading stops."""

import json
from io import BytesIO

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tarn.errors import FieldError, InvalidFormat
from tarn.journal.formats import BadRecord, entity_records, statement_rows

from tests.journal.test_formats import JSON, LONGEST, NDJSON, NO_DEADLINE, ChunkedBody, cut, parse_all, records, rows

TOO_LONG = "longer than 20 bytes"
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


def stops_at(body: bytes) -> tuple[FieldError, list[tuple]]:
    """Return where and why an entity body cannot be read further, and the records before that."""
    seen: list = []
    with pytest.raises(InvalidFormat) as stopped:
        seen.extend(entity_records(BytesIO(body), JSON, LONGEST))
    (fault,) = stopped.value.members["errors"]
    return fault, seen


# NDJSON


def test_blank_lines_and_carriage_returns_are_dropped_but_counted_in_line_numbers():
    assert records(b'\n{"a":1}\r\n\r\n\n{"b":2}\n{"c":3}', NDJSON) == [
        (2, b'{"a":1}'),
        (5, b'{"b":2}'),
        (6, b'{"c":3}'),
    ]


def test_lines_may_all_end_in_carriage_returns():
    assert records(b"{}\r\n" * 5, NDJSON) == [(number, b"{}") for number in range(1, 6)]


def test_a_line_over_the_limit_is_bad_and_the_next_one_is_read():
    body = b'{"a":1}\n' + b"x" * 21 + b"\n" + b"y" * 20 + b"\n" + b"z" * 5000
    assert records(body, NDJSON, 20) == [
        (1, b'{"a":1}'),
        ("bad", 2, TOO_LONG, None),
        (3, b"y" * 20),
        ("bad", 4, TOO_LONG, None),
    ]


@pytest.mark.parametrize("media_type", [NDJSON, "application/json+ftm"])
@NO_DEADLINE
@given(before=st.integers(0, 300), after=st.integers(0, 3))
def test_records_are_numbered_across_an_over_long_line(media_type: str, before: int, after: int):
    body = b"\n".join([b"{}"] * before + [b"x" * 21] + [b"{}"] * after)
    items = records(body, media_type, 20)
    assert [item[0] for item in items if item[0] != "bad"] == [
        *range(1, before + 1),
        *range(before + 2, before + after + 2),
    ]
    assert items[before] == ("bad", before + 1, TOO_LONG, None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"value": "\xff"}', "not valid JSON"),
        (b"nonsense", "not valid JSON"),
        (b"[" * 5000 + b"]" * 5000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"1", "not a JSON object"),
        (b"null", "not a JSON object"),
    ],
)
def test_a_broken_line_among_many_is_bad_and_the_others_are_rows(line: bytes, reason: str):
    lines = [b'{"id": "a"}'] * 10_000
    lines[7_654] = line
    items = list(statement_rows(BytesIO(b"\n".join(lines)), NDJSON, LONGEST))
    (bad,) = [item for item in items if isinstance(item, BadRecord)]
    assert (bad.line, bad.reason[: len(reason)]) == (7_655, reason)
    assert [item[0] for item in items if isinstance(item, tuple)] == [n for n in range(1, 10_001) if n != 7_655]


# JSON


@NO_DEADLINE
@given(values=st.lists(VALUES, max_size=8), indent=st.sampled_from([None, 0, 3]))
def test_elements_of_an_array_are_split_correctly(values: list, indent: int | None):
    items = records(json.dumps(values, indent=indent).encode(), JSON)
    assert [(number, json.loads(text)) for number, text in items] == list(enumerate(values, 1))


@NO_DEADLINE
@given(
    values=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=4),
    between=st.sampled_from(["", "\n", " \r\n\t"]),
)
def test_concatenated_objects_are_split_correctly(values: list, between: str):
    items = records(between.join(json.dumps(value, ensure_ascii=False) for value in values).encode(), JSON)
    assert [(number, json.loads(text)) for number, text in items] == list(enumerate(values, 1))


@pytest.mark.parametrize("body", [b"[]", b" [ \n ] \n", b"", b" \n\t"])
def test_empty_array_has_no_elements(body: bytes):
    assert records(body, JSON) == []


@pytest.mark.parametrize("body", [b'{"id": "a"}', b'{\n  "id": "a"\n}\n', b' \n{"id":"a"}'])
def test_single_object_is_one_unchanged_element(body: bytes):
    assert records(body, JSON) == [(1, body.strip())]


def test_elements_that_are_not_objects_do_not_stop_the_stream():
    body = b'[1, -2.5e3, "a, ]", null, true, nonsense, {"id": "a"}, []]'
    elements = [b"1", b"-2.5e3", b'"a, ]"', b"null", b"true", b"nonsense", b'{"id": "a"}', b"[]"]
    assert records(body, JSON) == list(enumerate(elements, 1))
    bad = [item[1] for item in rows(body, JSON) if item[0] == "bad"]
    assert bad == [1, 2, 3, 4, 5, 6, 8]


def test_an_element_over_the_limit_is_bad_and_the_next_one_is_read():
    body = orjson.dumps(["x" * 18, "x" * 19, {"a": ["y" * 5000]}, "\\" * 5000, 10**18, {"id": "a"}])
    assert records(body, JSON, 20) == [
        (1, b'"' + b"x" * 18 + b'"'),
        ("bad", 2, TOO_LONG, None),
        ("bad", 3, TOO_LONG, None),
        ("bad", 4, TOO_LONG, None),
        (5, b"1000000000000000000"),
        (6, b'{"id":"a"}'),
    ]


def test_an_object_over_the_limit_is_bad_and_the_next_one_is_read():
    assert records(b'{"a": "' + b"x" * 3_000_000 + b'"} {}', JSON, 20) == [("bad", 1, TOO_LONG, None), (2, b"{}")]


def test_deep_nesting_is_an_element_like_any_other():
    deep = b'[{"a":' * 10_000 + b'"}]"' + b"}]" * 10_000
    assert records(b"[" + deep + b",{}]", JSON, len(deep)) == [(1, deep), (2, b"{}")]


@NO_DEADLINE
@given(values=st.lists(VALUES, max_size=3), depth=st.integers(1, 20), sizes=st.lists(st.integers(1, 40), min_size=1))
def test_elements_of_any_depth_are_split_correctly_in_any_chunks(values: list, depth: int, sizes: list[int]):
    for level in range(depth):
        values = [values] if level % 3 else [{"a]": values}, "}", *values[:1]]
    body = json.dumps([values, {}, values]).encode()
    items = parse_all(entity_records(ChunkedBody(cut(body, sizes)), JSON, len(body)))
    assert [(number, json.loads(text)) for number, text in items] == [(1, values), (2, {}), (3, values)]


def test_unclosed_deep_nesting_is_refused():
    assert stops_at(b"[" + b"[" * 100_000)[0] == FieldError(line=1, reason="the text is cut off")


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        (b"[1 2]", 1, "expected , or ] after the element"),
        (b"[{}{}]", 1, "expected , or ] after the element"),
        (b'[{} "a"]', 1, "expected , or ] after the element"),
        (b'[a"b"]', 1, "expected , or ] after the element"),
        (b"[{}}]", 1, "expected , or ] after the element"),
        (b"[1,,2]", 2, "expected an element"),
        (b"[,1]", 1, "expected an element"),
        (b"[1,]", 2, "expected an element"),
        (b"[}]", 1, "expected an element"),
        (b"[:]", 1, "expected an element"),
        (b"[", 1, "the text is cut off"),
        (b"[{}", 1, "the array is cut off"),
        (b"[1", 1, "the text is cut off"),
        (b"[{},", 2, "the text is cut off"),
        (b'[{}, {"a": [', 2, "the text is cut off"),
        (b'[{}, "a', 2, "the text is cut off"),
        (b'[{}, "a\\', 2, "the text is cut off"),
        (b'[{"a": "b}, {}]', 1, "the text is cut off"),
        (b"[{}] {}", 2, "expected nothing after the array"),
        (b"[]]", 1, "expected nothing after the array"),
        (b"{},{}", 2, "expected an object"),
        (b"{} []", 2, "expected an object"),
        (b"{} x", 2, "expected an object"),
        (b"5", 1, "expected an object"),
        (b'"a"', 1, "expected an object"),
        (b"{", 1, "the text is cut off"),
        (b'{"id": "a"} {"id": ', 2, "the text is cut off"),
    ],
)
def test_invalid_json_stops_the_stream_and_names_the_element(body: bytes, line: int, reason: str):
    fault, _ = stops_at(body)
    assert fault == FieldError(line=line, reason=reason)


def test_elements_of_a_truncated_array_are_read():
    _, seen = stops_at(b'[{"id": "a"}, {"id": "b"}, {"i')
    assert seen == [(1, b'{"id": "a"}'), (2, b'{"id": "b"}')]
