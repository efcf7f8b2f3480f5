"""Diffs between snapshots, and refs, from the command line."""

import json
from collections.abc import Callable, Iterator

import pytest
from tarn.db.engine import Database
from tarn.lake.commit import SnapshotPublisher
from tarn.pipeline.jobs.flush import Flush
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.cli.conftest import Tarn
from tests.lake.manifests import dataset_of
from tests.pipeline.kernels import DirectKernels
from tests.server import Server


@pytest.fixture
def flush(server: Server, dataset: str, kernel_process) -> Iterator[Callable[[], None]]:
    """Return a function that flushes the dataset in the server's database and lake, without its Spark."""
    data = server.folder / "data"
    settings = load_settings(database_url=f"sqlite:///{data}/tarn.db", lake_uri=str(data / "lake"))
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    flushing = Flush(
        database,
        store,
        SnapshotPublisher(database, store, settings, "tester"),
        lambda: DirectKernels(settings, kernel_process),
    )

    def run() -> None:
        stored_dataset = dataset_of(database, dataset)
        done = flushing.run([stored_dataset], lambda: None)[stored_dataset.id]
        assert done.error is None

    yield run
    database.close()


def person(name: str, full_name: str) -> str:
    return json.dumps({"id": name, "schema": "Person", "properties": {"name": [full_name]}}) + "\n"


@pytest.fixture
def changed(tarn: Tarn, dataset: str, flush: Callable[[], None]) -> str:
    """Create a dataset with two snapshots: ann is unchanged, bob modified, cem deleted and dan added."""
    tarn("entities", "load", dataset, "-", stdin=person("ann", "Ann") + person("bob", "Bob") + person("cem", "Cem"))
    flush()
    tarn("entities", "load", dataset, "-", stdin=person("bob", "Robert") + person("dan", "Dan"))
    tarn("entities", "delete", dataset, "cem")
    flush()
    return dataset


def test_invalid_entity_is_printed_without_content_and_counted(tarn: Tarn, changed: str, flush: Callable[[], None]):
    vessel = json.dumps({"id": "ann", "schema": "Vessel", "properties": {}}) + "\n"
    tarn("entities", "load", changed, "-", "--origin", "register", stdin=vessel)
    flush()

    result = tarn("diff", changed, "2", "3")

    assert json.loads(result.stdout) == {"op": "MOD", "id": "ann", "entity": None}
    assert result.stderr == (
        "tarn: 1 entity is printed without content because its statements do not assemble: "
        f"`tarn entities invalid {changed}` lists them\n"
    )
    assert tarn("diff", changed, "1", "2").stderr == ""


def changes(printed: str) -> list[tuple[str, str, list[str]]]:
    lines = (json.loads(line) for line in printed.splitlines())
    return sorted((line["op"], line["id"], sorted(line["entity"]["properties"]["name"])) for line in lines)


def test_diff_prints_a_line_for_each_changed_entity(tarn: Tarn, changed: str):
    forward = changes(tarn("diff", changed, "1", "2").stdout)
    reverse = changes(tarn("diff", changed, "latest", "1").stdout)

    assert forward == [("ADD", "dan", ["Dan"]), ("DEL", "cem", ["Cem"]), ("MOD", "bob", ["Bob", "Robert"])]
    assert reverse == [("ADD", "cem", ["Cem"]), ("DEL", "dan", ["Dan"]), ("MOD", "bob", ["Bob"])]
    assert tarn("diff", changed, "2", "2").stdout == ""


def test_diff_with_a_missing_snapshot_is_a_problem(tarn: Tarn, changed: str):
    assert "(snapshot-not-found)" in tarn("diff", changed, "1", "9", code=1).stderr
    assert "is not a name" in tarn("diff", changed, "..", "2", code=2).stderr


def test_ref_names_a_snapshot_for_reads_and_diffs_until_it_is_deleted(tarn: Tarn, changed: str):
    first = tarn.json("refs", "set", changed, "before", "1")
    tarn("refs", "set", changed, "after")

    assert (first["name"], first["seq"], first["tenant"]) == ("before", 1, "admin")
    assert tarn.json("refs", "show", changed, "before") == first
    assert [ref["seq"] for ref in tarn.json("refs", "list", changed)] == [2, 1]
    assert tarn.json("entities", "get", changed, "bob", "--at", "before")["properties"] == {"name": ["Bob"]}
    assert tarn("entities", "query", changed, "--at", "before", "--id", "dan").stdout == ""
    assert len(changes(tarn("diff", changed, "before", "after").stdout)) == 3

    assert tarn("refs", "delete", changed, "before").stderr == "the ref before is deleted\n"

    assert "(ref-not-found)" in tarn("refs", "show", changed, "before", code=1).stderr
    header, line = tarn("refs", "list", changed).stdout.splitlines()
    assert header.split() == ["name", "seq", "snapshot", "tenant", "updated"]
    assert line.split()[:2] == ["after", "2"]
