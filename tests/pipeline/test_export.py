"""Exports: what others take of a dataset, made of one snapshot, and only where it is not fresh."""

import csv
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
from tarn.errors import Internal, TarnError
from tarn.integrity.vacuum import Vacuum
from tarn.lake.commit import SnapshotPublisher
from tarn.model.export import Kind, OmittedEdges
from tarn.model.ids import now
from tarn.model.job import (
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
from tarn.model.statistics import Statistics
from tarn.pipeline.jobs import export
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.export import Exports
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.purge import Purge
from tarn.pipeline.jobs.rewrite import Rewriter
from tarn.pipeline.tasks.kernel import AnyTask, Output
from tarn.query.active_reads import ActiveReads

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_rewrite import ignore

AWKWARD = "a \"quoted\", 'single' \\back\\ \n new \t tab \U0001d4b3 ü {brace} `tick` ;"


@pytest.fixture
def exporting(house: InProcessApi, kernels: DirectKernels) -> Exports:
    return exports_of(house, kernels)


def exports_of(house: InProcessApi, kernels: DirectKernels, reached: Callable[[str], None] = lambda _: None) -> Exports:
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    return Exports(services.settings, services.database, services.store, flush, lambda: kernels, ActiveReads(), reached)


def person(name: str, **properties: Any) -> dict[str, Any]:
    return {"id": name, "schema": "Person", "properties": {"name": [name.title()], **properties}}


def write(house: InProcessApi, *entities: dict[str, Any], origin: str = "crawl") -> None:
    assert house.admin.post(f"/v1/datasets/test/entities?origin={origin}", list(entities)).status_code == 200


def fetched(house: InProcessApi, name: str) -> bytes:
    answer = house.admin.get(f"/v1/datasets/test/exports/{name}")
    assert answer.status_code == 200, answer.text
    return answer.content


def entities(house: InProcessApi) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fetched(house, "entities.ftm.json").splitlines()]


def test_make_of_everything_is_what_reads_show_and_is_told_of_in_the_index(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    house.admin.post("/v1/datasets/test/entities", [person("ann", country=["de"]), person("bob", summary=[AWKWARD])])
    write(
        house,
        {"id": "acme", "schema": "Company", "properties": {"name": ["Acme"]}},
        {"id": "owns", "schema": "Ownership", "properties": {"owner": ["ann"], "asset": ["acme"]}},
        {"id": "paper", "schema": "Pages", "properties": {"fileName": ["a.pdf"], "contentHash": ["a" * 40]}},
    )

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert [made.kind for made in done.made] == list(Kind)
    assert done.skipped == []
    read = [json.loads(line) for line in house.admin.get("/v1/datasets/test/entities/stream").content.splitlines()]
    assert entities(house) == read
    assert len(read) == 5
    rows = list(csv.DictReader(io.StringIO(fetched(house, "statements.csv").decode(), newline="")))
    keys = [(row["canonical_id"], row["id"]) for row in rows]
    assert keys == sorted(set(keys))
    assert {row["value"] for row in rows if row["prop"] == "summary"} == {AWKWARD}
    assert [row["file_name"] for row in csv.DictReader(io.StringIO(fetched(house, "documents.csv").decode()))] == [
        "a.pdf"
    ]
    assert b"OWN" in fetched(house, "graph.cypher").upper()
    counts = json.loads(fetched(house, "statistics.json"))
    assert (counts["entity_count"], counts["things"]["total"], counts["intervals"]["total"]) == (5, 4, 1)
    index = json.loads(fetched(house, "index.json"))
    listed = {one["name"]: one for one in index["resources"]}
    assert listed.keys() == {made.name for made in done.made} - {"index.json"}
    for name, resource in listed.items():
        content = fetched(house, name)
        assert (resource["size"], resource["checksum"]) == (len(content), hashlib.sha1(content).hexdigest())
    assert (index["version"], index["entity_count"], index["thing_count"]) == (done.version, 5, 4)
    assert list(house.services.store.list(dataset.layout.export_parts)) == []


def test_graph_of_an_edge_between_very_many_is_bounded_and_says_what_it_lacks(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    ends = {"owner": [f"o{number}" for number in range(1200)], "asset": [f"a{number}" for number in range(1200)]}
    write(house, {"id": "owns", "schema": "Ownership", "properties": ends}, person("ann"))

    done = exporting.export(dataset, ExportOptions(kinds=[Kind.GRAPH, Kind.ENTITIES]), ignore)

    made = {one.kind: one for one in done.made}
    text = fetched(house, "graph.cypher").decode()
    assert made[Kind.GRAPH].omitted_edges == OmittedEdges(count=1_430_000, entities=1, first=["owns"])
    assert made[Kind.ENTITIES].omitted_edges is None
    assert made[Kind.GRAPH].size < 4_000_000
    assert text.count("MERGE (s)-[r:OWNERSHIP") == 10_000
    assert "// 1430000 of 1440000 relationships of owns are left out" in text.splitlines()


def test_exports_are_left_alone_while_nothing_visible_changed_and_made_again_when_something_did(
    house: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels
):
    write(house, person("ann"))
    first = exporting.make(dataset, MakeOptions(), ignore)

    again = exporting.make(dataset, MakeOptions(), ignore)
    compacted(house, dataset, kernels)
    after_compaction = exporting.make(dataset, MakeOptions(), ignore)
    fresh_then = freshness(house)
    write(house, person("bob"))
    stale_then = freshness(house)
    third = exporting.make(dataset, MakeOptions(), ignore)

    assert len(first.made) == len(Kind)
    assert (again.made, {one.reason for one in again.skipped}) == ([], {"it is fresh"})
    assert after_compaction.made == []
    assert set(fresh_then.values()) == {None}
    assert set(stale_then.values()) == {"2 rows wait in the journal"}
    assert [one.kind for one in third.made] == list(Kind)
    assert [entity["id"] for entity in entities(house)] == ["ann", "bob"]
    assert set(freshness(house).values()) == {None}


def test_write_that_changes_nothing_visible_moves_the_tags_and_makes_nothing(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(house, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)
    before = house.services.store.head(dataset.layout.export(Kind.STATEMENTS, "statements.csv"))
    assert house.admin.delete("/v1/datasets/test/origins/nobody").status_code == 200
    stale = freshness(house)

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert set(stale.values()) == {"1 rows wait in the journal"}
    assert (done.made, {one.reason for one in done.skipped}) == ([], {"what is visible has not changed"})
    assert set(freshness(house).values()) == {None}
    assert house.services.store.head(dataset.layout.export(Kind.STATEMENTS, "statements.csv")) == before


def test_write_between_an_export_and_its_record_never_makes_it_look_fresh(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    steps: list[str] = []
    write(house, person("ann"))

    for step in ("resolved", "built", "statements joined", "statements put"):

        def reached(name: str, step: str = step) -> None:
            steps.append(name)
            if name == step:
                write(house, person(f"p-{step.replace(' ', '-')}"))

        exports_of(house, kernels, reached).export(dataset, ExportOptions(kinds=[Kind.STATEMENTS]), ignore)

        assert freshness(house)["statements"] is not None, step
    exports_of(house, kernels).export(dataset, ExportOptions(kinds=[Kind.STATEMENTS]), ignore)
    assert freshness(house)["statements"] is None
    assert {"resolved", "built", "statements joined", "statements put", "statements recorded"} <= set(steps)


class Killed(Exception):
    """Here the process dies."""


@pytest.mark.parametrize(
    "step", ["resolved", "built", "entities joined", "entities put", "statistics put", "delta joined", "delta put"]
)
def test_export_that_dies_at_a_step_leaves_whole_files_and_old_tags_and_the_next_one_makes_it_good(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels, step: str
):
    write(house, person("ann"), person("bob"))
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    before = {name: fetched(house, name) for name in ("entities.ftm.json", "statistics.json", "entities.delta.json")}
    write(house, person("cem"))
    assert house.admin.delete("/v1/datasets/test/entities/bob").status_code == 200

    def die(name: str) -> None:
        if name == step:
            raise Killed

    dying = exports_of(house, kernels, die)
    with pytest.raises(Killed):
        dying.make(dataset, MakeOptions(), ignore)

    after = {name: fetched(house, name) for name in before}
    assert all(len(content.splitlines()) >= 2 for content in after.values())
    died_over = Kind(step.split()[0]) if " " in step else None
    for kind, reason in freshness(house).items():
        if died_over is None or list(Kind).index(Kind(kind)) >= list(Kind).index(died_over):
            assert reason is not None
    with house.services.database.write() as connection:
        connection.execute(delete(export_leases))
    deltas = [json.loads(line) for line in before["entities.delta.json"].splitlines()]
    exports_of(house, kernels).make(dataset, MakeOptions(), ignore)
    assert set(freshness(house).values()) == {None}
    assert [entity["id"] for entity in entities(house)] == ["ann", "cem"]
    deltas += [json.loads(line) for line in fetched(house, "entities.delta.json").splitlines()]
    assert applied(deltas).keys() == {"ann", "cem"}
    assert list(house.services.store.list(dataset.layout.export_parts)) == []


def test_deltas_one_after_the_other_lead_to_every_export(
    house: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels
):
    known: dict[str, Any] = {}
    write(house, *(person(f"p{number:02}") for number in range(30)))
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: write(house, person("p03", country=["fr"]), person("new"), origin="more"),
        lambda: compacted(house, dataset, kernels),
        lambda: house.admin.delete("/v1/datasets/test/entities/p07"),
        lambda: write(house, person("p07"), {"id": "p08", "schema": "Vessel", "properties": {"name": ["A ship"]}}),
        lambda: house.admin.delete("/v1/datasets/test/origins/more"),
    ]
    versions: list[str] = []
    for change in changes:
        change()
        done = exporting.make(dataset, MakeOptions(), ignore)
        if Kind.DELTA not in [made.kind for made in done.made]:
            assert change is changes[2]
            continue
        versions.append(done.version or "")
        lines = [json.loads(line) for line in fetched(house, "entities.delta.json").splitlines()]
        known = applied(lines, known)
        assert known == {entity["id"]: entity for entity in entities(house)}
    index = json.loads(fetched(house, "delta.json"))
    assert versions == sorted(versions) == list(index["versions"])
    kept = [house.admin.get(url).content for url in index["versions"].values()]
    whole: dict[str, Any] = {}
    for content in kept:
        whole = applied([json.loads(line) for line in content.splitlines()], whole)
    assert whole == known


def disagree(house: InProcessApi, name: str, *schemata: str) -> None:
    """Write an entity under a schema for each origin."""
    for schema in schemata:
        write(house, {"id": name, "schema": schema, "properties": {}}, origin=schema.lower())


def left_out(result: ExportResult | MakeResult) -> dict[str, int | None]:
    files: list[MadeExport | SkippedExport] = [*result.made, *result.skipped]
    return {one.kind: one.invalid for one in files}


def test_entities_that_do_not_assemble_are_counted_for_every_file_that_leaves_them_out(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(house, person("ann"), {"id": "paper", "schema": "Pages", "properties": {"fileName": ["a.pdf"]}})
    disagree(house, "boat", "Vessel", "LegalEntity")
    disagree(house, "scan", "Pages", "Person")
    disagree(house, "firm", "Company", "LegalEntity")

    first = exporting.make(dataset, MakeOptions(), ignore)
    again = exporting.make(dataset, MakeOptions(), ignore)

    assert [entity["id"] for entity in entities(house)] == ["ann", "firm", "paper"]
    assert [row["id"] for row in csv.DictReader(io.StringIO(fetched(house, "documents.csv").decode()))] == ["paper"]
    counts = {"entities": 2, "statistics": 2, "graph": 2, "delta": 2, "documents": 1, "statements": None, "index": None}
    assert (left_out(first), first.invalid) == (counts, 2)
    assert (again.made, left_out(again), again.invalid) == ([], counts, 2)
    assert json.loads(fetched(house, "statistics.json"))["invalid"] == 2
    listed = house.admin.get("/v1/datasets/test/exports").json()["results"]
    assert {one["kind"]: one["invalid"] for one in listed} == counts


@pytest.mark.parametrize("kind", list(Kind))
def test_export_of_one_kind_counts_what_it_leaves_out(
    house: InProcessApi, dataset: Dataset, exporting: Exports, kind: Kind
):
    write(house, person("ann"))
    disagree(house, "scan", "Pages", "Person")

    done = exporting.export(dataset, ExportOptions(kinds=[kind]), ignore)

    expected = 0 if kind in (Kind.STATEMENTS, Kind.INDEX) else 1
    assert done.invalid == expected
    assert left_out(done) == {kind: expected or None}


def test_delta_counts_the_changed_entities_that_it_leaves_out(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(house, person("ann"), person("bob"))
    disagree(house, "boat", "Vessel", "LegalEntity")
    exporting.make(dataset, MakeOptions(), ignore)
    write(house, person("cem"))
    disagree(house, "ann", "Vessel")
    disagree(house, "dab", "Vessel", "Person")

    done = exporting.make(dataset, MakeOptions(), ignore)

    lines = [json.loads(line) for line in fetched(house, "entities.delta.json").splitlines()]
    assert sorted((line["op"], line["entity"]["id"]) for line in lines) == [("ADD", "cem"), ("DEL", "ann")]
    assert (left_out(done)["delta"], left_out(done)["entities"], done.invalid) == (2, 3, 3)
    house.admin.delete("/v1/datasets/test/entities/dab")
    assert left_out(exporting.make(dataset, MakeOptions(), ignore))["delta"] == 0


def test_entities_that_do_not_assemble_are_counted_over_all_parts(
    house: InProcessApi, dataset: Dataset, exporting: Exports, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 20)
    for schema in ("Vessel", "Person"):
        some = [{"id": f"e{number:03}", "schema": schema, "properties": dict[str, Any]()} for number in range(200)]
        write(house, *some, origin=schema.lower())

    done = exporting.make(dataset, MakeOptions(), ignore)

    assert (left_out(done)["entities"], left_out(done)["graph"], done.invalid) == (200, 200, 200)


def test_export_made_before_entities_were_counted_does_not_claim_to_be_whole(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    disagree(house, "boat", "Vessel", "LegalEntity")
    exporting.export(dataset, ExportOptions(kinds=[Kind.ENTITIES]), ignore)
    with house.services.database.write() as connection:
        connection.execute(update(exports_table).values(detail={}))

    done = exporting.export(dataset, ExportOptions(kinds=[Kind.ENTITIES]), ignore)

    assert (done.made, left_out(done), done.invalid) == ([], {"entities": None}, None)


def test_delta_whose_beginning_is_given_up_begins_anew(house: InProcessApi, dataset: Dataset, exporting: Exports):
    write(house, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)
    write(house, person("bob"))
    with house.services.database.write() as connection:
        connection.execute(update(history).values(expired=now()))

    exporting.make(dataset, MakeOptions(), ignore)

    lines = [json.loads(line) for line in fetched(house, "entities.delta.json").splitlines()]
    index = json.loads(fetched(house, "delta.json"))
    assert [(line["op"], line["entity"]["id"]) for line in lines] == [("ADD", "ann"), ("ADD", "bob")]
    assert [delta["from"] for delta in index["deltas"]] == [None]


@pytest.mark.parametrize(("compression", "unpacked"), [("gzip", gzip.decompress), ("zstd", lambda data: _zstd(data))])
def test_compressed_exports_have_other_names_and_the_same_content(
    house: InProcessApi,
    dataset: Dataset,
    exporting: Exports,
    compression: str,
    unpacked: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 10)
    write(house, *(person(f"p{number:02}") for number in range(40)))
    exporting.make(dataset, MakeOptions(), ignore)
    names = ("statements.csv", "entities.ftm.json", "graph.cypher", "documents.csv")
    plain = {name: fetched(house, name) for name in names}
    assert house.admin.patch("/v1/datasets/test", {"compression": compression}).status_code == 200
    stale = freshness(house)

    exporting.make(dataset, MakeOptions(), ignore)

    suffix = {"gzip": ".gz", "zstd": ".zst"}[compression]
    assert stale["statements"] == f"it was made as statements.csv, and the dataset asks for statements.csv{suffix}"
    for name, content in plain.items():
        assert unpacked(fetched(house, name + suffix)) == content
        assert house.admin.get(f"/v1/datasets/test/exports/{name}").status_code == 404
    assert len(plain["entities.ftm.json"].splitlines()) == 40
    assert set(freshness(house).values()) == {None}


def test_dataset_without_anything_has_exports_that_are_empty_and_valid(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    done = exporting.make(dataset, MakeOptions(), ignore)

    assert (done.snapshot, [made.kind for made in done.made]) == (None, list(Kind))
    assert entities(house) == []
    assert len(fetched(house, "statements.csv").splitlines()) == 1
    assert len(fetched(house, "documents.csv").splitlines()) == 1
    assert json.loads(fetched(house, "statistics.json"))["entity_count"] == 0
    assert fetched(house, "entities.delta.json") == b""
    assert set(freshness(house).values()) == {None}


def test_files_of_many_parts_are_one_in_order(
    house: InProcessApi, dataset: Dataset, exporting: Exports, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 20)
    write(house, *(person(f"p{number:03}", country=["de", "fr"]) for number in range(200)))

    exporting.make(dataset, MakeOptions(), ignore)

    read = house.admin.get("/v1/datasets/test/entities/stream").content
    assert fetched(house, "entities.ftm.json") == read
    header, *lines = fetched(house, "statements.csv").splitlines()
    assert (header.count(b'"id"'), len(lines), len(set(lines))) == (1, 800, 800)
    stream = house.admin.get("/v1/datasets/test/statements/stream", headers={"Accept": "text/csv"}).content
    assert fetched(house, "statements.csv") == stream


def test_statistics_after_small_changes_are_what_counting_everything_finds(
    house: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    recounted: list[Statistics | None] = []
    known = Exports._recounted

    def recount(self: Exports, *given: Any) -> Statistics | None:
        recounted.append(known(self, *given))
        return recounted[-1]

    monkeypatch.setattr(Exports, "_recounted", recount)
    statistics = ExportOptions(kinds=[Kind.STATISTICS])
    write(house, *(person(f"p{number:02}", country=["de"], birthDate=[f"19{number}"]) for number in range(50, 90)))
    exporting.export(dataset, statistics, ignore)
    changes: list[Callable[[], Any]] = [
        lambda: write(house, person("p60", country=["fr"]), origin="more"),
        lambda: house.admin.delete("/v1/datasets/test/entities/p70"),
        lambda: write(house, {"id": "p71", "schema": "Vessel", "properties": {"name": ["A ship"]}}),
        lambda: house.admin.delete("/v1/datasets/test/entities/p50"),
        lambda: write(house, person("p91")),
    ]
    for change in changes:
        change()
        exporting.export(dataset, statistics, ignore)
        told = json.loads(fetched(house, "statistics.json"))
        exporting.export(dataset, ExportOptions(kinds=[Kind.STATISTICS], force=True), ignore)
        counted = json.loads(fetched(house, "statistics.json"))
        assert told | {"version": None} == counted | {"version": None}

    # The first had nothing to begin with; and the oldest date was told by one alone, who went.
    assert [one is not None for one in recounted] == [False, True, True, True, False, True]


def test_purged_entity_is_in_no_export_any_more(
    house: InProcessApi, dataset: Dataset, exporting: Exports, kernels: DirectKernels
):
    write(house, person("ann"), person("bob"))
    exporting.make(dataset, MakeOptions(), ignore)
    write(house, person("cem"))
    exporting.make(dataset, MakeOptions(), ignore)

    purged(house, dataset, kernels, "ann")

    lake = Path(house.services.settings.lake_uri)
    holding = [path for path in lake.rglob("*") if path.is_file() and b"ann" in path.read_bytes()]
    assert [path.relative_to(lake).as_posix() for path in holding] == []
    assert house.admin.get("/v1/datasets/test/exports").json()["results"] == []
    exporting.make(dataset, MakeOptions(), ignore)
    assert [entity["id"] for entity in entities(house)] == ["bob", "cem"]


def test_two_who_export_at_once_do_so_one_after_the_other(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    write(house, person("ann"))
    other = exports_of(house, kernels)
    refused = []

    def reached(step: str) -> None:
        if step == "built":
            with pytest.raises(ResumeLater):
                other.make(dataset, MakeOptions(), ignore)
            refused.append(step)

    exports_of(house, kernels, reached).make(dataset, MakeOptions(), ignore)

    assert refused == ["built"]
    assert other.make(dataset, MakeOptions(), ignore).made == []


def test_statements_that_ftm_aggregates_are_the_entities_and_ftm_validates_them(
    house: InProcessApi, dataset: Dataset, exporting: Exports, tmp_path: Path
):
    write(house, person("ann", country=["de"], summary=[AWKWARD]), person("bob"))
    write(house, person("ann", alias=["Anna"]), {"id": "co", "schema": "Company", "properties": {"name": ["C"]}})
    write(house, person("ann", alias=["Annie"]), origin="more")
    exporting.make(dataset, MakeOptions(), ignore)
    for name in ("statements.csv", "entities.ftm.json"):
        (tmp_path / name).write_bytes(fetched(house, name))

    aggregated = ftm("aggregate-statements", "-i", str(tmp_path / "statements.csv"), "-f", "csv")
    validated = ftm("validate", "-i", str(tmp_path / "entities.ftm.json"))

    def plain(lines: bytes) -> dict[str, Any]:
        found = map(json.loads, lines.splitlines())
        return {
            one["id"]: (one["schema"], {name: sorted(values) for name, values in one["properties"].items()})
            for one in found
        }

    assert plain(aggregated) == plain((tmp_path / "entities.ftm.json").read_bytes())
    assert plain(validated).keys() == {"ann", "bob", "co"}


def test_catalog_is_loaded_by_ftm_itself_from_the_api_and_from_the_lake(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    house.dataset("other")
    write(house, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)

    for document in (
        house.admin.get("/v1/catalog").json(),
        json.loads(house.services.store.get("index.json")),
    ):
        catalog = DataCatalog(FtmDataset, document)
        assert catalog.names == {"test", "other"}
        found = catalog.require("test").model
        assert (found.entity_count, found.version is not None) == (1, True)
        assert found.get_resource("entities.ftm.json").mime_type == "application/json+ftm"
    (one,) = (entry for entry in house.admin.get("/v1/catalog").json()["datasets"] if entry["name"] == "test")
    url = {resource["name"]: resource["url"] for resource in one["resources"]}["entities.ftm.json"]
    assert url.endswith("/v1/datasets/test/exports/entities.ftm.json")


def test_changed_configuration_is_in_the_index_at_once_with_the_same_exports(
    house: InProcessApi, dataset: Dataset, exporting: Exports
):
    write(house, person("ann"))
    exporting.make(dataset, MakeOptions(), ignore)
    before = json.loads(fetched(house, "index.json"))

    assert house.admin.patch("/v1/datasets/test", {"title": "Another"}).status_code == 200

    after = json.loads(fetched(house, "index.json"))
    assert (before["title"], after["title"]) == ("test", "Another")
    assert after["resources"] == before["resources"] != []
    assert set(freshness(house).values()) == {None}
    listed = {one["name"]: one for one in house.admin.get("/v1/datasets/test/exports").json()["results"]}
    content = fetched(house, "index.json")
    assert (listed["index.json"]["size"], listed["index.json"]["checksum"]) == (
        len(content),
        hashlib.sha1(content).hexdigest(),
    )


def test_versions_rise_though_clocks_go_back(house: InProcessApi, dataset: Dataset, exporting: Exports):
    write(house, person("ann"))
    first = exporting.make(dataset, MakeOptions(), ignore)
    with house.services.database.write() as connection:
        connection.execute(update(exports_table).values(version="29990101000000-abc"))
    write(house, person("bob"))

    second = exporting.make(dataset, MakeOptions(), ignore)

    assert first.version is not None
    assert re.fullmatch(r"\d{14}-[a-z]{3}", first.version)
    assert second.version is not None
    assert second.version.startswith("29990101000001-")


def freshness(house: InProcessApi) -> dict[str, str | None]:
    report = house.admin.get("/v1/datasets/test/freshness").json()
    return {one["kind"]: one["reason"] for one in report["exports"]}


def applied(lines: list[dict[str, Any]], known: dict[str, Any] | None = None) -> dict[str, Any]:
    found = dict(known or {})
    for line in lines:
        if line["op"] == "DEL":
            del found[line["entity"]["id"]]
        else:
            assert (line["op"] == "MOD") == (line["entity"]["id"] in found)
            found[line["entity"]["id"]] = line["entity"]
    return found


def compacted(house: InProcessApi, dataset: Dataset, kernels: DirectKernels) -> None:
    Compact(rewriting_of(house, kernels)).run(dataset, CompactOptions(force=True), ignore)


def purged(house: InProcessApi, dataset: Dataset, kernels: DirectKernels, entity: str) -> None:
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    vacuum = Vacuum(services.database, services.store, services.settings, publisher)
    purge = Purge(services.database, rewriting_of(house, kernels), flush, vacuum)
    purge.run(dataset, PurgeOptions(entity_ids=[entity], confirm=True), ignore)


def rewriting_of(house: InProcessApi, kernels: DirectKernels) -> Rewriter:
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    return Rewriter(services.database, services.store, publisher, lambda: kernels)


def ftm(*arguments: str) -> bytes:
    ran = subprocess.run(
        [str(Path(sys.executable).parent / "ftm"), *arguments], check=True, capture_output=True, timeout=120
    )
    return ran.stdout


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()


class Overwhelmed(DirectKernels):
    """Kernels whose own process has no room for a task."""

    def run_here(self, task: AnyTask) -> Output | TarnError:
        return Internal(f"no room for {task}")


@ONE_DATABASE
@pytest.mark.parametrize("why", ["too large", "no room"])
def test_statistics_that_the_worker_does_not_count_itself_are_the_same(
    house: InProcessApi,
    dataset: Dataset,
    kernels: DirectKernels,
    kernel_process: ProcessPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
):
    people = [{"id": f"p{number}", "schema": "Person", "properties": {"country": ["de"]}} for number in range(20)]
    house.admin.post("/v1/datasets/test/entities", people)
    options = ExportOptions(kinds=[Kind.STATISTICS], force=True)
    exports_of(house, kernels).export(dataset, options, ignore)
    counted = json.loads(fetched(house, "statistics.json"))

    if why == "too large":
        monkeypatch.setattr(export, "MOST_COUNTED_HERE", 19)
        others = kernels
    else:
        others = Overwhelmed(house.services.settings, kernel_process)
    exports_of(house, others).export(dataset, options, ignore)

    again = json.loads(fetched(house, "statistics.json"))
    assert again["version"] > counted["version"]
    assert again | {"version": ""} == counted | {"version": ""}
