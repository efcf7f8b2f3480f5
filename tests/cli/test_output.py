"""Printed results, in a pipe and on a terminal."""

import re

import pytest
from tarn.cli.output.tables import CommandOutput

LONG = "x" * 300
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rich treat standard output as a narrow terminal."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_table_in_a_pipe_is_aligned_and_neither_truncated_nor_wrapped_nor_coloured(pipe, capsys):
    CommandOutput(False).table([{"id": LONG, "title": "a  [b]title[/b]"}, {"id": "y", "title": LONG}], "id", "title")

    assert capsys.readouterr().out.splitlines() == [
        f"id{' ' * 298}  title",
        f"{LONG}  a  [b]title[/b]",
        f"y{' ' * 299}  {LONG}",
    ]


def test_table_on_a_narrow_terminal_wraps_text_but_not_ids(terminal, capsys):
    CommandOutput(False).table([{"id": "0123456789" * 4, "title": "some words of a title"}], "id", "title")

    printed = capsys.readouterr().out
    lines = ESCAPES.sub("", printed).splitlines()
    assert "\x1b[" in printed
    assert lines[1].startswith("0123456789" * 4)
    assert len(lines) > 2


def test_record_has_its_name_first_dotted_names_for_nested_fields_and_no_empty_fields(pipe, capsys):
    document = {"id": "1", "policy": {"retention": {"days": 7.0}}, "tags": ["a", "b"], "name": "n", "on": True}

    CommandOutput(False).record({**document, "summary": None, "children": [], "title": ""}, etag='"e"')

    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["name", "n"],
        ["id", "1"],
        ["policy.retention.days", "7"],
        ["tags", "a, b"],
        ["on", "yes"],
        ["etag", '"e"'],
    ]


def test_record_has_a_line_for_each_document_of_a_list(pipe, capsys):
    CommandOutput(False).record(
        {"made": [{"name": "a.csv", "size": 1, "reason": None}, {"name": "b.csv", "of": {"seq": 2}}]}
    )

    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["made", "name a.csv, size 1"],
        ["made", "name b.csv, of.seq 2"],
    ]


def test_timestamp_is_shown_to_the_second(pipe, capsys):
    CommandOutput(False).table([{"at": "2030-01-31T12:00:00.123456Z"}], "at")

    assert capsys.readouterr().out == "at\n2030-01-31T12:00:00Z\n"


def test_control_characters_are_replaced(pipe, capsys):
    CommandOutput(False).table([{"title": "a\x1b[2Jb\x07c\nd"}], "title")
    CommandOutput(False).note("e\x1b]0;f")

    out, err = capsys.readouterr()
    assert out == "title\na\ufffd[2Jb\ufffdc d\n"
    assert err == "e\ufffd]0;f\n"


def test_json_is_the_document_of_the_api_without_notes(capsys):
    CommandOutput(True).record({"name": "ü", "empty": None}, etag="not of the API")
    CommandOutput(True).note("for people")

    out, err = capsys.readouterr()
    assert out == '{\n  "name": "ü",\n  "empty": null\n}\n'
    assert err == ""
