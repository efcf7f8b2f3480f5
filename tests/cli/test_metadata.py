"""Metadata from the command line: files, assignments and options."""

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
    return file  # type: ignore[return-value]  # has the attributes that are used


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
def test_value_has_a_type_of_json(text: str, value: Any):
    parsed = parse(text)

    assert (parsed, type(parsed)) == (value, type(value))


def test_later_sources_take_precedence():
    metadata = read_metadata(document("title: file\nsummary: file\nurl: file"), ["title=set", "summary=set"], title="t")

    assert metadata.body() == {"title": "t", "summary": "set", "url": "file"}


def test_fields_that_only_the_server_sets_are_ignored_in_a_file():
    metadata = read_metadata(document('{"name": "a", "id": "1", "created": "now", "title": "A"}'), None)

    assert metadata.body() == {"title": "A"}


def test_dotted_field_keeps_its_siblings_and_sends_no_other_field():
    current = {"title": "A", "policy": {"maintain": True, "retention": {"count": 5, "days": 9}}, "publisher": None}
    metadata = read_metadata(None, ["policy.retention.days=30", "publisher.name=Us"])

    assert metadata.extends == {"policy", "publisher"}
    assert metadata.body(current) == {
        "policy": {"maintain": True, "retention": {"count": 5, "days": 30}},
        "publisher": {"name": "Us"},
    }
    assert current["policy"] == {"maintain": True, "retention": {"count": 5, "days": 9}}


def test_field_of_a_file_replaces_the_current_one_although_a_dotted_field_extends_it():
    metadata = read_metadata(document("policy: {maintain: false}"), ["policy.exports=off"])

    assert metadata.extends == set()
    assert metadata.body({"policy": {"retention": {"count": 1}}}) == {"policy": {"maintain": False, "exports": "off"}}


@pytest.mark.parametrize("text", ["title", "=value", "a..b=1", ".a=1", "tags=[a", "title={"])
def test_malformed_assignment_is_misuse(text: str):
    with pytest.raises(Misuse, match="--set"):
        read_metadata(None, [text])


def test_assignment_to_a_field_of_a_scalar_is_misuse():
    with pytest.raises(Misuse, match="title has no fields of its own"):
        read_metadata(None, ["title=a", "title.b=c"]).body()


@pytest.mark.parametrize("text", ["- a\n- b", "just text", "{", ""])
def test_file_without_fields_is_misuse(text: str):
    with pytest.raises(Misuse, match=r"config\.yml"):
        read_metadata(document(text), None)
