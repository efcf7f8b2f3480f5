"""`tarn import`, against a server process: what it serves afterwards is what the source held."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from followthemoney import Statement
from tarn.cli.importing import dataset as dataset_import
from tarn.cli.importing import stage
from tarn.cli.importing.layouts import DatasetDirectory
from tarn.cli.importing.report import ImportReport
from tarn.cli.importing.tables import SourceStatements
from tarn_client import Problem
from tarn_client.connection import Connection

from tests.cli.conftest import TARN, Tarn
from tests.cli.importing.lakes import (
    archived,
    archived_first,
    deleted,
    moment,
    said,
    with_deletes_inline,
    with_translog,
)
from tests.server import Server, clean_environment

JANE, JOE = said("jane", "name", "Jane Doe"), said("joe", "name", "Joe Bloggs")
ANN = said("ann", "name", "Ann", "enrich", lang="eng", original_value="ANN", external=True)
BASE = said("jane", "id", "a" * 40), said("jane", "id", "b" * 40, at=9)


def served(tarn: Tarn, dataset: str) -> set[tuple[Any, ...]]:
    """What is live, as FtM knows statements."""
    lines = tarn("statements", "query", dataset).stdout.splitlines()
    return {_facts(Statement.from_dict(json.loads(line))) for line in lines}


def held(dataset: str, *rows: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The same of rows as the source has them, under the name that the dataset has here."""
    return {_facts(Statement.from_dict(cast("Any", _plain(row) | {"id": None, "dataset": dataset}))) for row in rows}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: row[name] for name in ("entity_id", "canonical_id", "schema", "prop", "value", "lang", "original_value")
    }
    times = {name: row[name].isoformat() for name in ("first_seen", "last_seen")}
    return kept | times | {"external": row["external"], "origin": row["origin"]}


def _facts(statement: Statement) -> tuple[Any, ...]:
    seen = tuple(when[:19] for when in (statement.first_seen, statement.last_seen) if when)
    one = (statement.id, statement.entity_id, statement.canonical_id, statement.schema, statement.prop, statement.value)
    return (*one, statement.lang, statement.original_value, statement.external, statement.origin, seen)


def counted(report: dict[str, Any]) -> dict[str, tuple[int, int | None]]:
    return {row["what"]: (row["source"], row.get("target")) for row in report["counts"]}


def test_lake_with_deletes_inline_is_served_as_it_was_held(tarn: Tarn, tmp_path: Path, name: str):
    folder = tmp_path / name
    again = JANE | {"last_seen": moment(30), "first_seen": moment(30)}
    revived = JOE | {"last_seen": moment(20), "first_seen": moment(20)}
    mapped = said("sue", "name", "Sue", "mapping:" + "0" * 64)
    with_deletes_inline(
        folder, [[JANE, JANE, JOE, ANN, *BASE, mapped], [deleted(JOE, 5)], [revived, again], [said("x", "name", "X")]]
    )
    with_deletes_inline(folder, [[deleted(said("x", "name", "X"), 7)]])
    (folder / "config.yml").write_text(
        f"name: {name}\ntitle: Donations\nuri: file:///srv\nshards: 0\nstats: {{entity_count: 3}}\nlicense: no url\n"
        "publisher: {name: Newsroom, url: https://news.example/, official: false}\ncompression: zst\n"
    )
    checksum = archived(folder, b"id,name\n1,Jane\n", "a.csv", "b/a.csv", texts={"ocr": "text"}, extra={"author": "me"})
    empty = archived(folder, b"", "empty.txt", texts={"ocr": ""})

    (report,) = tarn.json("import", str(tmp_path))

    wanted = held(name, JANE | {"last_seen": moment(30)}, JOE | {"last_seen": moment(20)}, ANN, BASE[1], mapped)
    assert served(tarn, name) == wanted
    assert (report["state"], counted(report)["statements"], counted(report)["files"]) == ("imported", (5, 5), (3, 3))
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


def test_lake_with_a_translog_is_served_as_it_was_held(tarn: Tarn, tmp_path: Path, name: str):
    old = said("old", "name", "Old")
    with_translog(
        tmp_path / "source",
        [[JANE, JOE, ANN, BASE[0]], [JANE | {"last_seen": moment(30)}, BASE[1], old]],
        {JOE["id"]: 5},
    )
    sha1 = archived_first(tmp_path / "source", b"id,name\n1,Jane\n", "/srv/./a.csv")
    mapping = tmp_path / "source/mappings" / sha1
    mapping.mkdir(parents=True)
    person = {"schema": "Person", "key": None, "keys": ["id"], "properties": {"name": {"column": "name", "join": None}}}
    mapping.joinpath("mapping.yml").write_text(
        json.dumps(
            {"dataset": "source", "content_hash": sha1, "queries": [{"entities": {"person": person}, "filters": {}}]}
        )
    )

    (report,) = tarn.json("import", str(tmp_path / "source"), "--as", name)

    assert served(tarn, name) == held(name, JANE | {"last_seen": moment(30)}, ANN, BASE[1], old)
    assert (report["layout"], counted(report)["mappings"]) == ("statements and translog", (1, 1))
    (file,) = tarn.json("files", "ls", name)
    assert (file["path"], file["sha1"], file["meta"]["ftm_lakehouse"]["path"]) == ("srv/a.csv", sha1, "/srv/./a.csv")
    assert [kept["content_hash"] for kept in tarn.json("mapping", "ls", name)] == [file["checksum"]]


def test_dry_run_tells_and_changes_nothing(tarn: Tarn, tmp_path: Path, name: str):
    with_deletes_inline(tmp_path / name, [[JANE, ANN]])
    archived(tmp_path / name, b"hello", "a.txt")
    (tmp_path / name / "tags/lakehouse/journal").mkdir(parents=True)
    (tmp_path / name / "tags/lakehouse/journal/last_updated").write_text('"2030-01-01T00:00:05"')
    (tmp_path / name / "tags/lakehouse/journal/last_flushed").write_text('"2030-01-01T00:00:04"')

    (report,) = tarn.json("import", str(tmp_path / name), "--dry-run")

    assert (report["state"], counted(report)["statements"], report["bytes"]) == ("planned", (2, None), 5)
    assert "journal was written after its last flush" in report["warnings"][0]
    tarn("datasets", "show", name, code=1)


def test_what_is_wrong_is_told_before_anything_is_changed(tarn: Tarn, tmp_path: Path, name: str):
    with_deletes_inline(tmp_path / f"lake/{name}", [[JANE]])
    with_deletes_inline(tmp_path / "lake/Not-A-Name", [[said("joe", "name", "Joe", "50% sure")]])
    lake = str(tmp_path / "lake")

    assert "another name with --as" in tarn("import", lake, code=2).stderr
    assert "--as is for one dataset" in tarn("import", lake, "--as", "b", code=2).stderr
    assert f"has no dataset other, but Not-A-Name, {name}" in tarn("import", lake, "-d", "other", code=2).stderr
    asked = ["import", lake, "-d", "Not-A-Name", "--as", f"{name}_b"]
    assert "--rename-origin '50% sure=NEW'" in tarn(*asked, code=2).stderr
    assert tarn.json("datasets", "list") == [one for one in tarn.json("datasets", "list") if name not in one["name"]]
    (report,) = tarn.json(*asked, "--rename-origin", "50% sure=sure")
    assert counted(report)["statements of sure"] == (1, 1)
    assert "is for files" in tarn("import", lake, "--origin", "a", code=2).stderr
    assert (
        "not a directory of ftm-lakehouse"
        in tarn("import", str(tmp_path / "lake" / name / "statements"), code=2).stderr
    )
    assert "there is no file and no directory" in tarn("import", str(tmp_path / "nowhere"), code=2).stderr


def test_statement_that_the_server_refuses_leaves_nothing(tarn: Tarn, tmp_path: Path, name: str):
    with_deletes_inline(tmp_path / name, [[JANE, said("joe", "noSuchProperty", "Joe")]])
    archived(tmp_path / name, b"hello", "a.txt")

    refused = tarn("import", str(tmp_path / name), code=1).stderr

    assert "'noSuchProperty' is not a property of Person" in refused
    assert "--on-error skip" in refused
    assert (served(tarn, name), tarn.json("files", "ls", name)) == (set(), [])
    # What was left out is missing, and the command says so; what is there stays.
    assert (
        "statements: 2 in the source, 1 in" in tarn("import", str(tmp_path / name), "--on-error", "skip", code=1).stderr
    )
    assert served(tarn, name) == held(name, JANE)


def test_damaged_file_is_refused_by_its_checksum(tarn: Tarn, tmp_path: Path, name: str):
    checksum = archived(tmp_path / name, b"hello", "a.txt")
    next((tmp_path / name).rglob(f"{checksum}/blob")).write_bytes(b"hallo")
    archived(tmp_path / name, b"whole", "b.txt")

    assert "checksum" in tarn("import", str(tmp_path / name), code=1).stderr
    tarn("import", str(tmp_path / name), "--on-error", "skip", code=1)

    assert [file["path"] for file in tarn.json("files", "ls", name)] == ["b.txt"]


def test_target_that_has_data_is_left_alone_unless_asked(tarn: Tarn, tmp_path: Path, dataset: str):
    tarn("entities", "load", dataset, "-", stdin='{"id": "eve", "schema": "Person", "properties": {"name": ["Eve"]}}')
    with_deletes_inline(tmp_path / dataset, [[JANE, JOE]])

    refused = tarn("import", str(tmp_path / dataset), code=2).stderr
    assert f"the dataset {dataset} exists and has statements: give --into" in refused
    assert len(served(tarn, dataset)) == 2

    tarn("import", str(tmp_path / dataset), "--into")
    assert held(dataset, JANE, JOE) < served(tarn, dataset)


def test_import_again_sends_nothing_and_brings_back_nothing(tarn: Tarn, tmp_path: Path, name: str):
    with_deletes_inline(tmp_path / name, [[JANE, JOE]])
    tarn("import", str(tmp_path / name))
    tarn("entities", "delete", name, "joe")
    with_deletes_inline(tmp_path / name, [[ANN]])

    (again,) = tarn.json("import", str(tmp_path / name))
    assert (again["state"], served(tarn, name)) == ("done before", held(name, JANE))
    assert "imported at version [0], and the source is at [1]" in again["warnings"][0]

    tarn("import", str(tmp_path / name), "--into")
    assert served(tarn, name) == held(name, JANE, JOE, ANN)


def test_killed_import_shows_no_statement_and_is_completed_by_the_next(
    tarn: Tarn, server: Server, tmp_path: Path, name: str
):
    folder = tmp_path / name
    with_deletes_inline(folder, [[JANE, JOE, ANN]])
    for number in range(60):
        archived(folder, b"content %d" % number, f"{number:03}.txt")
    environment = clean_environment(TARN_URL=server.url, TARN_KEY=server.admin_key)

    running = subprocess.Popen([*TARN, "import", str(folder)], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    with Connection(tarn.url, tarn.key) as client:
        while not (there := _files(client, name)) and time.monotonic() < deadline:
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)

    assert running.wait(30) == -signal.SIGKILL
    assert 0 < there < 60
    assert served(tarn, name) == set()
    (report,) = tarn.json("import", str(folder))
    assert (counted(report)["files"], served(tarn, name)) == ((60, 60), held(name, JANE, JOE, ANN))


def _files(client: Connection, name: str) -> int:
    try:
        return sum(1 for _ in client.each(f"/v1/datasets/{name}/files"))
    except Problem:
        return 0  # the dataset is not there yet


def test_many_parts_arrive_as_one(tarn: Tarn, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage, "PART_ROWS", 10)
    monkeypatch.setattr("tarn.cli.importing.tables.BATCH_ROWS", 5)
    rows = [said(f"p{number}", "name", f"Person {number}") for number in range(60)]
    with_deletes_inline(tmp_path / name, [rows])

    tarn("import", str(tmp_path / name))

    assert served(tarn, name) == held(name, *rows)
    assert len([*stage.arrow_parts(SourceStatements(DatasetDirectory(str(tmp_path / name))).batches({}))]) == 6


def test_stage_that_is_gone_when_files_are_there_is_filled_again(
    tarn: Tarn, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    with_deletes_inline(tmp_path / name, [[JANE, ANN]])
    put_files = dataset_import.DatasetImport._put_files

    def long_put_files(self: dataset_import.DatasetImport, report: ImportReport) -> None:
        put_files(self, report)
        with Connection(tarn.url, tarn.key) as client:
            (only,) = client.each(f"/v1/datasets/{name}/stages")
            client.write("DELETE", f"/v1/datasets/{name}/stages/{only['id']}")

    monkeypatch.setattr(dataset_import.DatasetImport, "_put_files", long_put_files)

    tarn("import", str(tmp_path / name))

    assert served(tarn, name) == held(name, JANE, ANN)


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
    made = subprocess.run(
        [ftm, "statements", str(tmp_path / "entities.json"), "-o", str(path), "-d", "other", "-f", form],
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr

    (planned, report) = (
        tarn.json("import", str(path), "--dry-run"),
        tarn.json("import", str(path), "--origin", "packed"),
    )

    assert (planned["state"], planned["lines"]) == ("planned", report["lines"])
    assert report["there"] == {"statements": report["statements"], "entities": 1}
    found = {(facts[1], facts[4], facts[5], facts[9]) for facts in served(tarn, name) if facts[4] != "id"}
    assert found == {("jane", "name", "Jane", "packed"), ("jane", "country", "de", "packed")}
    assert "give --into" in tarn("import", str(path), code=2).stderr


def test_bad_pack_says_where_and_leaves_nothing(tarn: Tarn, tmp_path: Path, name: str):
    text = "entity_id,prop,schema,value\njane,name,Person,Jane\njane,noSuch,Person,Jane\n"

    refused = tarn("import", "-", "-d", name, "--format", "csv", stdin=text, code=1).stderr

    assert "line 3, prop: 'noSuch' is not a property of Person" in refused
    assert "lines are counted from line 1" in refused
    assert served(tarn, name) == set()
    assert "give --dataset" in tarn("import", "-", stdin=text, code=2).stderr
