"""Opening a lake: its root is initialised once, and unsuitable roots and stores are refused."""

from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest
from tarn.errors import PathExists, StartRefused, Unavailable, UnsupportedStore
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.lake_root import open_lake, probe_put_if_absent
from tarn.storage.store import Store

from tests.s3 import moto_server


def paths(store):
    return [entry.path for entry in store.list("")]


def test_empty_root_becomes_a_lake_that_keeps_its_id(store):
    created = open_lake(store)
    assert open_lake(store) == created
    assert paths(store) == ["lake.json"]
    assert orjson.loads(store.get("lake.json")) == {
        "magic": "tarn-lake",
        "version": 1,
        "id": created.id,
        "created": created.created.isoformat(),
    }


def test_processes_that_start_concurrently_open_one_lake(racing_store):
    with ThreadPoolExecutor(8) as pool:
        lakes = set(pool.map(lambda _: open_lake(racing_store), range(8)))
    assert len(lakes) == 1


def test_process_that_loses_the_race_opens_the_lake_of_the_winner(store):
    faulty = FaultyStore(store)
    gate = faulty.block("put_new", "lake.json")
    with ThreadPoolExecutor(1) as pool:
        loser = pool.submit(open_lake, faulty)
        gate.wait_arrived()
        winner = open_lake(store)
        gate.release()
        assert loser.result() == winner


def test_lake_created_and_used_between_two_checks_is_opened(store):
    faulty = FaultyStore(store)
    gate = faulty.block("get", "lake.json", after=True)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(open_lake, faulty)
        gate.wait_arrived()
        lake = open_lake(store)
        store.put("ds/config.yml", b"")
        gate.release()
        assert late.result() == lake


def test_root_with_foreign_content_is_refused_and_unchanged(store):
    store.put("holiday/photo.jpg", b"1")
    with pytest.raises(StartRefused, match=r"holds holiday/photo.jpg and no lake.json"):
        open_lake(store)
    assert paths(store) == ["holiday/photo.jpg"]


def test_probe_left_by_a_killed_process_does_not_stop_the_next_start(store):
    faulty = FaultyStore(store)
    faulty.fail("delete", ".probe/*", Unavailable("died"))
    with pytest.raises(Unavailable):
        open_lake(faulty)
    assert len(paths(store)) == 1
    open_lake(store)
    assert "lake.json" in paths(store)


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (b"", "not a valid document with the magic"),
        (b"\xff\x00", "not a valid document with the magic"),
        (b"[]", "not a valid document with the magic"),
        (b'{"name": "x"}', "not a valid document with the magic"),
        (b'{"magic": "iceberg", "version": 1}', "has the magic 'iceberg', expected 'tarn-lake'"),
        (b'{"magic": "tarn-lake", "version": 2}', "format version 2, and this release reads and writes version 1"),
        (b'{"magic": "tarn-lake", "version": "1"}', "format version '1'"),
        (b'{"magic": "tarn-lake", "version": 1}', "has no valid id"),
        (b'{"magic": "tarn-lake", "version": 1, "id": "x", "created": "then"}', "has no valid id"),
    ],
)
def test_foreign_lake_json_is_refused_and_unchanged(disk, document, sentence):
    store = Store(disk)
    store.put("lake.json", document)
    with pytest.raises(StartRefused, match=sentence):
        open_lake(store)
    assert store.get("lake.json") == document
    assert paths(store) == ["lake.json"]


@pytest.mark.contract("W9")
def test_server_that_ignores_put_if_absent_is_refused_and_left_clean():
    """Run a real S3 server that ignores conditions, as those before conditional writes did."""

    def unconditional(app):
        def without_condition(environ, start_response):
            environ.pop("HTTP_IF_NONE_MATCH", None)
            return app(environ, start_response)

        return without_condition

    with moto_server(unconditional) as server:
        store = Store(server.connection())
        with pytest.raises(UnsupportedStore, match="conditional writes"):
            open_lake(store)
        assert paths(store) == []


@pytest.mark.contract("W9")
def test_same_server_with_conditional_writes_is_accepted():
    with moto_server() as server:
        store = Store(server.connection())
        open_lake(store)
        assert paths(store) == ["lake.json"]


@pytest.mark.contract("W9")
def test_store_that_reports_a_conflict_and_still_overwrites_is_refused(disk):
    class OverwritingStore(Store):
        def put_new(self, path: str, data: bytes) -> None:
            existing = self.head(path)
            self.put(path, data)
            if existing:
                raise PathExists(path)

    with pytest.raises(UnsupportedStore, match="but overwrote it"):
        probe_put_if_absent(OverwritingStore(disk))
