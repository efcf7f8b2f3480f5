"""A dataset's log and its snapshots from the command line."""

import json
from collections.abc import Iterator

import pytest
from tarn.db.engine import Database
from tarn.model.datasets.snapshot import Snapshot
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.cli.conftest import Tarn
from tests.lake.manifests import build, dataset_of, publish
from tests.server import Server


@pytest.fixture
def server_database(server: Server) -> Iterator[Database]:
    """Open the database of the server."""
    database = Database(f"sqlite:///{server.folder}/data/tarn.db")
    yield database
    database.close()


@pytest.fixture
def server_store(server: Server) -> Store:
    """Open the lake of the server."""
    return Store(Connection.from_settings(load_settings(lake_uri=str(server.folder / "data" / "lake"))))


@pytest.fixture
def snapshots(server_database: Database, server_store: Store, dataset: str) -> list[Snapshot]:
    """Publish two snapshots of the dataset."""
    stored_dataset = dataset_of(server_database, dataset)
    first = publish(
        server_database,
        server_store,
        stored_dataset,
        build(stored_dataset, message="first\nload", metadata={"n": None}),
    )
    return [first, publish(server_database, server_store, stored_dataset, build(stored_dataset, first))]


def test_log_lists_snapshots_newest_first_with_their_counts(tarn: Tarn, dataset: str, snapshots: list[Snapshot]):
    header, *lines = (line.split() for line in tarn("log", dataset).stdout.splitlines())

    assert header == ["seq", "id", "created", "operation", "added", "seen", "ended", "live", "message"]
    assert lines == [
        ["2", snapshots[1].id, "2030-01-01T00:00:02Z", "flush", "10", "0", "0", "20", "-"],
        ["1", snapshots[0].id, "2030-01-01T00:00:01Z", "flush", "10", "0", "0", "10", "first", "load"],
    ]


def test_log_as_json_has_the_entries_of_the_api_up_to_the_limit(
    tarn: Tarn, server: Server, dataset: str, snapshots: list[Snapshot]
):
    entries = server.client().get(f"/v1/datasets/{dataset}/snapshots").json()["results"]

    assert tarn.json("log", dataset) == entries
    assert tarn.json("log", dataset, "--limit", "1") == entries[:1]


def test_log_of_a_dataset_without_snapshots_is_empty(tarn: Tarn, dataset: str):
    assert tarn.json("log", dataset) == []
    assert len(tarn("log", dataset).stdout.splitlines()) == 1


def test_log_shows_the_error_of_an_invalid_manifest(
    tarn: Tarn, server_store: Store, server_database: Database, dataset: str, snapshots: list[Snapshot]
):
    server_store.put(dataset_of(server_database, dataset).layout.snapshot(1), b"{}")

    _, newest, oldest = tarn("log", dataset).stdout.splitlines()

    assert snapshots[1].id in newest
    assert oldest.split()[:2] == ["1", snapshots[0].id]
    assert "components: Field required" in oldest


def test_snapshot_is_shown_by_number_by_id_and_the_latest_by_default(
    tarn: Tarn, dataset: str, snapshots: list[Snapshot]
):
    first, second = (json.loads(snapshot.to_json()) for snapshot in snapshots)

    assert tarn.json("snapshot", "show", dataset, "1") == first
    assert tarn.json("snapshot", "show", dataset, snapshots[0].id) == first
    assert tarn.json("snapshot", "show", dataset) == second


def test_snapshot_as_a_table_has_numbers_of_files_and_batches(tarn: Tarn, dataset: str, snapshots: list[Snapshot]):
    lines = dict(line.split(maxsplit=1) for line in tarn("snapshot", "show", dataset).stdout.splitlines())

    assert (lines["id"], lines["batches"], lines["rows.live"]) == (snapshots[1].id, "1", "20")
    assert (lines["statements.files"], lines["statements.added"], lines["statements.size"]) == ("2", "1", "2001")


def test_missing_snapshot_is_a_problem(tarn: Tarn, dataset: str):
    assert "(no-snapshots)" in tarn("snapshot", "show", dataset, code=1).stderr
    assert "(snapshot-not-found)" in tarn("snapshot", "show", dataset, "7", code=1).stderr
    assert "is not a name" in tarn("snapshot", "show", dataset, "..", code=2).stderr
