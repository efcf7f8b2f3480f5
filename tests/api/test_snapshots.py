"""Snapshots over HTTP."""

import base64
import io

import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tarn.api.http.streaming.row_formats import SERIALIZERS, preferred
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import NotAcceptable
from tarn.model.datasets.snapshot import Column, Snapshot, SnapshotOperation, Table
from tarn.storage.fault_injection import FaultyStore
from tarn.storage.store import Store

from tests.in_process_api import InProcessApi
from tests.lake.manifests import build, dataset_of, file, history, publish

LOG = "/v1/datasets/donations/snapshots"
NDJSON, PARQUET, ARROW = SERIALIZERS


@pytest.fixture
def store(store: Store) -> FaultyStore:
    return FaultyStore(store)


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi, database: Database) -> Dataset:
    api.dataset("donations")
    return dataset_of(database, "donations")


def problem(api: InProcessApi, path: str) -> tuple[int, str]:
    response = api.admin.get(path)
    return response.status_code, response.json()["type"].removeprefix("/problems/")


@pytest.mark.contract("H8")
def test_dataset_without_snapshots_lists_none_and_has_no_latest(api: InProcessApi):
    assert api.admin.get(LOG).json() == {"results": [], "next": None}
    assert problem(api, f"{LOG}/latest") == (404, "no-snapshots")
    assert problem(api, f"{LOG}/latest/files") == (404, "no-snapshots")


@pytest.mark.contract("H8")
@pytest.mark.parametrize("name", ["3", "0", "01890000-0000-7000-8000-000000000000", "9" * 36])
def test_unknown_snapshot_is_not_found(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, name: str
):
    history(database, store, dataset, 2)

    assert problem(api, f"{LOG}/{name}") == (404, "snapshot-not-found")
    assert problem(api, f"{LOG}/{name}/files") == (404, "snapshot-not-found")


def test_impossible_snapshot_name_is_refused(api: InProcessApi):
    assert problem(api, f"{LOG}/a%2Eb") == (422, "schema-violation")


@pytest.mark.contract("M1")
def test_manifest_is_returned_as_stored_by_id_by_number_and_as_latest(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    published = history(database, store, dataset, 2)
    stored = store.get(dataset.layout.snapshot(2))

    responses = [api.admin.get(f"{LOG}/{name}") for name in (published[1].id, "2", "latest")]

    assert [response.content for response in responses] == [stored] * 3
    assert [response.headers["Tarn-Snapshot"] for response in responses] == [published[1].id] * 3
    assert responses[0].headers["Content-Type"] == "application/json"
    assert api.admin.get(f"{LOG}/1").headers["Tarn-Snapshot"] == published[0].id


def test_log_lists_manifests_newest_first_without_their_file_lists(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    first = publish(database, store, dataset, build(dataset, message="first load", metadata={"source": {"n": None}}))
    second = publish(database, store, dataset, build(dataset, first, operation=SnapshotOperation.COMPACT))

    newest, oldest = api.admin.get(LOG).json()["results"]

    stored = orjson.loads(first.to_json())
    same = ("seq", "id", "content", "created", "operation", "author", "message", "metadata", "segment", "rows")
    assert {field: oldest[field] for field in same} == {field: stored[field] for field in same}
    assert oldest["parent"] is None
    assert oldest["batches"] == 1
    assert oldest["statements"] == {"version": 0, "files": 1, "size": 1000, "added": 1, "removed": 0}
    assert oldest["translog"] == {"version": 0, "files": 1, "size": 1000, "added": 1, "removed": 0}
    assert (newest["id"], newest["parent"], newest["operation"]) == (second.id, first.id, "compact")
    assert newest["statements"] == {"version": 1, "files": 2, "size": 2001, "added": 1, "removed": 0}


@pytest.mark.contract("M13")
def test_content_log_is_unchanged_by_compactions(api: InProcessApi, database: Database, store: Store, dataset: Dataset):
    (flushed,) = history(database, store, dataset, 1)
    compacted = publish(database, store, dataset, build(dataset, flushed, operation=SnapshotOperation.COMPACT))
    publish(database, store, dataset, build(dataset, compacted))

    assert [entry["content"] for entry in api.admin.get(LOG).json()["results"]] == [3, 1, 1]


@pytest.mark.contract("M11")
def test_invalid_manifest_is_listed_in_the_log_with_its_invalid_field(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    published = history(database, store, dataset, 4)
    broken = orjson.loads(published[1].to_json())
    del broken["metadata"]
    store.put(dataset.layout.snapshot(2), orjson.dumps(broken))
    store.delete([dataset.layout.snapshot(3)])

    entries = api.admin.get(LOG).json()["results"]
    single = api.admin.get(f"{LOG}/2")

    assert [(entry["seq"], entry["id"]) for entry in entries] == [(one.seq, one.id) for one in reversed(published)]
    assert ["problem" in entry for entry in entries] == [False, True, True, False]
    assert entries[1]["problem"]["field"] == "document"
    assert entries[2] == {"seq": 2, "id": published[1].id, "problem": single.json()}
    assert (single.status_code, single.json()["type"]) == (500, "/problems/manifest-invalid")
    assert single.json()["field"] == "metadata"
    assert problem(api, f"{LOG}/{published[1].id}/files") == (500, "manifest-invalid")
    assert api.admin.get(f"{LOG}/latest").status_code == 200


@pytest.mark.contract("H2")
def test_unrecorded_manifest_is_not_in_the_log_and_not_found(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    published = history(database, store, dataset, 2)
    stray = build(dataset, published[0])
    store.put(dataset.layout.snapshot(2), stray.to_json())
    ahead = build(dataset, published[1])
    store.put_new(dataset.layout.snapshot(3), ahead.to_json())

    entries = api.admin.get(LOG).json()["results"]

    assert [entry["id"] for entry in entries] == [published[1].id, published[0].id]
    assert entries[0]["problem"]["field"] == "id"
    for name in (stray.id, ahead.id, "3"):
        assert problem(api, f"{LOG}/{name}") == (404, "snapshot-not-found")


@pytest.mark.contract("X5")
def test_log_is_paged_and_a_page_reads_only_its_own_manifests(
    api: InProcessApi, database: Database, store: FaultyStore, dataset: Dataset
):
    history(database, store, dataset, 5)
    pages, cursor, read = [], "", []
    while cursor is not None:
        store.calls.clear()
        page = api.admin.get(f"{LOG}?limit=2" + (f"&cursor={cursor}" if cursor else "")).json()
        pages.append([entry["seq"] for entry in page["results"]])
        read.append(sorted(call.path for call in store.calls))
        cursor = page["next"]

    assert pages == [[5, 4], [3, 2], [1]]
    assert read == [sorted(dataset.layout.snapshot(seq) for seq in page) for page in pages]


@pytest.mark.contract("X2", "X5")
@pytest.mark.parametrize("length", [1, 12])
def test_one_snapshot_costs_one_storage_call_whatever_the_length_of_history(
    api: InProcessApi, database: Database, store: FaultyStore, dataset: Dataset, length: int
):
    published = history(database, store, dataset, length)
    store.calls.clear()

    for name in ("latest", published[0].id, str(length)):
        assert api.admin.get(f"{LOG}/{name}").status_code == 200

    assert [(call.method, call.path) for call in store.calls] == [
        ("get", dataset.layout.snapshot(seq)) for seq in (length, 1, length)
    ]


def test_snapshot_published_during_paging_neither_hides_nor_repeats_one(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    published = history(database, store, dataset, 3)
    first = api.admin.get(f"{LOG}?limit=1").json()
    publish(database, store, dataset, build(dataset, published[-1]))

    rest = api.admin.get(f"{LOG}?cursor={first['next']}").json()

    assert [entry["seq"] for entry in (*first["results"], *rest["results"])] == [3, 2, 1]


def test_forged_cursor_is_refused(api: InProcessApi, database: Database, store: Store, dataset: Dataset):
    history(database, store, dataset, 2)
    cursor = api.admin.get(f"{LOG}?limit=1").json()["next"]
    list_name, _ = orjson.loads(_decoded(cursor))

    for position in ("x", "-1", "9" * 30, ""):
        forged = _encoded([list_name, position])
        response = api.admin.get(f"{LOG}?cursor={forged}")
        assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "query.cursor")


def _decoded(cursor: str) -> bytes:
    return base64.urlsafe_b64decode(cursor + "==")


def _encoded(position: list[str]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(position)).decode().rstrip("=")


@pytest.mark.parametrize("path", ["", "/latest", "/latest/files"])
def test_reading_requires_the_read_level_only(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, path: str
):
    history(database, store, dataset, 1)

    assert api.tenant("alice", donations="read").get(LOG + path).status_code == 200
    assert api.tenant("bob", others="admin").get(LOG + path).status_code == 404
    assert api.anonymous.get(LOG + path).status_code == 401


def rows_of(content: bytes, form: str) -> list[dict]:
    if form == NDJSON:
        return [orjson.loads(line) for line in content.splitlines()]
    table = parquet.read_table(io.BytesIO(content)) if form == PARQUET else pa.ipc.open_stream(content).read_all()
    rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    return [row | {"partition": dict(row["partition"])} for row in rows]


@pytest.mark.parametrize("form", [NDJSON, PARQUET, ARROW])
def test_files_are_the_same_rows_in_every_format(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, form: str
):
    published = history(database, store, dataset, 2)

    response = api.admin.get(f"{LOG}/latest/files", headers={"Accept": form})

    rows = rows_of(response.content, form)
    assert (response.headers["Content-Type"], response.headers["Tarn-Snapshot"]) == (form, published[1].id)
    assert [(row["table"], row["path"], row["added"]) for row in rows] == [
        ("statements", "origin=crawl/000.parquet", False),
        ("statements", "origin=crawl/001.parquet", True),
        ("translog", "kind=insert/000.parquet", False),
        ("translog", "kind=insert/001.parquet", True),
    ]
    assert rows[1] == {
        "table": "statements",
        "path": "origin=crawl/001.parquet",
        "size": 1001,
        "rows": 10,
        "partition": {"origin": "crawl"},
        "added": True,
        "canonical_id_min": "e0010",
        "canonical_id_max": "e0019",
        "canonical_id_nulls": 0,
        "first_seen_min": "2030-01-01T00:00:00+00:00",
        "first_seen_max": "2030-01-01T00:00:00+00:00",
        "first_seen_nulls": 0,
    }


def test_files_are_filtered_by_the_entity_that_they_may_hold(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, tmp_path
):
    history(database, store, dataset, 3)
    saved = tmp_path / "files.parquet"
    saved.write_bytes(api.admin.get(f"{LOG}/3/files", headers={"Accept": PARQUET}).content)

    paths = duckdb.sql(
        f"select path from '{saved}' where partition['origin'] = 'crawl'"
        " and 'e0015' between canonical_id_min and canonical_id_max"
    ).fetchall()

    assert paths == [("origin=crawl/001.parquet",)]


def with_statements(dataset: Dataset, *columns: dict[str, Column], **checksum: str) -> Snapshot:
    files = tuple(
        file("statements", number).model_copy(update={"columns": item, **checksum})
        for number, item in enumerate(columns)
    )
    empty = Table(version=0, files=(), added=(), removed=())
    return build(dataset, statements=Table(version=0, files=files, added=(), removed=()), translog=empty)


@pytest.mark.parametrize("form", [NDJSON, PARQUET, ARROW])
def test_unreported_statistic_of_a_file_is_missing_from_its_row(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, form: str
):
    columns = [{"a": Column(min=1, max=2)}, {"a": Column(max=3, truncated=True), "b": Column(nulls=0)}, {}]
    publish(database, store, dataset, with_statements(dataset, *columns, checksum="ab"))

    rows = rows_of(api.admin.get(f"{LOG}/1/files", headers={"Accept": form}).content, form)

    fixed = {"table", "path", "size", "rows", "partition", "added"}
    assert [{name: value for name, value in row.items() if name not in fixed} for row in rows] == [
        {"checksum": "ab", "a_min": 1, "a_max": 2},
        {"checksum": "ab", "a_max": 3, "a_truncated": True, "b_nulls": 0},
        {"checksum": "ab"},
    ]


@pytest.mark.parametrize("form", [NDJSON, PARQUET, ARROW])
@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [(1, 2.5, [1, 2.5]), (1, "x", ["1", '"x"']), (True, 2, ["true", "2"]), (2**64 - 1, -1, [str(2**64 - 1), "-1"])],
)
def test_bounds_of_different_types_are_json_in_formats_with_typed_columns(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, form: str, first, second, shown
):
    columns = [{"a": Column(min=first)}, {"a": Column(min=second)}]
    publish(database, store, dataset, with_statements(dataset, *columns))

    rows = rows_of(api.admin.get(f"{LOG}/1/files", headers={"Accept": form}).content, form)

    assert [row["a_min"] for row in rows] == shown


@pytest.mark.parametrize("form", [NDJSON, PARQUET, ARROW])
def test_snapshot_without_files_has_no_rows(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset, form: str
):
    publish(database, store, dataset, with_statements(dataset))

    assert rows_of(api.admin.get(f"{LOG}/1/files", headers={"Accept": form}).content, form) == []


def test_unsupported_format_of_files_is_refused_with_the_supported_ones(
    api: InProcessApi, database: Database, store: Store, dataset: Dataset
):
    history(database, store, dataset, 1)

    response = api.admin.get(f"{LOG}/latest/files", headers={"Accept": "text/csv"})

    assert (response.status_code, response.json()["supported"]) == (406, [NDJSON, PARQUET, ARROW])


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, NDJSON),
        ("", NDJSON),
        ("*/*", NDJSON),
        ("application/*", NDJSON),
        (PARQUET, PARQUET),
        (f"text/html, {ARROW};q=0.2, {PARQUET};q=0.9", PARQUET),
        (f"*/*;q=0.1, {ARROW}", ARROW),
        (f"{NDJSON};q=0, */*", PARQUET),
    ],
)
def test_format_is_the_one_that_the_caller_prefers(accept: str | None, form: str):
    assert preferred(accept, tuple(SERIALIZERS)) == form


@pytest.mark.parametrize("accept", ["text/*", f"{NDJSON};q=0", "nonsense", "text/csv, image/png"])
def test_caller_who_accepts_no_format_is_refused(accept: str):
    with pytest.raises(NotAcceptable):
        preferred(accept, tuple(SERIALIZERS))


@pytest.mark.contract("D1")
@pytest.mark.parametrize("body", [{}, {"metadata": None}, {"metadata": {}}])
def test_absent_or_null_metadata_in_a_request_becomes_an_empty_object(api: InProcessApi, body: dict):
    stages = "/v1/datasets/donations/stages"

    opened = api.admin.post(stages, {"origin": "bulk", **body}).json()
    api.admin.post(f"{stages}/commit", {"stages": [opened["id"]], **body})

    assert (opened["metadata"], opened["message"]) == ({}, None)
    assert api.admin.get(f"{stages}/{opened['id']}").json()["metadata"] == {}


@pytest.mark.contract("D1")
def test_null_inside_metadata_is_kept(api: InProcessApi):
    metadata = {"a": None, "b": [None, {"c": None}], "": 0.5}

    opened = api.admin.post("/v1/datasets/donations/stages", {"origin": "bulk", "metadata": metadata}).json()

    assert opened["metadata"] == metadata


@pytest.mark.contract("M8")
@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("around", ["{0}", '{{"a": [1, {{"b": {0}}}]}}'])
@pytest.mark.parametrize("path", ["/stages", "/stages/commit"])
def test_number_that_json_does_not_have_is_refused_at_any_depth(api: InProcessApi, token: str, around: str, path: str):
    body = '{"stages": ["x"], "metadata": {"m": ' + around.format(token) + "}}"

    response = api.admin(
        "POST", f"/v1/datasets/donations{path}", content=body, headers={"Content-Type": "application/json"}
    )

    assert (response.status_code, response.json()["type"]) == (400, "/problems/invalid-format")
    assert response.json()["errors"][0]["line"] == 1
    assert api.admin.get("/v1/datasets/donations/stages").json()["results"] == []


@pytest.mark.contract("M8")
@pytest.mark.parametrize("path", ["/stages", "/stages/commit"])
def test_integer_that_a_manifest_cannot_hold_is_refused_with_its_location(api: InProcessApi, path: str):
    body = {"metadata": {"a": [{"b": 2**64}]}} | ({"stages": ["x"]} if path == "/stages/commit" else {})

    response = api.admin.post(f"/v1/datasets/donations{path}", body)

    assert response.status_code == 422
    assert response.json()["errors"][0] == {
        "line": None,
        "field": "metadata",
        "reason": "a.0.b is an integer of more than 64 bits: send it as a string",
    }


@pytest.mark.parametrize("path", ["/stages", "/stages/commit"])
def test_message_that_one_database_cannot_store_is_refused_on_both(api: InProcessApi, path: str):
    body = {"message": "a\x00b"} | ({"stages": ["x"]} if path == "/stages/commit" else {})

    response = api.admin.post(f"/v1/datasets/donations{path}", body)

    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "message")
