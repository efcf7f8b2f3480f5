"""Metadata from the command line."""

import io
from typing import Any

import pytest
import typer
from tarn.cli.commands.datasets.metadata import read_metadata
from tarn.cli.failures import Misuse
from tarn.cli.input.yaml_reader import parse


def document(text: str) -> typer.FileText:
    file = io.StringIO(text)
    file.name = "config.yml"
    return file  # type: ignore[return-value]  # all that is read of one


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Donations", "Donations"),
        ("two: words are a field", {"two": "words are a field"}),
        ("no", "no"),
        ("yes", "yes"),
        ("2002-01-01", "2002-01-01"),
        ("010", "010"),
        ("12:30", "12:30"),
        ("true", True),
        ("null", None),
        ("", None),
        ("-3", -3),
        ("1.5e3", 1500.0),
        ("[money, no]", ["money", "no"]),
        ("{a: 1}", {"a": 1}),
        ('{\n\t"a": ["\\ud83d\\ude00"]\n}', {"a": ["😀"]}),
        ('"12"', "12"),
    ],
)
def test_value_is_read_in_the_types_of_json(text: str, value: Any):
    parsed = parse(text)

    assert (parsed, type(parsed)) == (value, type(value))


def test_later_sources_win():
    metadata = read_metadata(document("title: file\nsummary: file\nurl: file"), ["title=set", "summary=set"], title="t")

    assert metadata.body() == {"title": "t", "summary": "set", "url": "file"}


def test_what_the_server_alone_sets_is_passed_over_in_a_file():
    metadata = read_metadata(document('{"name": "a", "id": "1", "created": "now", "title": "A"}'), None)

    assert metadata.body() == {"title": "A"}


def test_dotted_field_keeps_the_rest_of_what_it_is_in_and_sends_nothing_else():
    current = {"title": "A", "policy": {"maintain": True, "retention": {"count": 5, "days": 9}}, "publisher": None}
    metadata = read_metadata(None, ["policy.retention.days=30", "publisher.name=Us"])

    assert metadata.extends == {"policy", "publisher"}
    assert metadata.body(current) == {
        "policy": {"maintain": True, "retention": {"count": 5, "days": 30}},
        "publisher": {"name": "Us"},
    }
    assert current["policy"] == {"maintain": True, "retention": {"count": 5, "days": 9}}


def test_field_of_a_file_is_whole_also_when_a_dotted_one_goes_into_it():
    metadata = read_metadata(document("policy: {maintain: false}"), ["policy.exports=off"])

    assert metadata.extends == set()
    assert metadata.body({"policy": {"retention": {"count": 1}}}) == {"policy": {"maintain": False, "exports": "off"}}


@pytest.mark.parametrize("text", ["title", "=value", "a..b=1", ".a=1", "tags=[a", "title={"])
def test_assignment_that_cannot_be_understood_is_misuse(text: str):
    with pytest.raises(Misuse, match="--set"):
        read_metadata(None, [text])


def test_assignment_into_what_has_no_fields_is_misuse():
    with pytest.raises(Misuse, match="title has no fields of its own"):
        read_metadata(None, ["title=a", "title.b=c"]).body()


@pytest.mark.parametrize("text", ["- a\n- b", "just text", "{", ""])
def test_file_without_fields_is_misuse(text: str):
    with pytest.raises(Misuse, match=r"config\.yml"):
        read_metadata(document(text), None)
