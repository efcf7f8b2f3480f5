"""Compact and optimize: new files with the same visible rows."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset
from tarn.journal.batches import Batch
from tarn.lake.commit import TABLES, SnapshotPublisher
from tarn.lake.table_schemas import PARTITIONED
from tarn.model.datasets.ranges import EVERYTHING, Range
from tarn.model.datasets.snapshot import Column, File, Snapshot, SnapshotOperation, TableName
from tarn.model.tenant import ADMIN
from tarn.model.work.job import CompactOptions, OptimizeOptions
from tarn.pipeline.jobs.compact import Compact, plan_folds, ranges_to_fold
from tarn.pipeline.jobs.optimize import Optimize, bins
from tarn.pipeline.jobs.rewrite import Rewriter
from tarn.pipeline.tasks.key_ranges import range_loads

from tests.in_process_api import InProcessApi
from tests.pipeline.history import HISTORIES, Expected, head, rows_of, shown, stored
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_fold import as_events, drawn

Flushing = Callable[[], list[Snapshot]]
RANGES = (
    [EVERYTHING],
    [Range("", "b")],
    [Range("b", "c")],
    [Range("b", None)],
    [Range("", "b"), Range("c", "canonical")],
    [Range("a!", "b"), Range("canonical", None)],
)


@pytest.fixture
def rewriting(api: InProcessApi, kernels: DirectKernels) -> Rewriter:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    return Rewriter(services.database, services.store, publisher, lambda: kernels)


def write_batch(api: InProcessApi, dataset: Dataset, batch: list[dict[str, Any]]) -> None:
    act = AuditedAction(None, "add_statements", "test", "r")
    api.services.writer.submit(Batch(dataset, ADMIN, act), as_events(batch)).result(30)


def compact_ranges(rewriting: Rewriter, dataset: Dataset, chosen: list[Range]) -> None:
    rewriting.run(dataset, SnapshotOperation.COMPACT, lambda base: plan_folds(rewriting.store, base, chosen, 2), ignore)


def ignore(_: object) -> None:
    """Ignore the progress."""


@pytest.mark.parametrize("seed", HISTORIES)
def test_rewritten_store_has_the_same_rows_and_later_flushes_work(
    api: InProcessApi, dataset: Dataset, flush: Flushing, rewriting: Rewriter, seed: int
):
    draw = random.Random(seed)
    expected = Expected()
    for _ in range(6):
        for _ in range(draw.randrange(1, 4)):
            batch = [drawn(draw) for _ in range(draw.randrange(1, 8))]
            write_batch(api, dataset, batch)
            expected.commit(batch)
        flush()
        before = head(api, dataset)
        match draw.randrange(4):
            case 0:
                Optimize(rewriting).run(dataset, OptimizeOptions(), ignore)
            case 1:
                Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)
            case 2:
                compact_ranges(rewriting, dataset, draw.choice(RANGES))
        after = head(api, dataset)

        live = stored(rewriting.store, dataset, after)
        assert shown(live) == shown(expected.live)
        assert (after.content, after.rows.live, after.segment) == (before.content, len(live), before.segment)
        assert_sorted(rewriting, dataset, after)


def assert_sorted(rewriting: Rewriter, dataset: Dataset, snapshot: Snapshot) -> None:
    for table in TABLES:
        for file in snapshot.table(table).files:
            one = snapshot.model_copy(update={table: snapshot.table(table).model_copy(update={"files": (file,)})})
            keys = [
                (row["bucket"], row["canonical_id"], row["id"]) for row in rows_of(rewriting.store, dataset, one, table)
            ]
            assert keys == sorted(keys)


@pytest.mark.parametrize("seed", range(4))
def test_full_compaction_leaves_only_live_rows(
    api: InProcessApi, dataset: Dataset, flush: Flushing, rewriting: Rewriter, seed: int
):
    draw = random.Random(seed)
    for _ in range(5):
        write_batch(api, dataset, [drawn(draw) for _ in range(20)])
        flush()
    write_batch(
        api,
        dataset,
        [
            drawn(draw)
            | {"kind": 1, "id": b"\1" * 20, "entity_id": "z", "origin": "crawl", "prop": "name", "value": "z"}
        ],
    )
    flush()
    live = stored(rewriting.store, dataset, head(api, dataset))

    result = Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)

    after = head(api, dataset)
    rows = rows_of(rewriting.store, dataset, after, "statements")
    assert {(row["id"], row["origin"]) for row in rows} == set(live)
    assert len(rows) == len(live) == after.rows.live
    assert after.translog.files == ()
    assert result.snapshot is not None
    assert (after.seq, after.operation, result.rows) == (result.snapshot.seq, SnapshotOperation.COMPACT, len(live))
    second = Compact(rewriting).run(dataset, CompactOptions(), ignore)
    assert second.snapshot is None


def test_rewriting_a_dataset_without_snapshots_does_nothing(dataset: Dataset, rewriting: Rewriter):
    assert Compact(rewriting).run(dataset, CompactOptions(force=True), ignore).snapshot is None
    assert Optimize(rewriting).run(dataset, OptimizeOptions(), ignore).snapshot is None


def test_large_store_is_compacted_into_sorted_runs_without_overlap(
    api: InProcessApi, dataset: Dataset, flush: Flushing, rewriting: Rewriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tarn.pipeline.jobs.split_ranges.WORTH_A_FILE", 50)
    people = [
        {"id": f"p-{number:04}", "schema": "Person", "properties": {"name": [f"P {number}"]}} for number in range(400)
    ]
    for origin in ("crawl", "by.hand"):
        for part in range(4):
            api.admin.post(f"/v1/datasets/test/entities?origin={origin}", people[part::4])
            flush()
    Compact(rewriting).run(dataset, CompactOptions(force=True), ignore)
    full = head(api, dataset)
    api.admin.post("/v1/datasets/test/entities?origin=crawl", people[100:120])
    flush()

    result = Compact(rewriting).run(dataset, CompactOptions(), ignore)

    partly = head(api, dataset)
    for origin in ("crawl", "by.hand"):
        spans = sorted(
            (str(file.columns["canonical_id"].min), str(file.columns["canonical_id"].max))
            for file in full.statements.files
            if file.partition["origin"] == origin
        )
        assert len(spans) >= 4
        assert all(former[1] < latter[0] for former, latter in pairwise(spans))
    shared = {file.path for file in full.statements.files} & {file.path for file in partly.statements.files}
    assert 0 < result.rows < full.rows.live
    assert len(shared) > len(full.statements.files) / 2
    assert partly.translog.files == ()
    assert partly.rows.live == full.rows.live == len(stored(rewriting.store, dataset, partly))


def test_many_inserts_are_dropped_without_writing_rows(
    api: InProcessApi, dataset: Dataset, flush: Flushing, rewriting: Rewriter
):
    people = [
        {"id": f"p-{number:03}", "schema": "Person", "properties": {"name": [f"P {number}"]}} for number in range(100)
    ]
    api.admin.post("/v1/datasets/test/entities", people[:95])
    flush()
    first = Compact(rewriting).run(dataset, CompactOptions(), ignore)
    full = head(api, dataset)
    api.admin.post("/v1/datasets/test/entities", people[95:])
    flush()
    compacted = Compact(rewriting).run(dataset, CompactOptions(), ignore)

    assert (first.rows, first.added, full.translog.files, full.rows.live) == (0, 0, (), 190)
    assert compacted.snapshot is None
    assert [file.rows for file in head(api, dataset).translog.files] == [10]
    assert len(stored(rewriting.store, dataset, head(api, dataset))) == 200


@pytest.mark.both_databases
def test_optimize_merges_small_files_and_reports_it(
    api: InProcessApi, dataset: Dataset, flush: Flushing, rewriting: Rewriter
):
    for number in range(5):
        write_batch(
            api,
            dataset,
            [
                drawn(random.Random(number))
                | {"kind": 1, "origin": "crawl", "id": bytes([number]) * 20, "entity_id": f"e{number}"}
            ],
        )
        flush()
    before = head(api, dataset)

    result = Optimize(rewriting).run(dataset, OptimizeOptions(), ignore)

    after = head(api, dataset)
    for table in TABLES:
        assert sorted(map(repr, rows_of(rewriting.store, dataset, before, table))) == sorted(
            map(repr, rows_of(rewriting.store, dataset, after, table))
        )
    assert len(after.statements.files) == 1
    assert (result.removed, result.added) == (10, 2)
    assert rewriting.store.head(f"{dataset.name}/tags/lakehouse/statements/store_optimized") is not None
    assert Optimize(rewriting).run(dataset, OptimizeOptions(), ignore).snapshot is None


# Unmerged share


def data_file_of(path: str, rows: int, first: str | None, last: str | None, size: int = 1000, **partition: str) -> File:
    bounds = {} if first is None else {"canonical_id": Column(min=first, max=last)}
    return File(path=path, size=size, partition=partition or {"origin": "o"}, rows=rows, columns=bounds)


def with_files(snapshot: Snapshot, statements: list[File], translog: list[File]) -> Snapshot:
    def table(name: TableName, files: list[File]) -> Any:
        return snapshot.table(name).model_copy(update={"files": tuple(files)})

    return snapshot.model_copy(
        update={"statements": table("statements", statements), "translog": table("translog", translog)}
    )


@pytest.mark.parametrize(
    ("statements", "translog", "shares"),
    [
        ([data_file_of("1", 100, "a", "m"), data_file_of("2", 100, "n", "z")], [], [0.0, 0.0]),
        (
            [data_file_of("1", 100, "a", "m"), data_file_of("2", 100, "n", "z"), data_file_of("3", 20, "o", "p")],
            [],
            [0.0, 0.2],
        ),
        (
            [data_file_of("1", 100, "a", "m"), data_file_of("2", 100, "n", "z"), data_file_of("3", 20, "a", "z")],
            [],
            [0.1, 0.1],
        ),
        (
            [data_file_of("1", 100, "a", "m"), data_file_of("2", 100, "n", "z"), data_file_of("3", 20, None, None)],
            [],
            [0.1, 0.1],
        ),
        (
            [data_file_of("1", 100, "a", "m"), data_file_of("2", 50, "b", "c")],
            [data_file_of("4", 10, "a", "b", kind="seen")],
            [0.6],
        ),
        ([data_file_of("1", 100, "a", "m")], [data_file_of("4", 100, "a", "m", kind="insert")], [0.0]),
        ([data_file_of("1", 100, "a", "m"), data_file_of("2", 90, "a", "m", origin="p")], [], [0.0]),
    ],
)
def test_unmerged_share_counts_unsorted_files_and_marks(
    api: InProcessApi,
    dataset: Dataset,
    flush: Flushing,
    statements: list[File],
    translog: list[File],
    shares: list[float],
):
    write_batch(api, dataset, [drawn(random.Random(1)) | {"kind": 1}])
    (snapshot,) = flush()

    loads = range_loads(with_files(snapshot, statements, translog))

    assert [round(load.unmerged_share, 6) for load in loads] == shares
    assert (loads[0].keys.low, loads[-1].keys.high) == ("", None)
    assert all(former.keys.high == latter.keys.low for former, latter in pairwise(loads))
    worth = ranges_to_fold(with_files(snapshot, statements, translog), 0.15)
    assert len(worth) == (1 if max(shares) >= 0.15 else 0)


def test_bins_have_adjacent_files_up_to_the_target_and_no_single_file():
    files = [data_file_of(str(number), 10, f"{number:02}", f"{number:02}", size=30) for number in range(8)]
    large = data_file_of("large", 10, "03", "04", size=90)
    alone = data_file_of("alone", 10, "a", "b", size=10, origin="other")

    groups = list(bins([*reversed(files), large, alone], "statements", 100))

    assert PARTITIONED["statements"] == "origin"
    assert [(value, [file.path for file in group]) for value, group in groups] == [
        ("o", ["0", "1", "2"]),
        ("o", ["3", "4", "5"]),
        ("o", ["6", "7"]),
    ]
