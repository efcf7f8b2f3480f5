"""The layout, path by path: a failure here means that the storage format changed."""

from datetime import UTC, datetime, timedelta, timezone

from tarn.model.datasets.export import ExportKind
from tarn.model.names import LAKEHOUSE, Checksum, DatasetName, FileName, LockName, Origin, RefName, TagKey, TenantName
from tarn.storage.layout import DatasetLayout, Layout, data_file

MOMENT = datetime(2025, 3, 4, 5, 6, 7, 89, tzinfo=UTC)
STAMP = "20250304T050607.000089Z"
C = Checksum("0a1b2c" + "d" * 58)
BLOB = f"ds/archive/0a/1b/2c/{C}"
ID = "0195-id"


def test_paths_of_the_root_are_those_of_the_format():
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


def test_paths_of_a_dataset_are_those_of_the_format():
    ds = DatasetLayout(DatasetName("ds"))
    tenant = TenantName("acme")
    paths_of_layout = {
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
        ds.table("statements"): ds.statements,
        ds.table("translog"): ds.translog,
        ds.statements: "ds/entities/statements",
        data_file("origin", "crawl", "id"): "origin=crawl/id.parquet",
        data_file("origin", "mapping:abc", "id"): "origin=mapping%3Aabc/id.parquet",
        ds.translog: "ds/entities/translog",
        ds.delta_checkpoint("t", 7)[0]: "t/_delta_log/00000000000000000007.checkpoint.parquet",
        ds.delta_checkpoint("t", 7)[1]: "t/_delta_log/_last_checkpoint",
        ds.delta_log(ds.translog, 7): "ds/entities/translog/_delta_log/00000000000000000007.json",
        ds.export(ExportKind.ENTITIES, "entities.ftm.json.gz"): "ds/entities.ftm.json.gz",
        ds.export(ExportKind.INDEX, "index.json"): "ds/index.json",
        ds.exports: "ds/exports",
        ds.export(ExportKind.STATEMENTS, "statements.csv"): "ds/exports/statements.csv",
        ds.export(ExportKind.STATISTICS, "statistics.json"): "ds/exports/statistics.json",
        ds.export(ExportKind.DOCUMENTS, "documents.csv"): "ds/exports/documents.csv",
        ds.export(ExportKind.GRAPH, "graph.cypher"): "ds/exports/graph.cypher",
        ds.export(ExportKind.DELTA, "entities.delta.json"): "ds/exports/entities.delta.json",
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
    assert list(paths_of_layout) == list(paths_of_layout.values())


def test_every_path_of_the_layout_is_checked():
    golden = test_paths_of_a_dataset_are_those_of_the_format.__code__.co_names
    public = {name for name in vars(DatasetLayout) if not name.startswith("_") and name != "name"}
    assert public <= set(golden)


def test_versions_are_stored_under_the_month_in_utc():
    local = datetime(2025, 1, 1, 0, 30, tzinfo=timezone(timedelta(hours=1)))
    assert Layout().versions.at(local, FileName("a")).startswith("versions/2024/12/20241231T233000")
