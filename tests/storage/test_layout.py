"""The layout, path by path: a change here is a change of the format on storage."""

from datetime import UTC, datetime, timedelta, timezone

from tarn.model.export import Kind
from tarn.model.names import LAKEHOUSE, Checksum, DatasetName, FileName, LockName, Origin, RefName, TagKey, TenantName
from tarn.storage.layout import DatasetLayout, Layout, data_file

MOMENT = datetime(2025, 3, 4, 5, 6, 7, 89, tzinfo=UTC)
STAMP = "20250304T050607.000089Z"
C = Checksum("0a1b2c" + "d" * 58)
BLOB = f"ds/archive/0a/1b/2c/{C}"
ID = "0195-id"


def test_every_path_of_the_root_is_where_the_format_says():
    layout = Layout()
    assert [
        layout.lake,
        layout.index,
        layout.config,
        layout.versions.at(MOMENT, FileName("index.json")),
        layout.probe(ID),
        layout.restoring,
        layout.dataset(DatasetName("ds")).root,
    ] == [
        "lake.json",
        "index.json",
        "config.yml",
        f"versions/2025/03/{STAMP}/index.json",
        f".probe/{ID}",
        ".restoring",
        "ds",
    ]


def test_every_path_of_a_dataset_is_where_the_format_says():
    ds = DatasetLayout(DatasetName("ds"))
    tenant = TenantName("acme")
    made = {
        ds.root: "ds",
        ds.config: "ds/config.yml",
        ds.index: "ds/index.json",
        ds.lock: "ds/.LOCK",
        ds.archive: "ds/archive",
        ds.blob(C): BLOB,
        ds.blob_data(C): f"{BLOB}/data",
        ds.file_record(C, ID): f"{BLOB}/{ID}.json",
        ds.text(C, Origin("ocr:en")): f"{BLOB}/ocr:en.txt",
        ds.uploads: "ds/uploads",
        ds.upload(ID): f"ds/uploads/{ID}",
        ds.upload_part(ID, "000000000000"): f"ds/uploads/{ID}/000000000000",
        ds.statements: "ds/entities/statements",
        data_file("origin", "crawl", "id"): "origin=crawl/id.parquet",
        data_file("origin", "mapping:abc", "id"): "origin=mapping%3Aabc/id.parquet",
        ds.translog: "ds/entities/translog",
        ds.delta_checkpoint("t", 7)[0]: "t/_delta_log/00000000000000000007.checkpoint.parquet",
        ds.delta_checkpoint("t", 7)[1]: "t/_delta_log/_last_checkpoint",
        ds.delta_log(ds.translog, 7): "ds/entities/translog/_delta_log/00000000000000000007.json",
        ds.export(Kind.ENTITIES, "entities.ftm.json.gz"): "ds/entities.ftm.json.gz",
        ds.export(Kind.INDEX, "index.json"): "ds/index.json",
        ds.exports: "ds/exports",
        ds.export(Kind.STATEMENTS, "statements.csv"): "ds/exports/statements.csv",
        ds.export(Kind.STATISTICS, "statistics.json"): "ds/exports/statistics.json",
        ds.export(Kind.DOCUMENTS, "documents.csv"): "ds/exports/documents.csv",
        ds.export(Kind.GRAPH, "graph.cypher"): "ds/exports/graph.cypher",
        ds.export(Kind.DELTA, "entities.delta.json"): "ds/exports/entities.delta.json",
        ds.delta_index: "ds/exports/delta.json",
        ds.export_deltas: "ds/exports/delta",
        ds.export_delta("v1.json"): "ds/exports/delta/v1.json",
        ds.export_parts: "ds/exports/.parts",
        ds.export_run(ID): f"ds/exports/.parts/{ID}",
        ds.snapshots: "ds/snapshots",
        ds.snapshot(42): "ds/snapshots/000000000042.json",
        ds.snapshot_head: "ds/snapshots/HEAD",
        ds.snapshot_note: "ds/snapshots/RECONCILING",
        ds.refs: "ds/refs",
        ds.ref(RefName("release-1")): "ds/refs/release-1.json",
        ds.mappings: "ds/mappings",
        ds.mapping("abc"): "ds/mappings/abc/mapping.yml",
        ds.mapping_versions("abc").at(MOMENT, FileName("mapping.yml")): (
            f"ds/mappings/abc/versions/2025/03/{STAMP}/mapping.yml"
        ),
        ds.versions.at(MOMENT, FileName("config.yml")): f"ds/versions/2025/03/{STAMP}/config.yml",
        ds.tags: "ds/tags",
        ds.tag(tenant, TagKey("operations/crawl/last_run")): "ds/tags/acme/operations/crawl/last_run",
        ds.tag(LAKEHOUSE, TagKey("journal/last_updated")): "ds/tags/lakehouse/journal/last_updated",
        ds.locks: "ds/locks",
        ds.named_lock(tenant, LockName("nightly")): "ds/locks/acme/nightly",
        ds.queue: "ds/queue",
        ds.queue_item(tenant, ID): f"ds/queue/acme/{ID}.json",
        ds.runs: "ds/jobs/runs",
        ds.run("flush", MOMENT): f"ds/jobs/runs/flush/{STAMP}.json",
    }
    assert list(made) == list(made.values())


def test_golden_list_leaves_no_path_of_the_layout_out():
    golden = test_every_path_of_a_dataset_is_where_the_format_says.__code__.co_names
    public = {name for name in vars(DatasetLayout) if not name.startswith("_") and name != "name"}
    assert public <= set(golden)


def test_versions_are_kept_under_the_month_in_utc():
    local = datetime(2025, 1, 1, 0, 30, tzinfo=timezone(timedelta(hours=1)))
    assert Layout().versions.at(local, FileName("a")).startswith("versions/2024/12/20241231T233000")
