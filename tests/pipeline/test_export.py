"""Exports: generated from one snapshot, and only if they are stale."""

import csv
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from followthemoney.dataset.catalog import DataCatalog
from followthemoney.dataset.dataset import Dataset as FtmDataset
from sqlalchemy import delete, update
from tarn.datasets.registry import Dataset
from tarn.db.tables import export_leases
from tarn.db.tables import exports as exports_table
from tarn.db.tables import snapshots as history
from tarn.integrity.vacuum import Vacuum
from tarn.lake.commit import SnapshotPublisher
from tarn.model.datasets.export import ExportKind, OmittedEdges
from tarn.model.ftm.statistics import Statistics
from tarn.model.ids import now
from tarn.model.work.job import (
    CompactOptions,
    ExportOptions,
    ExportResult,
    MadeExport,
    MakeOptions,
    MakeResult,
    PurgeOptions,
    ResumeLater,
    SkippedExport,
)
from tarn.pipeline.jobs import export
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.export import Exports
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.purge import Purge
from tarn.pipeline.jobs.rewrite import Rewriter
from tarn.pipeline.tasks.task import Task
from tarn.query.engine.active_reads import ActiveReads

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_rewrite import ignore

AWKWARD = "a \"quoted\", 'single' \\back\\ \n new \t tab \U0001d4b3 ü {brace} `tick` ;"


@pytest.fixture
def exporting(api: InProcessApi, kernels: DirectKernels) -> Exports:
    return exports_of(api, kernels)


def exports_of(api: InProcessApi, kernels: DirectKernels, reached: Callable[[str], None] = lambda _: None) -> Exports:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    return Exports(services.settings, services.database, services.store, flush, lambda: kernels, ActiveReads(), reached)


def person(name: str, **properties: Any) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [name.title()], **properties}}


def write(api: InProcessApi, *entities: dict[str, Any], origin: str = "crawl") -> None:
    assert api.admin.post(f"/v1/datasets/test/entities?origin={origin}", list(entities)).status_code == 200


def fetched(api: InProcessApi, name: str) -> bytes:
    response = api.admin.get(f"/v1/datasets/test/exports/{name}")
    assert response.status_code == 200, response.text
    return response.content


def entities(api: InProcessApi) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fetched(api, "entities.ftm.json").splitlines()]


@pytest.mark.both_databases
def test_exports_of_all_kinds_equal_reads_and_are_listed_in_the_index(
    api: InProcessApi, dataset: Dataset, exporting: Exports
):
    api.admin.post("/v1/datasets/test/entities", [person("ann", country=["de"]), person("bob", summary=[AWKWARD])])
    write(
        api,
        {"id": "acme", "schema": "Company", "properties": {"name": ["Acme"]}},
        {"id": "owns", "schema": "Ownership", "properties": {"owner": ["ann"], "asset": ["acme"]}},
        {"id": "paper", "schema": "Pages", "properties": {"fileName": ["a.pdf"], "contentHash": ["a" * 40]}},
    )

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert [export.kind for export in done.made] == list(ExportKind)
    assert done.skipped == []
    read = [json.loads(line) for line in api.admin.get("/v1/datasets/test/entities/stream").content.splitlines()]
    assert entities(api) == read
    assert len(read) == 5
    rows = list(csv.DictReader(io.StringIO(fetched(api, "statements.csv").decode(), newline="")))
    keys = [(row["canonical_id"], row["id"]) for row in rows]
    assert keys == sorted(set(keys))
    assert {row["value"] for row in rows if row["prop"] == "summary"} == {AWKWARD}
    assert [row["file_name"] for row in csv.DictReader(io.StringIO(fetched(api, "documents.csv").decode()))] == [
        "a.pdf"
    ]
    assert b"OWN" in fetched(api, "graph.cypher").upper()
    counts = json.loads(fetched(api, "statistics.json"))
    assert (counts["entity_count"], counts["things"]["total"], counts["intervals"]["total"]) == (5, 4, 1)
    index = json.loads(fetched(api, "index.json"))
    listed = {one["name"]: one for one in index["resources"]}
    assert listed.keys() == {made.name for made in done.made} - {"index.json"}
    for name, resource in listed.items():
        content = fetched(api, name)
        assert (resource["size"], resource["checksum"]) == (len(content), hashlib.sha1(content).hexdigest())
    assert (index["version"], index["entity_count"], index["thing_count"]) == (done.version, 5, 4)
    assert list(api.services.store.list(dataset.layout.export_parts)) == []


def test_graph_of_an_edge_with_many_ends_is_bounded_and_reports_omitted_edges(
    api: InProcessApi, dataset: Dataset, exporting: Exports
):
    ends = {"owner": [f"o{number}" for number in range(1200)], "asset": [f"a{number}" for number in range(1200)]}
    write(api, {"id": "owns", "schema": "Ownership", "properties": ends}, person("ann"))

    done = exporting.export(dataset, ExportOptions(kinds=[ExportKind.GRAPH, ExportKind.ENTITIES]), ignore)

    exports = {one.kind: one for one in done.made}
    text = fetched(api, "graph.cypher").decode()
    assert exports[ExportKind.GRAPH].omitted_edges == OmittedEdges(count=1_430_000, entities=1, first=["owns"])
    assert exports[ExportKind.ENTITIES].omitted_edges is None
    assert exports[ExportKind.GRAPH].size < 4_000_000
    assert text.count("MERGE (s)-[r:OWNERSHIP") == 10_000
    assert "// 1430000 of 1440000 relationships of owns are left out" in text.splitlines()


def test_exports_are_kept_while_the_content_is_unchanged_and_regenerated_otherwise(
    api: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels
):
    write(api, person("ann"))
    first = exporting.make(dataset, MakeOptions(), ignore)

    second = exporting.make(dataset, MakeOptions(), ignore)
    compacted(api, dataset, kernels)
    after_compaction = exporting.make(dataset, MakeOptions(), ignore)
    fresh_then = freshness(api)
    write(api, person("bob"))
    stale_then = freshness(api)
    third = exporting.make(dataset, MakeOptions(), ignore)

    assert len(first.made) == len(ExportKind)
    assert (second.made, {one.reason for one in second.skipped}) == ([], {"it is fresh"})
    assert after_compaction.made == []
    assert set(fresh_then.values()) == {None}
    assert set(stale_then.values()) == {"2 rows wait in the journal"}
    assert [one.kind for one in third.made] == list(ExportKind)
    assert [entity["id"] for entity in entities(api)] == ["ann", "bob"]
    assert set(freshness(api).values()) == {None}


def test_write_without_visible_change_updates_tags_and_regenerates_nothing(
    api: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(api, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)
    before = api.services.store.head(dataset.layout.export(ExportKind.STATEMENTS, "statements.csv"))
    assert api.admin.delete("/v1/datasets/test/origins/nobody").status_code == 200
    stale = freshness(api)

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert set(stale.values()) == {"1 rows wait in the journal"}
    assert (done.made, {one.reason for one in done.skipped}) == ([], {"what is visible has not changed"})
    assert set(freshness(api).values()) == {None}
    assert api.services.store.head(dataset.layout.export(ExportKind.STATEMENTS, "statements.csv")) == before


def test_write_between_an_export_and_its_record_never_makes_it_fresh(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    steps: list[str] = []
    write(api, person("ann"))

    for step in ("resolved", "built", "statements joined", "statements put"):

        def reached(name: str, step: str = step) -> None:
            steps.append(name)
            if name == step:
                write(api, person(f"p-{step.replace(' ', '-')}"))

        exports_of(api, kernels, reached).export(dataset, ExportOptions(kinds=[ExportKind.STATEMENTS]), ignore)

        assert freshness(api)["statements"] is not None, step
    exports_of(api, kernels).export(dataset, ExportOptions(kinds=[ExportKind.STATEMENTS]), ignore)
    assert freshness(api)["statements"] is None
    assert {"resolved", "built", "statements joined", "statements put", "statements recorded"} <= set(steps)


class Killed(Exception):
    """The process is killed here."""


@pytest.mark.parametrize(
    "step", ["resolved", "built", "entities joined", "entities put", "statistics put", "delta joined", "delta put"]
)
def test_export_killed_at_a_step_leaves_complete_files_and_old_tags_and_the_next_one_repairs_it(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, step: str
):
    write(api, person("ann"), person("bob"))
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)
    before = {name: fetched(api, name) for name in ("entities.ftm.json", "statistics.json", "entities.delta.json")}
    write(api, person("cem"))
    assert api.admin.delete("/v1/datasets/test/entities/bob").status_code == 200

    def die(name: str) -> None:
        if name == step:
            raise Killed

    dying = exports_of(api, kernels, die)
    with pytest.raises(Killed):
        dying.make(dataset, MakeOptions(), ignore)

    after = {name: fetched(api, name) for name in before}
    assert all(len(content.splitlines()) >= 2 for content in after.values())
    died_over = ExportKind(step.split()[0]) if " " in step else None
    for kind, reason in freshness(api).items():
        if died_over is None or list(ExportKind).index(ExportKind(kind)) >= list(ExportKind).index(died_over):
            assert reason is not None
    with api.services.database.write() as connection:
        connection.execute(delete(export_leases))
    deltas = [json.loads(line) for line in before["entities.delta.json"].splitlines()]
    exports_of(api, kernels).make(dataset, MakeOptions(), ignore)
    assert set(freshness(api).values()) == {None}
    assert [entity["id"] for entity in entities(api)] == ["ann", "cem"]
    deltas += [json.loads(line) for line in fetched(api, "entities.delta.json").splitlines()]
    assert applied(deltas).keys() == {"ann", "cem"}
    assert list(api.services.store.list(dataset.layout.export_parts)) == []


def test_consecutive_deltas_lead_to_every_export(
    api: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels
):
    known: dict[str, Any] = {}
    write(api, *(person(f"p{number:02}") for number in range(30)))
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: write(api, person("p03", country=["fr"]), person("new"), origin="more"),
        lambda: compacted(api, dataset, kernels),
        lambda: api.admin.delete("/v1/datasets/test/entities/p07"),
        lambda: write(api, person("p07"), {"id": "p08", "schema": "Vessel", "properties": {"name": ["A ship"]}}),
        lambda: api.admin.delete("/v1/datasets/test/origins/more"),
    ]
    versions: list[str] = []
    for change in changes:
        change()
        done = exporting.make(dataset, MakeOptions(), ignore)
        if ExportKind.DELTA not in [made.kind for made in done.made]:
            assert change is changes[2]
            continue
        versions.append(done.version or "")
        lines = [json.loads(line) for line in fetched(api, "entities.delta.json").splitlines()]
        known = applied(lines, known)
        assert known == {entity["id"]: entity for entity in entities(api)}
    index = json.loads(fetched(api, "delta.json"))
    assert versions == sorted(versions) == list(index["versions"])
    deltas = [api.admin.get(url).content for url in index["versions"].values()]
    entities_by_id: dict[str, Any] = {}
    for content in deltas:
        entities_by_id = applied([json.loads(line) for line in content.splitlines()], entities_by_id)
    assert entities_by_id == known


def disagree(api: InProcessApi, name: str, *schemata: str) -> None:
    """Write an entity with a different schema for each origin, so that it cannot be assembled."""
    for schema in schemata:
        write(api, {"id": name, "schema": schema, "properties": {}}, origin=schema.lower())


def left_out(result: ExportResult | MakeResult) -> dict[str, int | None]:
    files: list[MadeExport | SkippedExport] = [*result.made, *result.skipped]
    return {one.kind: one.invalid for one in files}


def test_invalid_entities_are_counted_for_every_file_that_omits_them(
    api: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(api, person("ann"), {"id": "paper", "schema": "Pages", "properties": {"fileName": ["a.pdf"]}})
    disagree(api, "boat", "Vessel", "LegalEntity")
    disagree(api, "scan", "Pages", "Person")
    disagree(api, "firm", "Company", "LegalEntity")

    first = exporting.make(dataset, MakeOptions(), ignore)
    second = exporting.make(dataset, MakeOptions(), ignore)

    assert [entity["id"] for entity in entities(api)] == ["ann", "firm", "paper"]
    assert [row["id"] for row in csv.DictReader(io.StringIO(fetched(api, "documents.csv").decode()))] == ["paper"]
    counts = {"entities": 2, "statistics": 2, "graph": 2, "delta": 2, "documents": 1, "statements": None, "index": None}
    assert (left_out(first), first.invalid) == (counts, 2)
    assert (second.made, left_out(second), second.invalid) == ([], counts, 2)
    assert json.loads(fetched(api, "statistics.json"))["invalid"] == 2
    listed = api.admin.get("/v1/datasets/test/exports").json()["results"]
    assert {one["kind"]: one["invalid"] for one in listed} == counts


@pytest.mark.parametrize("kind", list(ExportKind))
def test_export_of_one_kind_counts_omitted_entities(
    api: InProcessApi, dataset: Dataset, exporting: Exports, kind: ExportKind
):
    write(api, person("ann"))
    disagree(api, "scan", "Pages", "Person")

    done = exporting.export(dataset, ExportOptions(kinds=[kind]), ignore)

    expected = 0 if kind in (ExportKind.STATEMENTS, ExportKind.INDEX) else 1
    assert done.invalid == expected
    assert left_out(done) == {kind: expected or None}


def test_delta_counts_changed_entities_that_it_omits(api: InProcessApi, dataset: Dataset, exporting: Exports):
    write(api, person("ann"), person("bob"))
    disagree(api, "boat", "Vessel", "LegalEntity")
    exporting.make(dataset, MakeOptions(), ignore)
    write(api, person("cem"))
    disagree(api, "ann", "Vessel")
    disagree(api, "dab", "Vessel", "Person")

    done = exporting.make(dataset, MakeOptions(), ignore)

    lines = [json.loads(line) for line in fetched(api, "entities.delta.json").splitlines()]
    assert sorted((line["op"], line["entity"]["id"]) for line in lines) == [("ADD", "cem"), ("DEL", "ann")]
    assert (left_out(done)["delta"], left_out(done)["entities"], done.invalid) == (2, 3, 3)
    api.admin.delete("/v1/datasets/test/entities/dab")
    assert left_out(exporting.make(dataset, MakeOptions(), ignore))["delta"] == 0


def test_invalid_entities_are_counted_over_all_parts(
    api: InProcessApi, dataset: Dataset, exporting: Exports, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 20)
    for schema in ("Vessel", "Person"):
        some = [{"id": f"e{number:03}", "schema": schema, "properties": dict[str, Any]()} for number in range(200)]
        write(api, *some, origin=schema.lower())

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert (left_out(done)["entities"], left_out(done)["graph"], done.invalid) == (200, 200, 200)


def test_export_made_before_entities_were_counted_is_not_reported_as_complete(
    api: InProcessApi, dataset: Dataset, exporting: Exports
):
    disagree(api, "boat", "Vessel", "LegalEntity")
    exporting.export(dataset, ExportOptions(kinds=[ExportKind.ENTITIES]), ignore)
    with api.services.database.write() as connection:
        connection.execute(update(exports_table).values(detail={}))

    done = exporting.export(dataset, ExportOptions(kinds=[ExportKind.ENTITIES]), ignore)

    assert (done.made, left_out(done), done.invalid) == ([], {"entities": None}, None)


def test_delta_whose_base_snapshot_expired_starts_from_nothing(api: InProcessApi, dataset: Dataset, exporting: Exports):
    write(api, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)
    write(api, person("bob"))
    with api.services.database.write() as connection:
        connection.execute(update(history).values(expired=now()))

    exporting.make(dataset, MakeOptions(), ignore)

    lines = [json.loads(line) for line in fetched(api, "entities.delta.json").splitlines()]
    index = json.loads(fetched(api, "delta.json"))
    assert [(line["op"], line["entity"]["id"]) for line in lines] == [("ADD", "ann"), ("ADD", "bob")]
    assert [delta["from"] for delta in index["deltas"]] == [None]


@pytest.mark.parametrize(("compression", "unpacked"), [("gzip", gzip.decompress), ("zstd", lambda data: _zstd(data))])
def test_compressed_exports_have_other_names_and_the_same_content(
    api: InProcessApi,
    dataset: Dataset,
    exporting: Exports,
    compression: str,
    unpacked: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 10)
    write(api, *(person(f"p{number:02}") for number in range(40)))
    exporting.make(dataset, MakeOptions(), ignore)
    names = ("statements.csv", "entities.ftm.json", "graph.cypher", "documents.csv")
    uncompressed = {name: fetched(api, name) for name in names}
    assert api.admin.patch("/v1/datasets/test", {"compression": compression}).status_code == 200
    stale = freshness(api)

    exporting.make(dataset, MakeOptions(), ignore)

    suffix = {"gzip": ".gz", "zstd": ".zst"}[compression]
    assert (
        stale["statements"]
        == f"it was made as statements.csv, and the dataset's compression requires statements.csv{suffix}"
    )
    for name, content in uncompressed.items():
        assert unpacked(fetched(api, name + suffix)) == content
        assert api.admin.get(f"/v1/datasets/test/exports/{name}").status_code == 404
    assert len(uncompressed["entities.ftm.json"].splitlines()) == 40
    assert set(freshness(api).values()) == {None}


def test_exports_of_an_empty_dataset_are_empty_and_valid(api: InProcessApi, dataset: Dataset, exporting: Exports):
    done = exporting.make(dataset, MakeOptions(), ignore)

    assert (done.snapshot, [made.kind for made in done.made]) == (None, list(ExportKind))
    assert entities(api) == []
    assert len(fetched(api, "statements.csv").splitlines()) == 1
    assert len(fetched(api, "documents.csv").splitlines()) == 1
    assert json.loads(fetched(api, "statistics.json"))["entity_count"] == 0
    assert fetched(api, "entities.delta.json") == b""
    assert set(freshness(api).values()) == {None}


def test_files_of_many_parts_are_joined_in_order(
    api: InProcessApi, dataset: Dataset, exporting: Exports, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 20)
    write(api, *(person(f"p{number:03}", country=["de", "fr"]) for number in range(200)))

    exporting.make(dataset, MakeOptions(), ignore)

    read = api.admin.get("/v1/datasets/test/entities/stream").content
    assert fetched(api, "entities.ftm.json") == read
    header, *lines = fetched(api, "statements.csv").splitlines()
    assert (header.count(b'"id"'), len(lines), len(set(lines))) == (1, 800, 800)
    stream = api.admin.get("/v1/datasets/test/statements/stream", headers={"Accept": "text/csv"}).content
    assert fetched(api, "statements.csv") == stream


def test_incremental_statistics_equal_a_full_count(
    api: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    recounted: list[Statistics | None] = []
    known = Exports._update_statistics

    def recount(self: Exports, *arguments: Any) -> Statistics | None:
        recounted.append(known(self, *arguments))
        return recounted[-1]

    monkeypatch.setattr(Exports, "_update_statistics", recount)
    statistics = ExportOptions(kinds=[ExportKind.STATISTICS])
    write(api, *(person(f"p{number:02}", country=["de"], birthDate=[f"19{number}"]) for number in range(50, 90)))
    exporting.export(dataset, statistics, ignore)
    changes: list[Callable[[], Any]] = [
        lambda: write(api, person("p60", country=["fr"]), origin="more"),
        lambda: api.admin.delete("/v1/datasets/test/entities/p70"),
        lambda: write(api, {"id": "p71", "schema": "Vessel", "properties": {"name": ["A ship"]}}),
        lambda: api.admin.delete("/v1/datasets/test/entities/p50"),
        lambda: write(api, person("p91")),
    ]
    for change in changes:
        change()
        exporting.export(dataset, statistics, ignore)
        counted = json.loads(fetched(api, "statistics.json"))
        exporting.export(dataset, ExportOptions(kinds=[ExportKind.STATISTICS], force=True), ignore)
        counted = json.loads(fetched(api, "statistics.json"))
        assert counted | {"version": None} == counted | {"version": None}

    # The first run had no previous statistics, and the only source of the oldest date was deleted.
    assert [one is not None for one in recounted] == [False, True, True, True, False, True]


def test_purged_entity_is_in_no_export(api: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels):
    write(api, person("ann"), person("bob"))
    exporting.make(dataset, MakeOptions(), ignore)
    write(api, person("cem"))
    exporting.make(dataset, MakeOptions(), ignore)

    purged(api, dataset, kernels, "ann")

    lake = Path(api.services.settings.lake_uri)
    holding = [path for path in lake.rglob("*") if path.is_file() and b"ann" in path.read_bytes()]
    assert [path.relative_to(lake).as_posix() for path in holding] == []
    assert api.admin.get("/v1/datasets/test/exports").json()["results"] == []
    exporting.make(dataset, MakeOptions(), ignore)
    assert [entity["id"] for entity in entities(api)] == ["bob", "cem"]


def test_concurrent_exports_run_one_after_the_other(api: InProcessApi, dataset: Dataset, kernels: DirectKernels):
    write(api, person("ann"))
    other = exports_of(api, kernels)
    refused = []

    def reached(step: str) -> None:
        if step == "built":
            with pytest.raises(ResumeLater):
                other.make(dataset, MakeOptions(), ignore)
            refused.append(step)

    exports_of(api, kernels, reached).make(dataset, MakeOptions(), ignore)

    assert refused == ["built"]
    assert other.make(dataset, MakeOptions(), ignore).made == []


def test_statements_aggregated_by_ftm_equal_the_entities_and_validate(
    api: InProcessApi, dataset: Dataset, exporting: Exports, tmp_path: Path
):
    write(api, person("ann", country=["de"], summary=[AWKWARD]), person("bob"))
    write(api, person("ann", alias=["Anna"]), {"id": "co", "schema": "Company", "properties": {"name": ["C"]}})
    write(api, person("ann", alias=["Annie"]), origin="more")
    exporting.make(dataset, MakeOptions(), ignore)
    for name in ("statements.csv", "entities.ftm.json"):
        (tmp_path / name).write_bytes(fetched(api, name))

    aggregated = ftm("aggregate-statements", "-i", str(tmp_path / "statements.csv"), "-f", "csv")
    validated = ftm("validate", "-i", str(tmp_path / "entities.ftm.json"))

    def sorted_properties(lines: bytes) -> dict[str, Any]:
        records = map(json.loads, lines.splitlines())
        return {
            one["id"]: (one["schema"], {name: sorted(values) for name, values in one["properties"].items()})
            for one in records
        }

    assert sorted_properties(aggregated) == sorted_properties((tmp_path / "entities.ftm.json").read_bytes())
    assert sorted_properties(validated).keys() == {"ann", "bob", "co"}


def test_ftm_loads_the_catalog_from_the_api_and_from_the_lake(api: InProcessApi, dataset: Dataset, exporting: Exports):
    api.dataset("other")
    write(api, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)

    for document in (
        api.admin.get("/v1/catalog").json(),
        json.loads(api.services.store.get("index.json")),
    ):
        catalog = DataCatalog(FtmDataset, document)
        assert catalog.names == {"test", "other"}
        loaded = catalog.require("test").model
        assert (loaded.entity_count, loaded.version is not None) == (1, True)
        assert loaded.get_resource("entities.ftm.json").mime_type == "application/json+ftm"
    (one,) = (entry for entry in api.admin.get("/v1/catalog").json()["datasets"] if entry["name"] == "test")
    url = {resource["name"]: resource["url"] for resource in one["resources"]}["entities.ftm.json"]
    assert url.endswith("/v1/datasets/test/exports/entities.ftm.json")


def test_changed_configuration_is_in_the_index_immediately_with_the_same_exports(
    api: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(api, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)
    before = json.loads(fetched(api, "index.json"))

    assert api.admin.patch("/v1/datasets/test", {"title": "Another"}).status_code == 200

    after = json.loads(fetched(api, "index.json"))
    assert (before["title"], after["title"]) == ("test", "Another")
    assert after["resources"] == before["resources"] != []
    assert set(freshness(api).values()) == {None}
    listed = {one["name"]: one for one in api.admin.get("/v1/datasets/test/exports").json()["results"]}
    content = fetched(api, "index.json")
    assert (listed["index.json"]["size"], listed["index.json"]["checksum"]) == (
        len(content),
        hashlib.sha1(content).hexdigest(),
    )


def test_versions_increase_although_the_clock_goes_back(api: InProcessApi, dataset: Dataset, exporting: Exports):
    write(api, person("ann"))
    first = exporting.make(dataset, MakeOptions(), ignore)
    with api.services.database.write() as connection:
        connection.execute(update(exports_table).values(version="29990101000000-abc"))
    write(api, person("bob"))

    second = exporting.make(dataset, MakeOptions(), ignore)

    assert first.version is not None
    assert re.fullmatch(r"\d{14}-[a-z]{3}", first.version)
    assert second.version is not None
    assert second.version.startswith("29990101000001-")


def freshness(api: InProcessApi) -> dict[str, str | None]:
    report = api.admin.get("/v1/datasets/test/freshness").json()
    return {one["kind"]: one["reason"] for one in report["exports"]}


def applied(lines: list[dict[str, Any]], known: dict[str, Any] | None = None) -> dict[str, Any]:
    result = dict(known or {})
    for line in lines:
        if line["op"] == "DEL":
            del result[line["entity"]["id"]]
        else:
            assert (line["op"] == "MOD") == (line["entity"]["id"] in result)
            result[line["entity"]["id"]] = line["entity"]
    return result


def compacted(api: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> None:
    Compact(rewriting_of(api, kernels)).run(dataset, CompactOptions(force=True), ignore)


def purged(api: InProcessApi, dataset: Dataset, kernels: DirectKernels, entity: str) -> None:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    vacuum = Vacuum(services.database, services.store, services.settings, publisher)
    purge = Purge(services.database, rewriting_of(api, kernels), flush, vacuum)
    purge.run(dataset, PurgeOptions(entity_ids=[entity], confirm=True), ignore)


def rewriting_of(api: InProcessApi, kernels: DirectKernels) -> Rewriter:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    return Rewriter(services.database, services.store, publisher, lambda: kernels)


def ftm(*arguments: str) -> bytes:
    ran = subprocess.run(
        [str(Path(sys.executable).parent / "ftm"), *arguments], check=True, capture_output=True, timeout=120
    )
    return ran.stdout


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()


class CountingKernels(DirectKernels):
    """Kernels that record the number of tasks of the last Spark job."""

    tasks = 0

    def run(self, partitions: list[list[Task[Any]]]) -> Iterator[tuple[int, Any]]:
        self.tasks = sum(map(len, partitions))
        return super().run(partitions)


@ONE_DATABASE
def test_statistics_counted_by_several_tasks_are_equal(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    people = [{"id": f"p{number}", "schema": "Person", "properties": {"country": ["de"]}} for number in range(20)]
    api.admin.post("/v1/datasets/test/entities", people)
    options = ExportOptions(kinds=[ExportKind.STATISTICS], force=True)
    counting = CountingKernels(kernels._settings, kernels._pool)
    exports_of(api, counting).export(dataset, options, ignore)
    counted = json.loads(fetched(api, "statistics.json"))
    assert counting.tasks == 1

    monkeypatch.setattr(export, "ONE_TASK_ROWS", 19)
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.TASK_ROWS", 10)
    exports_of(api, counting).export(dataset, options, ignore)
    assert counting.tasks > 2

    second = json.loads(fetched(api, "statistics.json"))
    assert second["version"] > counted["version"]
    assert second | {"version": ""} == counted | {"version": ""}
