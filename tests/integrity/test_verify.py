"""Verify: no findings in a healthy lake, and the expected finding for each hand-made corruption."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tarn.datasets import registry
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.errors import Locked
from tarn.integrity.findings import Findings
from tarn.integrity.vacuum import Vacuum
from tarn.integrity.verify import verify
from tarn.lake import refs
from tarn.lake.commit import TABLES, SnapshotPublisher
from tarn.lake.leases import Leases
from tarn.model.datasets.finding import FindingKind as Kind
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.names import RefName
from tarn.model.tenant import ADMIN
from tarn.model.work.job import CompactOptions, JobStopped, OptimizeOptions, Progress, VacuumOptions, VerifyOptions
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.optimize import Optimize
from tarn.pipeline.jobs.rewrite import Rewriter
from tarn.settings import Settings, load_settings
from tarn.storage.connection import Connection
from tarn.storage.fault_injection import FaultyStore, Gate
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store

from tests.faults.scene import SHORT_BACKOFF, STEPS, Killed, Scene, in_background, kill_at, pause_at
from tests.integrity import corruptions as make
from tests.integrity.corruptions import OWN, Corrupt, edit_manifest, sql
from tests.integrity.lakes import Lake, copied, expire_snapshots, pack, rich_lake
from tests.pipeline.kernels import DirectKernels


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, kernel_process: ProcessPoolExecutor) -> Lake:
    folder = tmp_path_factory.mktemp("template")
    settings = load_settings(database_url=f"sqlite:///{folder}/tarn.db", lake_uri=str(folder / "lake"))
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    migrate.upgrade(database)
    open_lake(store)
    lake = rich_lake(settings, database, store, DirectKernels(settings, kernel_process))
    database.close()
    return lake


@pytest.fixture
def lake(template: Lake, tmp_path: Path) -> Iterator[Lake]:
    """Return a copy of the lake with every kind of event, which the test may change."""
    with copied(template, tmp_path) as lake:
        yield lake


def test_healthy_lake_has_no_findings(settings: Settings, database: Database, store: Store, kernels: DirectKernels):
    lake = rich_lake(settings, database, store, kernels)

    result = lake.verify()

    assert result.findings == []
    assert (result.found, result.harmless, result.repaired) == (0, 0, 0)
    assert result.snapshots == lake.head().seq - 2
    assert result.files > 0


def test_dataset_without_rows_or_snapshots_has_no_findings(lake: Lake, kernel_process: ProcessPoolExecutor):
    kernels = DirectKernels(lake.settings, kernel_process)
    scene = Scene.make(lake.settings, lake.database, lake.store, kernels, seed=1, name="empty")
    empty = replace(lake, dataset=scene.dataset)
    assert empty.verify().findings == []
    scene.write(scene.new_statement("bad"))
    empty.sql("UPDATE journal SET schema = 'Nobody' WHERE entity_id = 'bad'")

    (snapshot,) = scene.flush()

    assert (snapshot.rows.set_aside, snapshot.rows.live, snapshot.statements.files) == (1, 0, ())
    assert empty.verify().findings == []


# Invalid entities


def named(scene: Scene, entity: str, schema: str, origin: str) -> dict[str, Any]:
    return scene.new_statement(entity) | {"schema": schema, "origin": origin, "canonical_id": None}


def test_invalid_entities_are_one_harmless_finding_that_no_repair_removes(
    lake: Lake, kernel_process: ProcessPoolExecutor
):
    kernels = DirectKernels(lake.settings, kernel_process)
    scene = Scene.make(lake.settings, lake.database, lake.store, kernels, seed=1, name="disagreeing")
    disagreeing = replace(lake, dataset=scene.dataset)
    names = [f"e{number:02}" for number in range(12)]
    scene.write(named(scene, "fits", "Person", "one"), named(scene, "fits", "LegalEntity", "two"))
    for schema, origin in (("Vessel", "one"), ("LegalEntity", "two")):
        scene.write(*(named(scene, name, schema, origin) for name in names))
    (snapshot,) = scene.flush()

    for repair in (False, True):
        result = disagreeing.verify_all(repair)

        (finding,) = result.findings
        assert (finding.kind, finding.harmless, finding.repaired) == (Kind.ENTITIES_INVALID, True, False)
        assert (finding.count, finding.ids) == (12, names[:10])
        assert "12 entities" in finding.detail
        assert finding.path == scene.dataset.layout.snapshot(snapshot.seq)
        assert (result.found, result.harmless, result.repaired) == (1, 1, 0)


def test_entity_that_is_valid_again_is_no_finding(lake: Lake, kernel_process: ProcessPoolExecutor):
    kernels = DirectKernels(lake.settings, kernel_process)
    scene = Scene.make(lake.settings, lake.database, lake.store, kernels, seed=1, name="agreeing")
    agreeing = replace(lake, dataset=scene.dataset)
    wrong = named(scene, "boat", "Vessel", "two")
    scene.write(named(scene, "boat", "Person", "one"), wrong)
    scene.flush()
    assert [finding.kind for finding in agreeing.verify_all().findings] == [Kind.ENTITIES_INVALID]

    scene.write(wrong | {"kind": 2})
    scene.flush()

    assert agreeing.verify_all().findings == []


# Concurrent work


@pytest.fixture
def scene(lake: Lake, kernel_process: ProcessPoolExecutor) -> Scene:
    """Return a scene that writes to the lake and flushes it."""
    settings = lake.settings.model_copy(update=SHORT_BACKOFF)
    kernels = DirectKernels(lake.settings, kernel_process)
    return Scene(settings, lake.database, lake.store, kernels, lake.dataset, Random(1))


@pytest.mark.parametrize("step", STEPS)
def test_running_flush_is_no_finding(lake: Lake, scene: Scene, step: str):
    gate = Gate()
    with in_background(scene.worker("held", pause_at(step, gate))) as flushed, ExitStack() as cleanup:
        cleanup.callback(gate.release)
        gate.wait_arrived()

        assert lake.verify().findings == []

    assert flushed().error is None
    assert lake.verify().findings == []


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        ("built", set()),
        ("leveled", set()),
        ("statements committed", {Kind.DELTA_AHEAD}),
        ("manifest put", {Kind.DELTA_AHEAD, Kind.SNAPSHOT_UNRECORDED}),
        ("recorded", set()),
    ],
)
def test_killed_flush_leaves_harmless_findings_that_the_next_one_removes(
    lake: Lake, scene: Scene, step: str, kinds: set[Kind]
):
    with pytest.raises(Killed):
        scene.worker("dying", kill_at(step))()
    scene.expire_leases()

    result = lake.verify()

    assert {finding.kind for finding in result.findings} == kinds
    assert result.found == result.harmless
    scene.write(scene.new_statement("the next"))
    scene.flush()
    assert lake.verify().findings == []


@pytest.mark.parametrize(
    ("method", "glob"),
    [
        ("get", "*/snapshots/000000000003.json"),
        ("get", "*/snapshots/000000000008.json"),
        ("list", "*/entities/statements"),
        ("stream", "*/entities/translog/*"),
        ("get_range", "*/entities/translog/*"),
        ("head", "*/_delta_log/*"),
    ],
)
def test_concurrent_vacuum_of_everything_is_no_finding(lake: Lake, scene: Scene, method: str, glob: str):
    slow = FaultyStore(lake.store)
    gate = slow.block(method, glob)
    with in_background(replace(lake, store=slow).verify) as verified, ExitStack() as cleanup:
        cleanup.callback(gate.release)
        gate.wait_arrived()
        expire_everything(lake, scene.publisher())

    assert verified().findings == []
    assert lake.verify().findings == []


def expire_everything(lake: Lake, publisher: SnapshotPublisher) -> None:
    """Expire every snapshot but the newest, and delete the files that only they name."""
    with lake.database.write() as connection:
        refs.remove(connection, lake.dataset, RefName("july"))
    refs.mirror(lake.store, lake.dataset, RefName("july"), None)
    former = [lake.manifest(seq) for seq in range(3, 12)]
    newest = pack(lake, publisher)
    expire_snapshots(lake, publisher, below=newest.seq)
    named = {lake.path(table, file) for table in TABLES for file in newest.table(table).files}
    old = {lake.path(table, file) for one in former for table in TABLES for file in one.table(table).files}
    assert old - named
    lake.store.delete(old - named)


def test_compacted_and_packed_lake_has_no_findings(lake: Lake, scene: Scene):
    services = lake.database, lake.store, scene.publisher(), lambda: scene.kernels
    compact, optimize = Compact(Rewriter(*services)), Optimize(Rewriter(*services))
    assert optimize.run(lake.dataset, OptimizeOptions(), lambda _: None).snapshot is not None
    assert lake.verify().findings == []
    scene.flush()
    assert compact.run(lake.dataset, CompactOptions(force=True), lambda _: None).snapshot is not None
    assert lake.verify().findings == []
    for number in range(3):
        scene.write(*scene.random_events(), *scene.random_events(), scene.new_statement(f"more {number}"))
        scene.flush()
        compact.run(lake.dataset, CompactOptions(), lambda _: None)

        assert lake.verify().findings == []


def test_vacuumed_lake_has_no_findings(lake: Lake, scene: Scene):
    everything = VacuumOptions(retention_hours=0, override_floor=True)
    for number in range(12):
        scene.write(*scene.random_events(), scene.new_statement(f"more {number}"))
        scene.flush()
    with lake.database.write() as connection:
        refs.put(connection, lake.dataset, RefName("july"), "20", ADMIN)

    done = Vacuum(lake.database, lake.store, lake.settings, scene.publisher()).run(
        lake.dataset, everything, lambda _: None
    )

    assert (done.retained_from, done.expired) == (20, 17)
    assert lake.verify().findings == []


# Corruptions

REPAIRABLE: dict[str, tuple[Corrupt, set[Kind]]] = {
    # Manifests
    "manifest-of-a-stage-lost": (make.delete_manifest(5), {Kind.MANIFEST_MISSING}),
    "manifest-with-a-rejected-event-lost": (make.delete_manifest(6), {Kind.MANIFEST_MISSING}),
    "manifest-of-packing-lost": (make.delete_manifest(7), {Kind.MANIFEST_MISSING}),
    "manifest-of-the-head-lost": (make.delete_manifest(11), {Kind.MANIFEST_MISSING}),
    "manifest-truncated": (make.truncate_manifest, {Kind.MANIFEST_INVALID}),
    "manifest-without-metadata": (edit_manifest(8, "metadata", to=None), {Kind.MANIFEST_INVALID}),
    "manifest-of-another-dataset": (edit_manifest(8, "dataset_id", to="another"), {Kind.MANIFEST_FOREIGN}),
    "manifest-of-another-snapshot": (edit_manifest(8, "id", to="another"), {Kind.MANIFEST_FOREIGN}),
    # SQL
    "head-behind": (make.rewind_head, {Kind.HEAD_WRONG}),
    "head-lost": (sql(f"DELETE FROM snapshot_heads {OWN}"), {Kind.HEAD_WRONG}),
    "head-of-another-id": (sql(f"UPDATE snapshot_heads SET snapshot = 'x' {OWN}"), {Kind.HEAD_WRONG}),
    "database-of-an-earlier-state": (
        make.rewind_history,
        {Kind.SNAPSHOT_UNRECORDED, Kind.DELTA_AHEAD, Kind.HINT_WRONG},
    ),
    "record-lost": (sql(f"DELETE FROM snapshots {OWN} AND seq = 6"), {Kind.RECORD_MISSING}),
    "records-lost": (sql(f"DELETE FROM snapshots {OWN} AND seq IN (3, 6, 7)"), {Kind.RECORD_MISSING}),
    "record-of-another-id": (sql(f"UPDATE snapshots SET id = 'x' {OWN} AND seq = 6"), {Kind.RECORD_WRONG}),
    "record-of-another-segment": (sql(f"UPDATE snapshots SET segment = 99 {OWN} AND seq = 6"), {Kind.RECORD_WRONG}),
    "expired-between-kept-ones": (
        sql(f"UPDATE snapshots SET expired = created {OWN} AND seq = 6"),
        {Kind.EXPIRY_WRONG},
    ),
    "expired-without-a-vacuum": (sql(f"UPDATE snapshots SET expired = created {OWN} AND seq = 3"), {Kind.EXPIRY_WRONG}),
    # The journal
    "journal-miscounted": (sql(f"UPDATE journal_head SET rows = rows + 1 {OWN}"), {Kind.JOURNAL_MISCOUNTED}),
    "oldest-event-unknown": (sql(f"UPDATE journal_head SET oldest = NULL {OWN}"), {Kind.JOURNAL_MISCOUNTED}),
    # Documents
    "config-lost": (make.delete_document(make.config), {Kind.CONFIG_MISSING}),
    "config-broken": (make.write_document(make.config, b"{"), {Kind.CONFIG_INVALID}),
    "config-of-another-dataset": (
        make.write_document(make.config, b"name: test\nid: another\ncreated: 2020-01-01T00:00:00Z\n"),
        {Kind.CONFIG_FOREIGN},
    ),
    "head-hint-truncated": (make.write_document(make.head_hint, b"{"), {Kind.HINT_WRONG}),
    "head-hint-of-an-unknown-snapshot": (
        make.write_document(make.head_hint, b'{"seq": 5, "id": "x"}'),
        {Kind.HINT_WRONG},
    ),
    "ref-mirror-lost": (make.delete_document(make.ref_mirror), {Kind.HINT_WRONG}),
    "ref-of-another-snapshot": (
        make.write_document(make.ref_mirror, b'{"seq": 5, "snapshot": "x"}'),
        {Kind.HINT_WRONG},
    ),
}

UNREPAIRABLE: dict[str, tuple[Corrupt, set[Kind]]] = {
    # Data files
    "file-deleted": (make.delete_file, {Kind.FILE_MISSING}),
    "file-of-history-deleted": (make.delete_file_of_history, {Kind.FILE_MISSING}),
    "file-truncated": (make.truncate_file, {Kind.FILE_SIZE}),
    "file-with-flipped-bytes": (make.flip_bytes, {Kind.FILE_CHECKSUM}),
    "file-with-a-broken-page": (make.break_page, {Kind.FILE_UNREADABLE}),
    "file-with-a-broken-footer": (make.break_footer, {Kind.FILE_UNREADABLE}),
    "files-swapped": (make.swap_files, {Kind.FILE_SIZE}),
    "file-with-fewer-rows": (make.remove_rows_without_updating_the_count, {Kind.FILE_ROWS}),
    "file-without-a-column": (make.drop_column, {Kind.FILE_SCHEMA}),
    "rows-unsorted": (make.reverse_rows, {Kind.ROWS_UNSORTED}),
    "bounds-too-narrow": (make.narrow_bounds, {Kind.BOUNDS_WRONG}),
    "statement-lost": (make.lose_statement, {Kind.LIVE_WRONG, Kind.MARK_DANGLING}),
    "statement-twice": (make.duplicate_statement, {Kind.LIVE_WRONG}),
    "mark-of-a-missing-statement": (make.mark_missing_statement, {Kind.MARK_DANGLING}),
    # Manifests
    "manifest-of-a-vacuum-lost": (make.delete_manifest(9), {Kind.MANIFEST_MISSING}),
    "manifest-of-the-oldest-lost": (make.delete_manifest(3), {Kind.MANIFEST_MISSING}),
    "parent-wrong": (edit_manifest(8, "parent", to="another"), {Kind.PARENT_WRONG}),
    "live-miscounted": (edit_manifest(8, "rows", "live", to=1000), {Kind.COUNTS_WRONG}),
    "live-of-the-head-miscounted": (
        edit_manifest(11, "rows", "live", to=1000),
        {Kind.COUNTS_WRONG, Kind.LIVE_WRONG},
    ),
    "events-miscounted": (edit_manifest(8, "rows", "seen", to=1000), {Kind.COUNTS_WRONG}),
    "rejected-event-not-listed": (edit_manifest(6, "set_aside", to=[]), {Kind.COUNTS_WRONG}),
    "file-not-listed": (make.forget_file(8), {Kind.FILE_LIST_WRONG}),
    "file-of-the-head-not-listed": (
        make.forget_file(11),
        {Kind.FILE_LIST_WRONG, Kind.DELTA_DIFFERS, Kind.LIVE_WRONG, Kind.MARK_DANGLING},
    ),
    "size-misstated": (make.misstate_size, {Kind.FILE_SIZE, Kind.DELTA_DIFFERS}),
    "size-misstated-in-history": (make.misstate_size_in_history, {Kind.FILE_LIST_WRONG}),
    "content-wrong": (edit_manifest(7, "content", to=7), {Kind.ORDER_WRONG, Kind.RECORD_WRONG}),
    "created-before-its-parent": (
        edit_manifest(8, "created", to="2020-01-01T00:00:00Z"),
        {Kind.ORDER_WRONG, Kind.RECORD_WRONG},
    ),
    "retained-from-decreased": (edit_manifest(10, "retained_from", to=1), {Kind.ORDER_WRONG}),
    "stray-manifest": (make.put_stray, {Kind.MANIFEST_STRAY}),
    "next-number-taken": (make.occupy_next_number, {Kind.MANIFEST_FOREIGN}),
    # SQL
    "ref-to-an-unknown-snapshot": (sql(f"UPDATE refs SET snapshot = 'x' {OWN}"), {Kind.REF_DANGLING, Kind.HINT_WRONG}),
    "ref-to-an-expired-snapshot": (sql(f"UPDATE refs SET seq = 1 {OWN}"), {Kind.REF_DANGLING, Kind.HINT_WRONG}),
    # Delta logs
    "log-entry-deleted": (make.delete_log_entry, {Kind.DELTA_UNREADABLE}),
    "commit-at-a-pinned-version": (make.commit_at_pinned_version, {Kind.DELTA_DIFFERS}),
    "commit-after-the-head": (make.commit_after_the_head, {Kind.DELTA_AHEAD}),
    # The journal
    "batch-in-a-flushed-segment": (
        sql(f"UPDATE journal_batches SET segment = 1 {OWN} AND state = 'committed' AND NOT is_stage"),
        {Kind.SEGMENT_PASSED},
    ),
    "batch-in-a-future-segment": (
        sql(f"UPDATE journal_batches SET segment = 99 {OWN} AND state = 'committed' AND NOT is_stage"),
        {Kind.SEGMENT_WRONG},
    ),
    "open-segment-already-flushed": (sql(f"UPDATE journal_head SET segment = 1 {OWN}"), {Kind.SEGMENT_WRONG}),
    "journal-rows-lost": (
        sql(
            "DELETE FROM journal WHERE position = 0 AND batch IN "
            f"(SELECT id FROM journal_batches {OWN} AND state = 'committed')"
        ),
        {Kind.JOURNAL_ROWS},
    ),
    "journal-pack-lost": (make.lose_pack, {Kind.JOURNAL_ROWS}),
    "journal-pack-damaged": (make.damage_pack, {Kind.JOURNAL_ROWS}),
    "commit-number-twice": (make.repeat_commit, {Kind.COMMIT_NUMBERS}),
    "commit-number-decreased": (sql(f'UPDATE journal_head SET "commit" = 1 {OWN}'), {Kind.COMMIT_NUMBERS}),
}


@pytest.mark.parametrize("name", REPAIRABLE)
def test_repairable_corruption_is_reported_and_repaired_and_the_content_is_unchanged(lake: Lake, name: str):
    corrupt, kinds = REPAIRABLE[name]
    live = lake.live()
    corrupt(lake)
    assert lake.kinds() == kinds

    result = lake.verify(repair=True)

    assert result.repaired == result.found > 0
    assert all(finding.repaired for finding in result.findings)
    assert lake.verify().findings == []
    assert lake.live() == live


@pytest.mark.parametrize("name", UNREPAIRABLE)
def test_unrepairable_corruption_is_reported_and_not_changed(lake: Lake, name: str):
    corrupt, kinds = UNREPAIRABLE[name]
    corrupt(lake)
    assert lake.kinds() == kinds

    lake.verify(repair=True)

    assert kinds - {Kind.RECORD_WRONG, Kind.HINT_WRONG} <= lake.kinds()


@pytest.mark.parametrize("seq", [4, 5, 6, 7, 8, 10, 11])
def test_rebuilt_manifest_equals_the_lost_one_and_lists_unknown_fields(lake: Lake, seq: int):
    lost = lake.manifest(seq)
    make.delete_manifest(seq)(lake)

    lake.verify(repair=True)

    rebuilt = lake.manifest(seq)
    assert rebuilt.rebuilt is not None
    assert rebuilt.rebuilt[:3] == ("author", "message", "metadata")
    assert (rebuilt.message, rebuilt.metadata, rebuilt.batches, rebuilt.set_aside) == (None, {}, (), ())
    # The checksums of the newest files are in no other manifest, nor in Delta's log.
    assert known(rebuilt, checksums=seq < 11) == known(lost, checksums=seq < 11)
    assert ("files.checksum" in rebuilt.rebuilt) == (seq == 11)


def known(snapshot: Snapshot, checksums: bool) -> dict[str, Any]:
    """Return the fields of a manifest that can be derived from elsewhere."""
    unknown = {"rebuilt", "author", "message", "metadata", "batches", "set_aside"}
    fields = snapshot.model_dump(exclude=unknown)
    fields["rows"] = {name: fields["rows"][name] for name in ("live", "added", "ended")}
    for table in () if checksums else TABLES:
        for file in fields[table]["files"]:
            file.pop("checksum")
    return fields


def test_broken_manifest_is_kept_as_a_copy_when_it_is_rebuilt(lake: Lake):
    make.truncate_manifest(lake)
    broken = lake.at(lake.dataset.layout.snapshot(8)).read_bytes()

    lake.verify(repair=True)

    (copy,) = lake.at(lake.dataset.layout.versions.folder).rglob("000000000008.json")
    assert copy.read_bytes() == broken


def test_lost_config_is_restored_to_its_state_before_the_last_change(lake: Lake):
    lake.at(lake.dataset.layout.config).unlink()

    lake.verify(repair=True)

    config, _ = registry.read(lake.store, lake.dataset)
    assert (config.title, config.checksum) == ("First", "sha256")


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_sql_is_repaired_on_postgresql_too(
    settings: Settings, database: Database, store: Store, kernels: DirectKernels
):
    lake = rich_lake(settings, database, store, kernels)
    for name in ON_POSTGRESQL:
        corrupt, kinds = REPAIRABLE[name]
        corrupt(lake)
        assert lake.kinds() == kinds, name

        lake.verify(repair=True)

        assert lake.verify().findings == [], name


ON_POSTGRESQL = (
    "head-behind",
    "head-lost",
    "database-of-an-earlier-state",
    "records-lost",
    "record-of-another-id",
    "expired-between-kept-ones",
    "expired-without-a-vacuum",
    "journal-miscounted",
    "oldest-event-unknown",
)


def test_repair_waits_for_the_lease_of_the_dataset(lake: Lake):
    make.delete_manifest(5)(lake)
    lease = Leases(lake.database, lake.store, "another", 60).take(lake.dataset)

    with pytest.raises(Locked):
        lake.verify(repair=True)

    Leases(lake.database, lake.store, "another", 60).release(lease)
    assert lake.verify(repair=True).repaired == 1


def test_verify_ends_when_its_job_is_taken_over(lake: Lake):
    progress_calls = iter([None, None])

    def report(_: Progress | None) -> None:
        if next(progress_calls, JobStopped) is JobStopped:
            raise JobStopped

    with pytest.raises(JobStopped):
        verify(lake.database, lake.store, lake.settings, "verifier", lake.dataset, VerifyOptions(), report)


def test_all_findings_are_counted_and_the_first_thousand_listed():
    findings = Findings()

    for number in range(1500):
        findings.add(Kind.HINT_WRONG if number % 3 == 0 else Kind.FILE_MISSING, f"number {number}")

    assert (len(findings.first), findings.found, findings.harmless) == (1000, 1500, 500)
