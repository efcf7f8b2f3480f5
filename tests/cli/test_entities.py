"""Entities from the command line: load, get, query and delete, with files and pipes, and broken connections."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.cli.conftest import TARN, Tarn
from tests.server import Server, clean_environment, running


def person(name: str, **properties: list[str]) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [name.title()], **properties}}


def ndjson(*entities: dict[str, Any]) -> str:
    return "".join(json.dumps(entity) + "\n" for entity in entities)


PEOPLE = ndjson(person("ann"), person("bob", nationality=["fr"]), person("cem"))
COMPANY = ndjson(
    {"id": "acme", "schema": "Company", "properties": {"name": ["Acme"]}},
    {"id": "owns", "schema": "Ownership", "properties": {"owner": ["ann"], "asset": ["acme"]}},
)


@pytest.fixture
def people(tarn: Tarn, dataset: str) -> str:
    """Create a dataset with three people of the origin `crawl`, and a company and its owner of `register`."""
    tarn("entities", "load", dataset, "-", "--origin", "crawl", stdin=PEOPLE)
    tarn("entities", "load", dataset, "-", "--origin", "register", stdin=COMPANY)
    return dataset


def query_ids(tarn: Tarn, *args: str, stdin: str | None = None) -> list[str]:
    return [json.loads(line)["id"] for line in tarn("entities", "query", *args, stdin=stdin).stdout.splitlines()]


def test_get_prints_fields_as_a_table_and_the_entity_as_json(tarn: Tarn, people: str):
    lines = dict(line.split(maxsplit=1) for line in tarn("entities", "get", people, "bob").stdout.splitlines())
    entity = tarn.json("entities", "get", people, "bob")

    assert (lines["caption"], lines["properties.nationality"], lines["origin"]) == ("Bob", "fr", "crawl")
    assert (entity["id"], entity["properties"]) == ("bob", {"name": ["Bob"], "nationality": ["fr"]})


def test_get_of_a_missing_entity_is_a_problem(tarn: Tarn, people: str):
    assert "(entity-not-found)" in tarn("entities", "get", people, "nobody", code=1).stderr
    assert "(entity-not-found)" in tarn("entities", "get", people, "ann", "--origin", "register", code=1).stderr
    assert "(entity-not-found)" in tarn("entities", "get", people, "ann", "--fresh", "snapshot", code=1).stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["acme", "ann", "bob", "cem", "owns"]),
        (["--schema", "Person"], ["ann", "bob", "cem"]),
        (["--schemata", "LegalEntity"], ["acme", "ann", "bob", "cem"]),
        (["--id", "cem", "--id", "acme", "--id", "x"], ["acme", "cem"]),
        (["--origin", "register"], ["acme", "owns"]),
        (["--limit", "2"], ["acme", "ann"]),
        (["--sort", "-id"], ["owns", "cem", "bob", "ann", "acme"]),
        (["--sort", "-id", "--schema", "Person", "--limit", "2"], ["cem", "bob"]),
        (["--where", '{"field": "prop:nationality", "op": "eq", "value": "fr"}'], ["bob"]),
        (["--where", '{"field": "id", "op": "ne", "value": "bob"}', "--schema", "Person"], ["ann", "cem"]),
        (["--fresh", "snapshot"], []),
    ],
)
def test_query_prints_a_line_for_each_matching_entity(tarn: Tarn, people: str, args: list[str], expected: list[str]):
    assert query_ids(tarn, people, *args) == expected


def test_paged_query_prints_the_same_as_a_streamed_one(tarn: Tarn, dataset: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tarn_client.connection.LARGEST_PAGE", 2)
    tarn("entities", "load", dataset, "-", stdin=ndjson(*(person(f"jürgen {number}") for number in range(7))))

    streamed = tarn("entities", "query", dataset).stdout

    assert tarn("entities", "query", dataset, "--sort", "id").stdout == streamed
    assert (
        tarn("entities", "query", dataset, "--sort", "id", "--limit", "5").stdout.splitlines()
        == (streamed.splitlines()[:5])
    )


def test_condition_is_read_from_a_file_or_standard_input(tarn: Tarn, people: str, tmp_path: Path):
    condition = json.dumps({"or": [{"field": "id", "op": "eq", "value": name} for name in ("ann", "cem")]})
    (tmp_path / "where.json").write_text(condition)

    assert query_ids(tarn, people, "--where", f"@{tmp_path}/where.json") == ["ann", "cem"]
    assert query_ids(tarn, people, "--where", "-", stdin=condition) == ["ann", "cem"]


def test_unreadable_condition_is_misuse_and_an_invalid_one_is_a_problem(tarn: Tarn, people: str):
    assert "--where is not valid JSON" in tarn("entities", "query", people, "--where", "{", code=2).stderr
    assert "nowhere cannot be read" in tarn("entities", "query", people, "--where", "@nowhere", code=2).stderr
    unknown = '{"field": "prop:nonsense", "op": "eq", "value": "x"}'
    assert "(schema-violation)" in tarn("entities", "query", people, "--where", unknown, code=1).stderr


def test_output_file_has_its_name_only_when_it_is_complete(tarn: Tarn, people: str, tmp_path: Path):
    complete, failed = tmp_path / "complete.ndjson", tmp_path / "failed.ndjson"

    printed = tarn("entities", "query", people, "-o", str(complete))
    tarn("entities", "query", "nonsense", "-o", str(failed), code=1)

    assert (printed.stdout, complete.read_text()) == ("", tarn("entities", "query", people).stdout)
    assert list(tmp_path.iterdir()) == [complete]
    assert "cannot be written" in tarn("entities", "query", people, "-o", str(tmp_path), code=2).stderr


def test_invalid_entity_is_reported_and_left_out_of_a_query(tarn: Tarn, people: str):
    strange = ndjson({"id": "ann", "schema": "Ownership", "properties": {}})
    tarn("entities", "load", people, "-", "--origin", "strange", stdin=strange)

    for order in ([], ["--sort", "id"]):
        result = tarn("entities", "query", people, "--id", "ann", "--id", "bob", *order)
        assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["bob"]
        named, summary = result.stderr.splitlines()
        assert named.startswith("tarn: the entity ann is left out: No common schema: ")
        assert summary == (
            "tarn: 1 entity is left out because its statements do not assemble: "
            f"`tarn entities invalid {people}` lists them"
        )


def test_invalid_entities_of_a_query_are_named_up_to_a_limit_and_counted(tarn: Tarn, dataset: str):
    names = [f"e{number:02}" for number in range(25)]
    for schema in ("Person", "Vessel"):
        some = ndjson(*({"id": name, "schema": schema, "properties": {}} for name in names))
        tarn("entities", "load", dataset, "-", "--origin", schema.lower(), stdin=some)
    tarn("entities", "load", dataset, "-", stdin=ndjson(person("ann")))

    for order in ([], ["--sort", "id"]):
        result = tarn("entities", "query", dataset, *order)
        *named, summary = result.stderr.splitlines()
        assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["ann"]
        assert [line.split()[3] for line in named] == names[:10]
        assert summary.startswith("tarn: 25 entities are left out because their ")
    assert tarn("entities", "query", dataset, "--limit", "1").stderr == ""


def test_invalid_entities_are_listed_one_per_line(tarn: Tarn, people: str):
    strange = ndjson(*({"id": name, "schema": "Vessel", "properties": {}} for name in ("ann", "bob")))
    assert tarn("entities", "invalid", people).stdout == ""
    tarn("entities", "load", people, "-", "--origin", "strange", stdin=strange)

    listed = [json.loads(line) for line in tarn("entities", "invalid", people).stdout.splitlines()]
    first = tarn("entities", "invalid", people, "--limit", "1").stdout.splitlines()

    assert [(one["id"], one["schemata"]) for one in listed] == [
        ("ann", ["Person", "Vessel"]),
        ("bob", ["Person", "Vessel"]),
    ]
    assert listed[0]["by_origin"] == [
        {"origin": "crawl", "schemata": ["Person"]},
        {"origin": "strange", "schemata": ["Vessel"]},
    ]
    assert [json.loads(line) for line in first] == listed[:1]


@pytest.mark.parametrize("name", ["stream", "invalid"])
def test_entity_named_like_a_route_is_shown_like_any_other(tarn: Tarn, people: str, name: str):
    assert "(entity-not-found)" in tarn("entities", "get", people, name, code=1).stderr
    tarn("entities", "load", people, "-", "--origin", "crawl", stdin=ndjson(person(name)))
    shown = tarn.json("entities", "get", people, name)
    misused = tarn("entities", "get", people, name, "--origin", "crawl", code=2)
    strange = ndjson({"id": name, "schema": "Vessel", "properties": {}})
    tarn("entities", "load", people, "-", "--origin", "strange", stdin=strange)

    assert (shown["id"], shown["caption"]) == (name, name.title())
    assert f"tarn statements query {people} --id {name} --origin crawl" in misused.stderr
    assert "(schema-violation)" in tarn("entities", "get", people, name, code=1).stderr


ARRAY = json.dumps([json.loads(line) for line in PEOPLE.splitlines()], indent=2)


@pytest.mark.parametrize(
    ("file_name", "content"),
    [
        ("people.ndjson", PEOPLE.encode()),
        ("people.ftm.json", PEOPLE.encode()),
        ("people.json", ARRAY.encode()),
        (
            "people",
            json.dumps(json.loads(PEOPLE.splitlines()[0]), indent=2).encode() + PEOPLE.partition("\n")[2].encode(),
        ),
        ("people.json.gz", gzip.compress(ARRAY.encode(), mtime=0)),
        (
            "people.ndjson.gz",
            gzip.compress(PEOPLE[:50].encode(), mtime=0) + gzip.compress(PEOPLE[50:].encode(), mtime=0),
        ),
        ("people.ndjson.zst", zstandard.compress(PEOPLE.encode())),
        ("people.zst", zstandard.compress(ARRAY.encode())),
    ],
)
def test_file_of_any_format_and_compression_is_loaded(
    tarn: Tarn, dataset: str, tmp_path: Path, file_name: str, content: bytes
):
    file = tmp_path / file_name
    file.write_bytes(content)

    written = tarn.json("entities", "load", dataset, str(file), "--origin", "crawl")

    assert (written["entities"], written["statements"], written["rejected"]) == (3, 7, 0)
    assert query_ids(tarn, dataset, "--origin", "crawl") == ["ann", "bob", "cem"]


def test_bad_record_is_refused_with_its_line_and_nothing_is_loaded(tarn: Tarn, dataset: str):
    refused = tarn("entities", "load", dataset, "-", stdin=PEOPLE + '{"id": 1}\n', code=1)

    assert (refused.stdout, "line 4" in refused.stderr, "(schema-violation)" in refused.stderr) == ("", True, True)
    assert query_ids(tarn, dataset) == []


def test_bad_records_are_skipped_on_request_and_reported_with_their_lines(tarn: Tarn, dataset: str):
    args = ("entities", "load", dataset, "-", "--on-error", "skip")
    data = PEOPLE + '{"id": 1}\nnonsense\n'
    loaded = tarn(*args, stdin=data)

    assert dict(line.split() for line in loaded.stdout.splitlines())["rejected"] == "2"
    assert [line.partition(": ")[2].partition(":")[0] for line in loaded.stderr.splitlines()] == ["line 4", "line 5"]
    assert [error["line"] for error in tarn.json(*args, stdin=data)["errors"]] == [4, 5]
    assert query_ids(tarn, dataset) == ["ann", "bob", "cem"]


def test_unreadable_file_is_misuse(tarn: Tarn, dataset: str, tmp_path: Path):
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8bnonsense")

    assert "is not valid gzip" in tarn("entities", "load", dataset, str(tmp_path / "broken.gz"), code=2).stderr
    assert "cannot be read" in tarn("entities", "load", dataset, str(tmp_path), code=2).stderr
    assert "cannot be read" in tarn("entities", "load", dataset, str(tmp_path / "missing"), code=2).stderr


def test_refusal_is_reported_although_the_body_is_not_sent_completely(tarn: Tarn, dataset: str, tmp_path: Path):
    file = tmp_path / "many.ndjson"
    file.write_text('{"id": 1}\n' + PEOPLE * 100_000)

    assert "line 1" in tarn("entities", "load", dataset, str(file), code=1).stderr


def test_delete_reads_ids_from_arguments_or_standard_input_and_counts_deleted_entities(tarn: Tarn, people: str):
    by_name = tarn.json("entities", "delete", people, "ann", "nobody")
    by_pipe = tarn.json("entities", "delete", people, "-", stdin="bob\n\ncem\n")

    assert by_name == {"entities": 1, "tombstones": 2}
    assert by_pipe == {"entities": 2, "tombstones": 5}
    assert query_ids(tarn, people) == ["acme", "owns"]


def test_delete_of_one_origin_keeps_the_statements_of_others(tarn: Tarn, people: str):
    tarn("entities", "load", people, "-", "--origin", "other", stdin=ndjson(person("ann", nationality=["de"])))

    tarn("entities", "delete", people, "ann", "--origin", "crawl")

    assert tarn.json("entities", "get", people, "ann")["origin"] == ["other"]


def test_delete_that_fails_midway_reports_the_number_of_deleted_entities(tarn: Tarn, people: str):
    failed = tarn("entities", "delete", people, "ann", "..", "bob", code=2)

    assert failed.stderr.splitlines()[0] == "1 entities were deleted; the others were not:"
    assert "bob" in query_ids(tarn, people)


def test_adjacent_entities_are_listed_by_property(tarn: Tarn, people: str):
    _, line = tarn("entities", "adjacent", people, "ann").stdout.splitlines()

    assert line.split()[:4] == ["ownershipOwner", "no", "owns", "Ownership"]
    assert [one["property"] for one in tarn.json("entities", "adjacent", people, "owns")] == ["asset", "owner"]


def start(server: Server, *args: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command as a process with pipes."""
    return subprocess.Popen(
        [*TARN, *args],
        cwd=server.folder,
        env=clean_environment(TARN_URL=server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_query_piped_into_a_load_copies_all_entities(server: Server, tarn: Tarn, people: str, name: str):
    tarn("datasets", "create", f"{name}_copy")
    tarn("entities", "load", people, "-", stdin=ndjson(*(person(f"p{number}") for number in range(3000))))
    script = '"$PYTHON" -m tarn.cli entities query "$FROM" | "$PYTHON" -m tarn.cli entities load "$TO" - --json'
    environment = clean_environment(TARN_URL=server.url, PYTHON=sys.executable, FROM=people, TO=f"{name}_copy")
    done = subprocess.run(
        ["/bin/sh", "-c", script], cwd=server.folder, env=environment, capture_output=True, check=True
    )

    assert (json.loads(done.stdout)["entities"], done.stderr) == (3005, b"")
    assert len(query_ids(tarn, f"{name}_copy")) == 3005


def test_reader_that_stops_early_ends_a_query_without_a_traceback(server: Server, tarn: Tarn, dataset: str):
    tarn("entities", "load", dataset, "-", stdin=ndjson(*(person(f"p{n}", notes=["x" * 100_000]) for n in range(50))))

    with start(server, "entities", "query", dataset) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()

    assert json.loads(first)["id"] == "p0"
    assert (process.returncode, errors) == (1, b"")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """Start a server that the test may kill, with a dataset of some twenty megabytes."""
    with running(tmp_path) as server:
        tarn = Tarn(server.url, server.admin_key)
        tarn("datasets", "create", "large")
        large = (person(f"p{number:03}", notes=["x" * 100_000]) for number in range(200))
        tarn("entities", "load", "large", "-", stdin=ndjson(*large))
        yield server


def test_server_that_dies_midway_is_never_mistaken_for_the_end_of_a_stream(own_server: Server):
    """Kill the server during a query and a load: both report it and exit with 3."""
    with (
        start(own_server, "entities", "query", "large") as reading,
        start(own_server, "entities", "load", "large", "-") as loading,
    ):
        assert reading.stdout is not None
        assert reading.stderr is not None
        assert loading.stdin is not None
        first = reading.stdout.readline()
        # More than fits into the pipe and the part read for format detection: when it is written, sending has begun.
        loading.stdin.write(PEOPLE.encode() * 10_000)
        loading.stdin.flush()
        os.kill(own_server.process.pid, 9)
        own_server.process.wait()
        _, load_errors = loading.communicate(timeout=60)
        # Not with `communicate`, which skips what `readline` has buffered.
        rest, query_errors = reading.stdout.read(), reading.stderr.read()
        reading.wait(60)

    assert (reading.returncode, loading.returncode) == (3, 3)
    assert b"the stream ended early" in query_errors
    assert b"no complete response from" in load_errors
    complete_lines = (first + rest).splitlines()
    assert 0 < len(complete_lines) < 200
    assert all(json.loads(line)["schema"] == "Person" for line in complete_lines)
