"""Conformance of stores: each test runs on a local disk and on an S3 server."""

import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from subprocess import PIPE
from threading import Barrier

import pytest
from tarn.errors import PathExists, Unavailable
from tarn.storage import connection as limits
from tarn.storage import store as store_module
from tarn.storage.connection import Connection
from tarn.storage.store import ObjectMissing, Store

from tests.s3 import ACCESS_KEY, BUCKET, S3Server, s3_server

MIB = 1 << 20


def paths(store, prefix="", after=None):
    return [entry.path for entry in store.list(prefix, after)]


def test_put_replaces_the_whole_object(store):
    store.put("a/b/doc", b"longer than the next")
    store.put("a/b/doc", b"short")
    assert store.get("a/b/doc") == b"short"


def test_names_with_every_character_of_the_layout_are_kept_unchanged(store):
    path = "ds/entities/statements/origin=mapping:a.b-c_d/part-0.parquet"
    store.put(path, b"1")
    assert paths(store) == [path]


@pytest.mark.parametrize("read", [Store.get, lambda s, p: s.get_range(p, 0, 1), lambda s, p: list(s.stream(p))])
def test_read_of_an_absent_object_raises_missing_with_its_path(store, read):
    with pytest.raises(ObjectMissing) as caught:
        read(store, "not/there")
    assert caught.value.path == "not/there"


def test_copy_of_an_absent_object_raises_missing_and_creates_nothing(store):
    with pytest.raises(ObjectMissing) as caught:
        store.copy_new("not/there", "a/b/target")
    assert caught.value.path == "not/there"
    assert (paths(store), list(store.folders(""))) == ([], [])


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0, 4, b"0123"), (3, 100, b"3456789"), (10, 12, b""), (50, 60, b""), (4, 4, b"")]
)
def test_range_is_cut_at_the_end_of_the_object(store, start, end, expected):
    store.put("digits", b"0123456789")
    assert store.get_range("digits", start, end) == expected


def test_stream_yields_the_object_in_bounded_chunks_from_an_offset(store):
    data = bytes(range(256)) * 4096 * 4
    store.put("large", data)
    chunks = list(store.stream("large", start=100, chunk_size=256 << 10))
    assert b"".join(chunks) == data[100:]
    assert max(map(len, chunks)) < MIB


def test_stream_of_a_replaced_object_continues_with_the_former_one(store):
    store.put("doc", b"a" * 8 * MIB)
    stream = store.stream("doc", chunk_size=MIB)
    first = next(stream)
    store.put("doc", b"b" * 8 * MIB)
    assert set(first + b"".join(stream)) == {ord("a")}


def test_head_returns_size_time_and_etag_or_none(store):
    before = datetime.now(UTC) - timedelta(seconds=2)
    store.put("doc", b"12345")
    entry = store.head("doc")
    assert entry is not None
    assert (entry.path, entry.size, bool(entry.etag)) == ("doc", 5, True)
    assert before <= entry.modified <= datetime.now(UTC) + timedelta(seconds=2)
    assert store.head("other") is None


@pytest.mark.contract("W4")
def test_put_new_on_an_existing_path_is_refused_and_changes_nothing(store):
    store.put_new("a/manifest", b"first")
    with pytest.raises(PathExists, match="a/manifest exists"):
        store.put_new("a/manifest", b"second")
    assert store.get("a/manifest") == b"first"


@pytest.mark.contract("W4")
@pytest.mark.parametrize("round_", range(3))
def test_sixteen_writers_of_one_new_path_have_one_winner(racing_store, round_):
    start = Barrier(16)

    def write(writer):
        start.wait()
        try:
            racing_store.put_new("race/here", b"%d" % writer)
            return writer
        except PathExists:
            return None

    with ThreadPoolExecutor(16) as pool:
        winners = [winner for winner in pool.map(write, range(16)) if winner is not None]
    assert len(winners) == 1
    assert racing_store.get("race/here") == b"%d" % winners[0]


@pytest.mark.contract("W4")
def test_sixteen_copies_to_one_new_path_have_one_winner(racing_store):
    start = Barrier(16)
    for writer in range(16):
        racing_store.put(f"source/{writer}", b"%d" % writer)

    def copy(writer):
        start.wait()
        try:
            racing_store.copy_new(f"source/{writer}", "target")
            return writer
        except PathExists:
            return None

    with ThreadPoolExecutor(16) as pool:
        winners = [winner for winner in pool.map(copy, range(16)) if winner is not None]
    assert len(winners) == 1
    assert racing_store.get("target") == b"%d" % winners[0]


def test_copy_replaces_its_target_and_is_independent_of_its_source(store):
    store.put("from", b"new")
    store.put("to", b"old")
    store.copy("from", "to")
    store.put("from", b"changed")
    assert store.get("to") == b"new"


def test_copy_above_the_limit_of_s3_is_streamed(s3, monkeypatch):
    monkeypatch.setattr(store_module, "LARGEST_COPY", MIB)
    store = Store(s3.connection())
    store.put("blob", b"x" * (MIB + 1))
    store.copy_new("blob", "place/data")
    assert store.get("place/data") == b"x" * (MIB + 1)
    with pytest.raises(PathExists):
        store.copy_new("blob", "place/data")


def test_put_stream_of_several_parts_returns_the_size(store):
    assert store.put_stream("big", (bytes([n]) * MIB for n in range(20))) == 20 * MIB
    assert store.get("big") == b"".join(bytes([n]) * MIB for n in range(20))


def test_put_stream_without_chunks_writes_an_empty_object(store):
    assert store.put_stream("empty", []) == 0
    assert store.get("empty") == b""


def test_put_stream_of_a_large_object_uses_little_memory(connection):
    script = """
import pickle, resource, sys
from tarn.storage.store import Store
store = Store(pickle.load(sys.stdin.buffer))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.put_stream("big", (bytes(1 << 20) for _ in range(256)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(connection), stdout=PIPE, check=True)
    assert int(run.stdout) < 128 << 10
    assert Store(connection).head("big").size == 256 * MIB


def test_put_stream_accepts_a_stream_of_the_same_store(store):
    store.put("one", b"x" * MIB)
    store.put_stream("two", store.stream("one", chunk_size=1000))
    assert store.get("two") == b"x" * MIB


@pytest.mark.contract("W3")
@pytest.mark.parametrize("before", [0, 1, 20])
@pytest.mark.parametrize("error", [FileNotFoundError("the client went away"), ValueError("checksum")])
def test_put_stream_whose_source_fails_raises_its_error_and_leaves_nothing(store, before, error):
    def source():
        for _ in range(before):
            yield b"x" * MIB
        raise error

    with pytest.raises(type(error)) as caught:
        store.put_stream("uploads/one/part", source())
    assert caught.value is error
    assert store.head("uploads/one/part") is None
    assert list(store.folders("")) == []


def test_put_stream_whose_source_fails_leaves_no_parts_on_s3(s3):
    store = Store(s3.connection())

    def source():
        for _ in range(20):
            yield b"x" * MIB
        raise ValueError

    with pytest.raises(ValueError):
        store.put_stream("upload", source())
    assert s3.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_failed_put_stream_leaves_the_former_object(store):
    store.put("export", b"former")

    def source():
        yield b"half"
        raise ValueError

    with pytest.raises(ValueError):
        store.put_stream("export", source())
    assert store.get("export") == b"former"


def test_list_is_sorted_by_the_code_points_of_whole_paths(store):
    names = ["b/1", "a/2", "a-b/1", "a.b", "a/10", "a/1/x", "c", "B"]
    for name in names:
        store.put(f"root/{name}", b"")
    expected = sorted(f"root/{name}" for name in names)
    assert paths(store) == paths(store, "root") == expected
    for position, path in enumerate(expected):
        assert paths(store, "root", after=path) == expected[position + 1 :]


def test_list_treats_a_prefix_as_a_folder(store):
    store.put("ds/one", b"")
    store.put("ds_other/two", b"")
    assert paths(store, "ds") == ["ds/one"]
    assert paths(store, "nothing/here") == []


def test_list_returns_more_than_a_page(s3):
    store = Store(s3.connection())
    names = [f"many/{number:05d}" for number in range(1100)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.put(name, b""), names))
    assert paths(store, "many") == names
    store.delete(names)
    assert paths(store) == []


def test_folders_are_direct_children(store):
    for path in ("b/x", "a/y/z", "file"):
        store.put(path, b"")
    assert (list(store.folders("")), list(store.folders("a")), list(store.folders("none"))) == (["a", "b"], ["y"], [])


def test_delete_removes_objects_and_ignores_absent_ones(store):
    for path in ("a/1", "a/2", "b"):
        store.put(path, b"")
    store.delete(["a/0", "a/1", "a/1", "none/at/all", "b"])
    store.delete([])
    assert paths(store) == ["a/2"]


def test_absent_bucket_is_not_a_missing_object(s3):
    store = Store(Connection("s3://nowhere/lake", s3.connection().options))
    for call in (lambda: store.get("a"), lambda: store.put_new("a", b"")):
        with pytest.raises(Unavailable, match="bucket"):
            call()


def test_stopped_server_is_storage_unavailable(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "RETRIES", 1)
    with s3_server(tmp_path) as server:
        store = Store(server.connection())
        store.put("doc", b"1")
        server.stop()
        for call in (store.get, store.head, lambda p: store.put(p, b""), lambda p: list(store.list(p))):
            with pytest.raises(Unavailable) as caught:
                call("doc")
            assert server.endpoint not in str(caught.value)


def test_server_that_never_responds_is_unavailable_after_the_timeout(monkeypatch):
    monkeypatch.setattr(limits, "READ", "50ms")
    monkeypatch.setattr(limits, "RETRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = Store(S3Server(f"http://127.0.0.1:{listener.getsockname()[1]}").connection())
        for call in (store.get, lambda path: store.put_new(path, b"")):
            with pytest.raises(Unavailable):
                call("doc")


def test_refused_identity_is_unavailable_and_the_error_has_no_secret(strict_s3: S3Server):
    wrong = strict_s3.options | {"aws_secret_access_key": "not-the-secret"}
    store = Store(Connection.from_settings(strict_s3.settings(storage_options=wrong)))
    with pytest.raises(Unavailable, match="denies access") as caught:
        store.get("doc")
    message = f"{caught.value!r} {caught.value.__cause__!r} {store.connection!r} {vars(store)!r}"
    assert "not-the-secret" not in message
    assert ACCESS_KEY not in str(caught.value)
