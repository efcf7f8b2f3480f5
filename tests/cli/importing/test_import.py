"""`tarn import`, against a server process: a dataset has the live statements and files of its source."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from followthemoney import Statement
from tarn.cli.connection import LONG_TIMEOUT, connected
from tarn.cli.importing import dataset as dataset_import
from tarn.cli.importing import stage
from tarn.cli.importing.layouts import DatasetDirectory
from tarn.cli.importing.report import ImportReport
from tarn.cli.importing.tables import SourceStatements
from tarn.cli.importing.target_dataset import ImportTarget
from tarn_client import Problem
from tarn_client.connection import Connection

from tests.cli.conftest import TARN, Tarn
from tests.cli.importing.lakes import (
    archive_content,
    archive_content_by_sha1,
    moment,
    statement_row,
    tombstone,
    write_with_inline_deletes,
    write_with_translog,
)
from tests.server import Server, clean_environment

JANE, JOE = statement_row("jane", "name", "Jane Doe"), statement_row("joe", "name", "Joe Bloggs")
ANN = statement_row("ann", "name", "Ann", "enrich", lang="eng", original_value="ANN", external=True)
BASE = statement_row("jane", "id", "a" * 40), statement_row("jane", "id", "b" * 40, at=9)


def served(tarn: Tarn, dataset: str) -> set[tuple[Any, ...]]:
    """Return the dataset's live statements, as served."""
    lines = tarn("statements", "query", dataset).stdout.splitlines()
    return {_facts(Statement.from_dict(json.loads(line))) for line in lines}


def expected(dataset: str, *rows: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Return the statements expected for rows of the source, with the imported dataset's name."""
    return {
        _facts(Statement.from_dict(cast("Any", _statement_dict(row) | {"id": None, "dataset": dataset})))
        for row in rows
    }


def _statement_dict(row: dict[str, Any]) -> dict[str, Any]:
    values = {
        name: row[name] for name in ("entity_id", "canonical_id", "schema", "prop", "value", "lang", "original_value")
    }
    times = {name: row[name].isoformat() for name in ("first_seen", "last_seen")}
    return values | times | {"external": row["external"], "origin": row["origin"]}


def _facts(statement: Statement) -> tuple[Any, ...]:
    seen = tuple(when[:19] for when in (statement.first_seen, statement.last_seen) if when)
    fields = (
        statement.id,
        statement.entity_id,
        statement.canonical_id,
        statement.schema,
        statement.prop,
        statement.value,
    )
    return (*fields, statement.lang, statement.original_value, statement.external, statement.origin, seen)


def counts_of(report: dict[str, Any]) -> dict[str, tuple[int, int | None]]:
    return {row["what"]: (row["source"], row.get("target")) for row in report["counts"]}


def test_dataset_with_inline_deletes_is_imported_completely(tarn: Tarn, tmp_path: Path, name: str):
    folder = tmp_path / name
    again = JANE | {"last_seen": moment(30), "first_seen": moment(30)}
    revived = JOE | {"last_seen": moment(20), "first_seen": moment(20)}
    mapped = statement_row("sue", "name", "Sue", "mapping:" + "0" * 64)
    write_with_inline_deletes(
        folder,
        [
            [JANE, JANE, JOE, ANN, *BASE, mapped],
            [tombstone(JOE, 5)],
            [revived, again],
            [statement_row("x", "name", "X")],
        ],
    )
    write_with_inline_deletes(folder, [[tombstone(statement_row("x", "name", "X"), 7)]])
    (folder / "config.yml").write_text(
        f"name: {name}\ntitle: Donations\nuri: file:///srv\nshards: 0\nstats: {{entity_count: 3}}\nlicense: no url\n"
        "publisher: {name: Newsroom, url: https://news.example/, official: false}\ncompression: zst\n"
    )
    checksum = archive_content(
        folder, b"id,name\n1,Jane\n", "a.csv", "b/a.csv", texts={"ocr": "text"}, extra={"author": "me"}
    )
    empty = archive_content(folder, b"", "empty.txt", texts={"ocr": ""})

    (report,) = tarn.json("import", str(tmp_path))

    statements = expected(name, JANE | {"last_seen": moment(30)}, JOE | {"last_seen": moment(20)}, ANN, BASE[1], mapped)
    assert served(tarn, name) == statements
    assert (report["state"], counts_of(report)["statements"], counts_of(report)["files"]) == (
        "imported",
        (5, 5),
        (3, 3),
    )
    assert report["warnings"] == [f"invalid fields of {folder}/config.yml are left out: license"]
    config = tarn.json("datasets", "show", name)
    assert (config["title"], config["publisher"]["name"], config["compression"]) == ("Donations", "Newsroom", "zstd")
    files = tarn.json("files", "ls", name)
    assert [(file["path"], file["checksum"], file["origin"]) for file in files] == [
        ("a.csv", checksum, "archive"),
        ("b/a.csv", checksum, "archive"),
        ("empty.txt", empty, "archive"),
    ]
    assert (files[0]["meta"]["author"], files[0]["meta"]["ftm_lakehouse"]["mimetype"]) == ("me", "text/plain")


def test_dataset_with_a_translog_is_imported_completely(tarn: Tarn, tmp_path: Path, name: str):
    old = statement_row("old", "name", "Old")
    write_with_translog(
        tmp_path / "source",
        [[JANE, JOE, ANN, BASE[0]], [JANE | {"last_seen": moment(30)}, BASE[1], old]],
        {JOE["id"]: 5},
    )
    sha1 = archive_content_by_sha1(tmp_path / "source", b"id,name\n1,Jane\n", "/srv/./a.csv")
    mapping = tmp_path / "source/mappings" / sha1
    mapping.mkdir(parents=True)
    person = {"schema": "Person", "key": None, "keys": ["id"], "properties": {"name": {"column": "name", "join": None}}}
    mapping.joinpath("mapping.yml").write_text(
        json.dumps(
            {"dataset": "source", "content_hash": sha1, "queries": [{"entities": {"person": person}, "filters": {}}]}
        )
    )

    (report,) = tarn.json("import", str(tmp_path / "source"), "--as", name)

    assert served(tarn, name) == expected(name, JANE | {"last_seen": moment(30)}, ANN, BASE[1], old)
    assert (report["layout"], counts_of(report)["mappings"]) == ("statements and translog", (1, 1))
    (file,) = tarn.json("files", "ls", name)
    assert (file["path"], file["sha1"], file["meta"]["ftm_lakehouse"]["path"]) == ("srv/a.csv", sha1, "/srv/./a.csv")
    assert [stored["content_hash"] for stored in tarn.json("mapping", "ls", name)] == [file["checksum"]]


def test_dry_run_reports_and_changes_nothing(tarn: Tarn, tmp_path: Path, name: str):
    write_with_inline_deletes(tmp_path / name, [[JANE, ANN]])
    archive_content(tmp_path / name, b"hello", "a.txt")
    (tmp_path / name / "tags/lakehouse/journal").mkdir(parents=True)
    (tmp_path / name / "tags/lakehouse/journal/last_updated").write_text('"2030-01-01T00:00:05"')
    (tmp_path / name / "tags/lakehouse/journal/last_flushed").write_text('"2030-01-01T00:00:04"')

    (report,) = tarn.json("import", str(tmp_path / name), "--dry-run")

    assert (report["state"], counts_of(report)["statements"], report["bytes"]) == ("planned", (2, None), 5)
    assert "journal was written after its last flush" in report["warnings"][0]
    tarn("datasets", "show", name, code=1)


def test_misuse_is_reported_before_anything_is_changed(tarn: Tarn, tmp_path: Path, name: str):
    write_with_inline_deletes(tmp_path / f"lake/{name}", [[JANE]])
    write_with_inline_deletes(tmp_path / "lake/Not-A-Name", [[statement_row("joe", "name", "Joe", "50% sure")]])
    lake = str(tmp_path / "lake")

    assert "another name with --as" in tarn("import", lake, code=2).stderr
    assert "--as is for one dataset" in tarn("import", lake, "--as", "b", code=2).stderr
    assert f"has no dataset other, but Not-A-Name, {name}" in tarn("import", lake, "-d", "other", code=2).stderr
    command = ["import", lake, "-d", "Not-A-Name", "--as", f"{name}_b"]
    assert "--rename-origin '50% sure=NEW'" in tarn(*command, code=2).stderr
    assert tarn.json("datasets", "list") == [each for each in tarn.json("datasets", "list") if name not in each["name"]]
    (report,) = tarn.json(*command, "--rename-origin", "50% sure=sure")
    assert counts_of(report)["statements of sure"] == (1, 1)
    assert "is for files" in tarn("import", lake, "--origin", "a", code=2).stderr
    assert (
        "not a directory of ftm-lakehouse"
        in tarn("import", str(tmp_path / "lake" / name / "statements"), code=2).stderr
    )
    assert "there is no file and no directory" in tarn("import", str(tmp_path / "nowhere"), code=2).stderr


def test_import_with_a_refused_statement_stores_nothing_unless_it_may_be_skipped(tarn: Tarn, tmp_path: Path, name: str):
    write_with_inline_deletes(tmp_path / name, [[JANE, statement_row("joe", "noSuchProperty", "Joe")]])
    archive_content(tmp_path / name, b"hello", "a.txt")

    refused = tarn("import", str(tmp_path / name), code=1).stderr

    assert "'noSuchProperty' is not a property of Person" in refused
    assert "--on-error skip" in refused
    assert (served(tarn, name), tarn.json("files", "ls", name)) == (set(), [])
    # The command fails because statements are missing; the imported ones stay.
    assert (
        "statements: 2 in the source, 1 in" in tarn("import", str(tmp_path / name), "--on-error", "skip", code=1).stderr
    )
    assert served(tarn, name) == expected(name, JANE)


def test_damaged_file_is_refused_by_its_checksum(tarn: Tarn, tmp_path: Path, name: str):
    checksum = archive_content(tmp_path / name, b"hello", "a.txt")
    next((tmp_path / name).rglob(f"{checksum}/blob")).write_bytes(b"hallo")
    archive_content(tmp_path / name, b"whole", "b.txt")

    assert "checksum" in tarn("import", str(tmp_path / name), code=1).stderr
    tarn("import", str(tmp_path / name), "--on-error", "skip", code=1)

    assert [file["path"] for file in tarn.json("files", "ls", name)] == ["b.txt"]


def test_dataset_with_data_is_refused_as_a_target_without_into(tarn: Tarn, tmp_path: Path, dataset: str):
    tarn("entities", "load", dataset, "-", stdin='{"id": "eve", "schema": "Person", "properties": {"name": ["Eve"]}}')
    write_with_inline_deletes(tmp_path / dataset, [[JANE, JOE]])

    refused = tarn("import", str(tmp_path / dataset), code=2).stderr
    assert f"the dataset {dataset} exists and has statements: give --into" in refused
    assert len(served(tarn, dataset)) == 2

    tarn("import", str(tmp_path / dataset), "--into")
    assert expected(dataset, JANE, JOE) < served(tarn, dataset)


def test_repeated_import_sends_nothing_and_restores_nothing_without_into(tarn: Tarn, tmp_path: Path, name: str):
    write_with_inline_deletes(tmp_path / name, [[JANE, JOE]])
    tarn("import", str(tmp_path / name))
    tarn("entities", "delete", name, "joe")
    write_with_inline_deletes(tmp_path / name, [[ANN]])

    (again,) = tarn.json("import", str(tmp_path / name))
    assert (again["state"], served(tarn, name)) == ("done before", expected(name, JANE))
    assert "imported at version [0], and the source is at [1]" in again["warnings"][0]

    tarn("import", str(tmp_path / name), "--into")
    assert served(tarn, name) == expected(name, JANE, JOE, ANN)


def test_killed_import_makes_no_statement_visible_and_is_completed_by_the_next(
    tarn: Tarn, server: Server, tmp_path: Path, name: str
):
    folder = tmp_path / name
    write_with_inline_deletes(folder, [[JANE, JOE, ANN]])
    for number in range(60):
        archive_content(folder, b"content %d" % number, f"{number:03}.txt")
    environment = clean_environment(TARN_URL=server.url, TARN_KEY=server.admin_key)

    running = subprocess.Popen([*TARN, "import", str(folder)], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    with Connection(tarn.url, tarn.key) as client:
        while not (stored := _files(client, name)) and time.monotonic() < deadline:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)

    assert running.wait(30) == -signal.SIGKILL
    assert 0 < stored < 60
    assert served(tarn, name) == set()
    (report,) = tarn.json("import", str(folder))
    assert (counts_of(report)["files"], served(tarn, name)) == ((60, 60), expected(name, JANE, JOE, ANN))


def _files(client: Connection, name: str) -> int:
    try:
        return sum(1 for _ in client.each(f"/v1/datasets/{name}/files"))
    except Problem:
        return 0  # the dataset does not exist yet


def test_statements_sent_in_many_parts_are_complete(
    tarn: Tarn, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stage, "PART_ROWS", 10)
    monkeypatch.setattr("tarn.cli.importing.tables.BATCH_ROWS", 5)
    rows = [statement_row(f"p{number}", "name", f"Person {number}") for number in range(60)]
    write_with_inline_deletes(tmp_path / name, [rows])

    tarn("import", str(tmp_path / name))

    assert served(tarn, name) == expected(name, *rows)
    assert len([*stage.arrow_parts(SourceStatements(DatasetDirectory(str(tmp_path / name))).batches({}))]) == 6


def test_statements_of_a_target_are_awaited_for_long(tarn: Tarn, dataset: str):
    timeouts: list[float] = []
    with connected(tarn.url, tarn.key) as connection:
        connection._http.event_hooks["request"].append(lambda sent: timeouts.append(sent.extensions["timeout"]["read"]))

        ImportTarget(connection, dataset).count()

    assert timeouts == [LONG_TIMEOUT]


def test_stage_that_expired_during_the_upload_of_files_is_filled_again(
    tarn: Tarn, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    write_with_inline_deletes(tmp_path / name, [[JANE, ANN]])
    put_files = dataset_import.DatasetImport._put_files

    def long_put_files(self: dataset_import.DatasetImport, report: ImportReport) -> None:
        put_files(self, report)
        with Connection(tarn.url, tarn.key) as client:
            (open_stage,) = client.each(f"/v1/datasets/{name}/stages")
            client.write("DELETE", f"/v1/datasets/{name}/stages/{open_stage['id']}")

    monkeypatch.setattr(dataset_import.DatasetImport, "_put_files", long_put_files)

    tarn("import", str(tmp_path / name))

    assert served(tarn, name) == expected(name, JANE, ANN)


@pytest.mark.parametrize("form", ["csv", "pack"])
def test_pack_of_ftms_own_tools_is_imported(tarn: Tarn, tmp_path: Path, name: str, form: str):
    entity = {
        "id": "jane",
        "schema": "Person",
        "datasets": ["other"],
        "properties": {"name": ["Jane"], "country": ["de"]},
    }
    (tmp_path / "entities.json").write_text(json.dumps(entity) + "\n")
    path = tmp_path / f"{name}.{form}"
    ftm = str(Path(sys.executable).parent / "ftm")
    written = subprocess.run(
        [ftm, "statements", str(tmp_path / "entities.json"), "-o", str(path), "-d", "other", "-f", form],
        capture_output=True,
        check=False,
    )
    assert written.returncode == 0, written.stderr

    (planned, report) = (
        tarn.json("import", str(path), "--dry-run"),
        tarn.json("import", str(path), "--origin", "packed"),
    )

    assert (planned["state"], planned["lines"]) == ("planned", report["lines"])
    assert report["there"] == {"statements": report["statements"], "entities": 1}
    imported = {(facts[1], facts[4], facts[5], facts[9]) for facts in served(tarn, name) if facts[4] != "id"}
    assert imported == {("jane", "name", "Jane", "packed"), ("jane", "country", "de", "packed")}
    assert "give --into" in tarn("import", str(path), code=2).stderr


def test_bad_pack_is_refused_with_its_line_and_stores_nothing(tarn: Tarn, tmp_path: Path, name: str):
    text = "entity_id,prop,schema,value\njane,name,Person,Jane\njane,noSuch,Person,Jane\n"

    refused = tarn("import", "-", "-d", name, "--format", "csv", stdin=text, code=1).stderr

    assert "line 3, prop: 'noSuch' is not a property of Person" in refused
    assert "lines are counted from line 1" in refused
    assert served(tarn, name) == set()
    assert "give --dataset" in tarn("import", "-", stdin=text, code=2).stderr
