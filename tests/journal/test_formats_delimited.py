"""CSV and pack: records, bad records, and where reading stops."""

import csv
from io import BytesIO, StringIO

import pytest
from followthemoney.statement.serialize import CSV_COLUMNS
from hypothesis import assume, given
from hypothesis import strategies as st
from tarn.errors import FieldError, InvalidFormat
from tarn.journal.formats import IgnoredColumns, statement_rows
from tarn.journal.formats.csv_lines import csv_records

from tests.journal.test_formats import CSV, LONGEST, NO_DEADLINE, PACK, ChunkedBody, cut, parse_all, rows

HEADER = b"entity_id,prop,schema,value\n"
JANE = {"entity_id": "jane", "prop": "name", "schema": "Person", "value": "Jane", "external": False}
PACK_HEADER = b"entity_id,prop,value,dataset,lang,original_value,origin,external,first_seen,last_seen,id\n"
BITS = st.lists(st.sampled_from(['"', '""', ",", "a", "é", '"x"', ',"'])).map("".join)


def stops_at(body: bytes, media_type: str = CSV, longest: int = LONGEST) -> FieldError:
    with pytest.raises(InvalidFormat) as stopped:
        list(statement_rows(BytesIO(body), media_type, longest))
    (fault,) = stopped.value.members["errors"]
    return fault


@NO_DEADLINE
@given(lines=st.lists(BITS), end=st.sampled_from(["\n", "\r\n"]))
def test_fields_equal_those_of_pythons_csv_reader(lines: list[str], end: str):
    text = "".join(line + end for line in lines)
    items = parse_all(csv_records(BytesIO(text.encode()), LONGEST))
    assume(not items or items[-1][0] != "broken")
    assert [fields for _, fields in items] == [row for row in csv.reader(StringIO(text, newline="")) if row]


@NO_DEADLINE
@given(
    line=BITS.filter(lambda line: len(line.encode()) > 1),
    end=st.sampled_from(["\n", "\r\n"]),
    sizes=st.lists(st.integers(1, 5), min_size=1),
    share=st.floats(0, 1),
)
def test_quotes_of_an_over_long_record_are_parsed_like_in_pythons_csv_reader(line, end, sizes, share):
    left_open = len(list(csv.reader([line + end, "x\n"]))) == 1
    longest = 2 + int(share * (len(line.encode()) - 2))
    items = parse_all(csv_records(ChunkedBody(cut((line + end + "x\n").encode(), sizes)), longest))
    assert [item[0] for item in items] == (["broken"] if left_open else ["bad", 2])


# CSV


def test_columns_may_come_in_any_order_and_an_empty_field_is_none():
    body = b'lang,value,schema,prop,external,entity_id,id,first_seen\n"",Jane,Person,name,,jane,,\n'
    assert rows(body, CSV) == [(2, JANE | {"lang": None, "id": None, "first_seen": None})]


def test_empty_required_field_is_an_empty_text():
    assert rows(HEADER + b"jane,name,Person,\n", CSV) == [(2, JANE | {"value": ""})]


@pytest.mark.parametrize(
    "body", [HEADER + b"jane,name,Person,Jane", b"\xef\xbb\xbf" + HEADER + b"jane,name,Person,Jane\r\n"]
)
def test_the_end_of_the_last_line_and_a_byte_order_mark_do_not_matter(body: bytes):
    assert rows(body, CSV) == [(2, JANE)]


def test_a_record_has_the_line_on_which_it_begins():
    body = HEADER + b'\njane,name,Person,"a\nb"\n\njane,name,Person,"a\r\nb"\njane,name,Person,Jane\n'
    assert [(line, row["value"]) for line, row in rows(body, CSV)] == [(3, "a\nb"), (6, "a\r\nb"), (8, "Jane")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t", True),
        ("True", True),
        ("yes", True),
        ("1", True),
        ("f", False),
        ("FALSE", False),
        ("no", False),
        ("0", False),
    ],
)
def test_external_is_read_as_ftm_reads_booleans(text: str, expected: bool):
    body = f"entity_id,prop,schema,value,external\njane,name,Person,Jane,{text}\n".encode()
    assert rows(body, CSV) == [(2, JANE | {"external": expected})]


def test_external_that_is_not_a_boolean_is_bad_and_the_next_record_is_read():
    body = b"entity_id,prop,schema,value,external\njane,name,Person,Jane,maybe\njane,name,Person,Jane,f\n"
    assert rows(body, CSV) == [("bad", 2, "neither true nor false", "external"), (3, JANE)]


def test_a_record_of_too_few_or_too_many_fields_among_many_is_bad_and_the_others_are_rows():
    lines = [b"jane,name,Person,Jane\n"] * 5_000
    lines[1_234] = b"jane,name,Person\n"
    lines[4_321] = b"jane,name,Person,Jane,Doe\n"
    items = rows(HEADER + b"".join(lines), CSV)
    assert items[1_234] == ("bad", 1_236, "3 fields, not 4", None)
    assert items[4_321] == ("bad", 4_323, "5 fields, not 4", None)
    assert len([row for line, row in (item[:2] for item in items) if row == JANE]) == 4_998


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"entity_id,schema\n", "the header lacks columns: prop, value"),
        (b"entity_id,prop,schema,value,prop\n", "the header repeats columns: prop"),
        (b"jane,name,Person,Jane\n", "the header lacks columns: entity_id, prop, schema, value"),
    ],
)
def test_header_that_is_not_of_statements_is_refused_with_the_reason(header: bytes, reason: str):
    assert stops_at(b"\n" + header) == FieldError(line=2, reason=reason)


def test_unknown_columns_are_ignored_and_named():
    body = b"size,entity_id,prop,schema,value,colour,size\n1,jane,name,Person,Jane,red,2\n"
    assert rows(body, CSV) == [IgnoredColumns(("size", "colour")), (2, JANE)]


def test_a_header_of_very_many_columns_is_refused():
    fault = stops_at(b",".join([b"entity_id,prop,schema,value", *[b"x"] * 1000]) + b"\n")
    assert fault.reason == "the header has 1004 columns, at most 1000 are read"


def test_every_column_that_ftm_writes_is_known():
    header = ",".join(reversed(CSV_COLUMNS)).encode()
    assert rows(header, CSV) == []


def test_bytes_that_are_not_utf8_stop_the_stream_and_name_the_line():
    fault = stops_at(HEADER + b'jane,name,Person,"a\nb"\njane,name,Person,\xff\n')
    assert fault == FieldError(line=4, reason="not valid UTF-8: invalid start byte")


def test_unclosed_quote_at_the_end_stops_the_stream_where_it_was_opened():
    assert stops_at(HEADER + b'jane,name,Person,"Jane\n\nand so on\n') == FieldError(
        line=2, reason="a quote is not closed"
    )


def test_quote_that_is_open_over_the_limit_stops_the_stream():
    body = HEADER + b'jane,name,Person,"Jane\n' + b"jane,name,Person,Jane\n" * 1_000
    assert stops_at(body, longest=200) == FieldError(line=2, reason="a quote is not closed within 200 bytes")


def test_a_quote_open_at_the_end_of_an_over_long_line_stops_the_stream():
    body = HEADER + b'jane,name,Person,"' + b"x" * 300 + b"\n" + b'y"\n'
    assert stops_at(body, longest=200) == FieldError(line=2, reason="a quote is not closed within 200 bytes")


@pytest.mark.parametrize(
    "value",
    [b"x" * 300, b'"' + b"x" * 300 + b'"', b'"' + b'""' * 300 + b'"', b'"a\n' + b"x" * 300 + b'"', b'x" ' * 100],
)
def test_an_over_long_record_is_bad_and_the_next_one_is_read(value: bytes):
    body = HEADER + b"jane,name,Person," + value + b"\njane,name,Person,Jane\n"
    items = rows(body, CSV, 200)
    assert items == [("bad", 2, "longer than 200 bytes", None), (3 + value.count(b"\n"), JANE)]


def test_an_over_long_record_at_the_end_is_bad():
    body = HEADER + b'jane,name,Person,"' + b"x" * 300 + b'"'
    assert rows(body, CSV, 200) == [("bad", 2, "longer than 200 bytes", None)]


def test_an_over_long_header_stops_the_stream():
    assert stops_at(HEADER, longest=10) == FieldError(line=1, reason="the first record is longer than 10 bytes")


def test_a_field_of_more_than_ftms_own_limit_is_read():
    value = b"x" * (31 << 20)
    ((_, row),) = rows(HEADER + b"jane,name,Person," + value, CSV, 1 << 26)
    assert len(row["value"]) == 31 << 20


# Pack


def test_a_pack_with_a_header_has_the_columns_it_names():
    body = PACK_HEADER + b"jane,Person:name,Jane,test,,,crawl,t,2024-01-01,,abc\n"
    expected = JANE | {"canonical_id": "jane", "dataset": "test", "lang": None, "original_value": None}
    expected |= {"origin": "crawl", "external": True, "first_seen": "2024-01-01", "last_seen": None, "id": "abc"}
    assert rows(body, PACK) == [(2, expected)]


def test_pack_without_a_header_has_the_columns_of_older_versions():
    body = b"jane,Person:name,Jane,test,eng,jane,t,,2024-01-01,2024-02-01\n"
    expected = JANE | {"canonical_id": "jane", "dataset": "test", "lang": "eng", "original_value": "jane"}
    expected |= {"first_seen": "2024-01-01", "last_seen": "2024-02-01"}
    expected |= {"origin": None}
    assert rows(body * 2, PACK) == [IgnoredColumns(("target",)), (1, expected), (2, expected)]


def test_a_pack_without_a_header_may_have_origins_where_older_ones_have_targets():
    body = b"jane,Person:name,Jane,test,,,crawl,,,\njane,Person:name,Jane,test,,,f,,,\n"
    first, second = rows(body, PACK)
    assert (first[1]["origin"], second[1]["origin"]) == ("crawl", None)


def test_pack_without_a_header_may_have_the_current_columns():
    ((_, row),) = rows(b"jane,Person:name,Jane,test,eng,,crawl,t,2024-01-01,2024-02-01,abc\n", PACK)
    assert (row["origin"], row["external"], row["id"]) == ("crawl", True, "abc")


@pytest.mark.parametrize("text", ["", "f", "true", "T"])
def test_external_of_a_pack_is_true_only_for_t(text: str):
    ((_, row),) = rows(b"entity_id,prop,value,external\njane,Person:name,Jane," + text.encode(), PACK)
    assert row["external"] is False


@pytest.mark.parametrize("prop", [b"name", b":name", b"Person:", b""])
def test_a_property_without_its_schema_is_bad_and_the_next_record_is_read(prop: bytes):
    body = b"entity_id,prop,value\njane," + prop + b",Jane\njane,Person:name,Jane\n"
    bad, good = rows(body, PACK)
    assert bad == ("bad", 2, "not of the form Schema:prop", "prop")
    assert good == (3, JANE | {"canonical_id": "jane"})


def test_a_record_of_an_old_pack_with_too_few_fields_is_bad():
    assert rows(b"jane,Person:name,Jane\n", PACK) == [("bad", 1, "3 fields, not 10", None)]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"entity_id,prop\n", "the header lacks columns: value"),
        (b"entity_id,prop,value,value\n", "the header repeats columns: value"),
    ],
)
def test_header_of_a_pack_has_the_same_requirements(header: bytes, reason: str):
    assert stops_at(header, PACK) == FieldError(line=1, reason=reason)
