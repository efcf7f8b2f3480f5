"""Backup and restore: the restored state is that of one moment, despite concurrent work and crashes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from sqlalchemy import text
from tarn import logs
from tarn.archive.files import Archive
from tarn.cli.application import app
from tarn.db import dump, migrate
from tarn.db.engine import Database
from tarn.db.tables import webhooks
from tarn.errors import StartRefused
from tarn.model.datasets.recovery import Losses
from tarn.model.file import NewFile
from tarn.model.ids import now
from tarn.model.names import FilePath
from tarn.model.tenant import ADMIN
from tarn.recovery.backup import Backup
from tarn.settings import Settings
from tarn.storage.backup_store import BackupStore, DamagedBackup
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store
from typer.testing import CliRunner

from tests.faults.checks import check
from tests.faults.scene import Killed, Scene, kill_at
from tests.in_process_api import ONE_DATABASE
from tests.integrity.vacuums import head_of, replace_files, vacuum
from tests.recovery.backups import Elsewhere, back_up, findings, restore, save_database
from tests.s3 import S3Server

pytestmark = pytest.mark.both_databases


@pytest.fixture
def vault(tmp_path: Path) -> BackupStore:
    return BackupStore(Store(Connection(str(tmp_path / "backups"))))


def at(step: str, act: Callable[[], object]) -> Callable[[str], None]:
    """Run an action at a step, the first time it is reached."""
    first = iter([act])

    def reached(name: str) -> None:
        if name == step:
            next(first, lambda: None)()

    return reached


def put_file(scene: Scene, path: str, content: bytes) -> None:
    archive = Archive(scene.database, scene.store, scene.settings)
    new = NewFile(path=FilePath(path))
    archive.put(scene.dataset, ADMIN, new, iter([content]))


def test_backup_is_restored_unchanged_into_an_empty_target(scene: Scene, elsewhere: Elsewhere, vault: BackupStore):
    scene.with_history(3)
    put_file(scene, "a/report.pdf", b"a report")
    put_file(scene, "a/empty.txt", b"")
    manifest = back_up(scene, vault)
    before = save_database(scene)
    reconciled = restore(elsewhere, vault, manifest)

    assert (reconciled.datasets, manifest.lacking) == ([], [])
    restored = elsewhere.scene(scene, scene.acknowledged)
    tables = [table for table in dump.dumped() if table.name not in ("leases", "access_revision", "tags")]
    same = {table.name for table in tables}
    assert [lines for lines in save_database(restored) if orjson.loads(lines[0])["table"] in same] == [
        lines for lines in before if orjson.loads(lines[0])["table"] in same
    ]
    assert head_of(restored) == head_of(scene)
    assert findings(restored) == []
    check(restored)


@ONE_DATABASE
def test_backup_of_sqlite_is_restored_to_postgresql_and_sequences_continue(
    scene: Scene, vault: BackupStore, elsewhere_postgresql: Elsewhere
):
    scene.with_history(1)

    restore(elsewhere_postgresql, vault, back_up(scene, vault))

    check(elsewhere_postgresql.scene(scene, scene.acknowledged))


@ONE_DATABASE
def test_backup_during_writes_flushes_and_a_vacuum_has_the_state_of_one_moment(
    scene: Scene, elsewhere: Elsewhere, vault: BackupStore
):
    scene.with_history(2)
    replace_files(scene)
    commits = set(scene.acknowledged)

    def change_dataset() -> None:
        scene.write(scene.new_statement("while it is copied"))
        scene.flush()
        vacuum(scene, keep_from=head_of(scene).seq)
        put_file(scene, "later.txt", b"put while it is copied")

    manifest = back_up(scene, vault, at("dumped", change_dataset))
    reconciled = restore(elsewhere, vault, manifest)

    assert (reconciled.datasets, manifest.lacking) == ([], [])
    assert list(elsewhere.store.list(scene.dataset.layout.archive)) == []
    restored = elsewhere.scene(scene, commits)
    check(restored)
    assert findings(restored) == []
    check(scene)


@ONE_DATABASE
def test_second_backup_copies_only_new_files_and_old_backups_can_be_deleted(
    scene: Scene, elsewhere: Elsewhere, vault: BackupStore
):
    scene.with_history(2)
    first = back_up(scene, vault)
    scene.flush()
    commits = set(scene.acknowledged)
    second = back_up(scene, vault)

    assert first.copied == first.objects
    assert 0 < second.copied < first.objects / 2
    backup = Backup(scene.database, scene.store, vault, second.lake, lambda _: None)
    assert backup.keep(1) > 0
    assert vault.finished() == [second.id]
    assert backup.keep(1) == 0
    restore(elsewhere, vault, second)
    check(elsewhere.scene(scene, commits))


@ONE_DATABASE
def test_content_deleted_while_it_is_copied_restarts_the_backup(scene: Scene, elsewhere: Elsewhere, vault: BackupStore):
    scene.with_history(1)
    put_file(scene, "gone.txt", b"soon gone")

    def delete() -> None:
        with scene.database.write() as connection:
            connection.execute(text("DELETE FROM files"))
        scene.store.delete([entry.path for entry in scene.store.list(scene.dataset.layout.archive)])

    manifest = back_up(scene, vault, at("dumped", delete))
    reconciled = restore(elsewhere, vault, manifest)

    assert (manifest.lacking, reconciled.datasets) == ([], [])
    assert vault.finished() == [manifest.id]


@ONE_DATABASE
def test_files_that_the_lake_lacks_are_recorded_and_reported_by_the_restore(
    scene: Scene, elsewhere: Elsewhere, vault: BackupStore
):
    scene.with_history(2)
    put_file(scene, "gone.txt", b"gone")
    blob = next(entry.path for entry in scene.store.list(scene.dataset.layout.archive) if entry.path.endswith("/data"))
    scene.store.delete([blob])

    manifest = back_up(scene, vault)
    (result,) = restore(elsewhere, vault, manifest).datasets

    assert [one.path for one in manifest.lacking] == [blob]
    assert [file.path for file in result.lost.files] == ["gone.txt"]
    assert result.lost.model_copy(update={"files": []}) == Losses()
    assert result.findings == []


@ONE_DATABASE
@pytest.mark.parametrize("step", ["dumped", "copied"])
def test_killed_backup_does_not_count_and_the_next_one_continues(
    scene: Scene, elsewhere: Elsewhere, vault: BackupStore, step: str
):
    scene.with_history(1)
    with pytest.raises(Killed):
        back_up(scene, vault, kill_at(step))
    assert vault.finished() == []

    manifest = back_up(scene, vault)

    assert (manifest.copied == manifest.objects) == (step == "dumped")
    restore(elsewhere, vault, manifest)
    check(elsewhere.scene(scene, scene.acknowledged))


@ONE_DATABASE
@pytest.mark.parametrize("step", ["some copied", "copied", "loaded", "lake.json put"])
def test_killed_restore_is_resumed_and_blocks_every_start_until_then(
    scene: Scene, elsewhere: Elsewhere, vault: BackupStore, step: str
):
    scene.with_history(1)
    manifest = back_up(scene, vault)
    with pytest.raises(Killed):
        restore(elsewhere, vault, manifest, kill_at(step))
    if step != "lake.json put":
        with pytest.raises(StartRefused, match=r"and no lake\.json"):
            open_lake(elsewhere.store)

    restore(elsewhere, vault, manifest)

    assert open_lake(elsewhere.store).id == manifest.lake
    check(elsewhere.scene(scene, scene.acknowledged))


@ONE_DATABASE
def test_damaged_backup_is_refused_before_anything_is_written(scene: Scene, elsewhere: Elsewhere, vault: BackupStore):
    scene.with_history(1)
    manifest = back_up(scene, vault)
    folder = vault.store.connection.folder
    assert folder is not None
    table = folder / f"backups/{manifest.id}/tables/journal.ndjson.zst"
    complete = table.read_bytes()
    entry = next(entry for entry in vault.index(manifest) if entry.path.endswith(".parquet"))

    table.write_bytes(complete[:-9] + b"x" + complete[-8:])
    with pytest.raises(
        DamagedBackup, match=r"tables/journal\.ndjson\.zst (is not what was written|cannot be unpacked)"
    ):
        restore(elsewhere, vault, manifest)
    table.unlink()
    with pytest.raises(DamagedBackup, match=r"the backup lacks backups/.*/tables/journal\.ndjson\.zst"):
        restore(elsewhere, vault, manifest)
    table.write_bytes(complete)
    (folder / entry.object).unlink()
    with pytest.raises(
        DamagedBackup, match=f"1 of {manifest.objects} objects of the backup are missing.*; the first is {entry.object}"
    ):
        restore(elsewhere, vault, manifest)
    with pytest.raises(DamagedBackup, match=f"has no backup 'yesterday'; there are {manifest.id}"):
        vault.read("yesterday")

    assert list(elsewhere.store.list("")) == []


@ONE_DATABASE
def test_targets_that_are_not_empty_are_refused(scene: Scene, elsewhere: Elsewhere, vault: BackupStore):
    manifest = back_up(scene, vault)

    elsewhere.store.put("mine.txt", b"mine")
    with pytest.raises(StartRefused, match=r"is not empty: it holds mine\.txt"):
        restore(elsewhere, vault, manifest)
    elsewhere.store.delete(["mine.txt"])
    with elsewhere.database.write() as connection:
        connection.execute(text("INSERT INTO lake VALUES ('another')"))
    with pytest.raises(StartRefused, match="the database is not empty: its table 'lake' has rows"):
        restore(elsewhere, vault, manifest)
    with pytest.raises(StartRefused, match="is a lake: keep backups elsewhere"):
        BackupStore(scene.store)


@ONE_DATABASE
def test_backup_of_an_unknown_revision_is_refused(scene: Scene, elsewhere: Elsewhere, vault: BackupStore):
    manifest = back_up(scene, vault)
    path = f"backups/{manifest.id}/backup.json"
    vault.store.put(path, orjson.dumps(manifest.model_copy(update={"revision": "9999"}).model_dump(mode="json")))

    with pytest.raises(StartRefused, match=r"of revision 9999, made by Tarn .*, which this version does not know"):
        restore(elsewhere, vault, manifest)


def test_older_backup_is_loaded_at_its_own_revision_and_migrated(tmp_path: Path):
    old = Database(f"sqlite:///{tmp_path}/old.db")
    with old.write() as connection:
        migrate.upgrade_in(connection, "0011")
        columns = {"table": "lake", "columns": {"id": "text"}}
        dump.load(connection, [orjson.dumps(columns), orjson.dumps(["an id"])])
        assert dump.occupied(connection) == "its table 'lake' has rows"
    old.close()
    new = Database(f"sqlite:///{tmp_path}/new.db")
    migrate.upgrade(new)

    with new.write() as connection:
        assert dump.occupied(connection) is None
        dump.prepare(connection, "0011")
        assert migrate.revision(connection) == "0011"
        dump.load(connection, [orjson.dumps(columns), orjson.dumps(["an id"])])
        migrate.upgrade_in(connection, "head")

    migrate.require_current(new)
    with new.read() as connection:
        assert connection.execute(text("SELECT id FROM lake")).scalar() == "an id"
        assert connection.execute(webhooks.select()).all() == []
    new.close()


@ONE_DATABASE
def test_json_null_missing_values_and_bytes_are_restored_unchanged(
    scene: Scene, elsewhere: Elsewhere, vault: BackupStore
):
    scene.write(scene.new_statement("poison"))
    with scene.database.write() as connection:
        connection.execute(text("UPDATE journal SET value = CAST(x'ff00' AS BLOB) WHERE entity_id = 'poison'"))
        for name, progress in (("a", None), ("b", "null"), ("c", '{"done": 1}')):
            values = {"name": name, "progress": progress, "at": f"{now():%Y-%m-%d %H:%M:%S.%f}"}
            connection.execute(
                text(
                    "INSERT INTO jobs (id, operation, arguments, tenant, request, state, created, attempts, progress) "
                    "VALUES (:name, 'flush', '[]', 'x', 'r', 'done', :at, 1, :progress)"
                ),
                values,
            )

    restore(elsewhere, vault, back_up(scene, vault))

    with elsewhere.database.read() as connection:
        progress_values = connection.execute(text("SELECT progress FROM jobs ORDER BY id")).scalars().all()
        assert connection.execute(text("SELECT hex(value) FROM journal")).scalar() == "FF00"
    assert [None if one is None else orjson.loads(one) for one in progress_values] == [None, None, {"done": 1}]
    assert progress_values[:2] == [None, "null"]


def tarn(settings: Settings, *arguments: str, **more: str) -> tuple[int, str]:
    """Run the command in a process of its own; return its exit code and output."""
    options = {name: value.get_secret_value() for name, value in settings.storage_options.items()}
    variables = {"TARN_DATABASE_URL": settings.database_url, "TARN_LAKE_URI": settings.lake_uri}
    if options:
        variables["TARN_STORAGE_OPTIONS"] = orjson.dumps(options).decode()
    done = subprocess.run(
        [sys.executable, "-m", "tarn.cli", *arguments],
        env=os.environ | variables | more,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@ONE_DATABASE
def test_command_backs_up_to_s3_and_restores_from_there(
    s3: S3Server, scene: Scene, elsewhere: Elsewhere, tmp_path: Path
):
    """From a disk to a bucket, and from there to another lake in it, with separate options for backups."""
    scene.with_history(1)
    location = s3.settings().lake_uri

    code, output = tarn(
        scene.settings, "backup", location, "--keep", "1", TARN_BACKUP_OPTIONS=orjson.dumps(s3.options).decode()
    )
    assert code == 0, output
    target_settings = s3.settings(database_url=f"sqlite:///{tmp_path}/there.db")
    code, output = tarn(target_settings, "restore", location, "--json")

    assert code == 0, output
    assert orjson.loads(output[output.index("{") :])["datasets"] == []
    elsewhere.settings, elsewhere.database = target_settings, Database(target_settings.database_url)
    check(elsewhere.scene(scene, scene.acknowledged))
    elsewhere.database.close()


@ONE_DATABASE
def test_command_writes_private_files_and_reports_what_is_lost(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Where this process's logs go is up to pytest.
    monkeypatch.setattr(logs, "configure", lambda _: None)
    monkeypatch.setenv("TARN_DATABASE_URL", scene.settings.database_url)
    monkeypatch.setenv("TARN_LAKE_URI", scene.settings.lake_uri)
    scene.with_history(1)
    location = tmp_path / "backups"
    command = CliRunner()

    refused = command.invoke(app, ["backup", f"{scene.settings.lake_uri}/backups"])
    assert (refused.exit_code, "are within each other" in refused.output) == (2, True)
    created = command.invoke(app, ["backup", str(location)])
    assert created.exit_code == 0, created.output
    assert {path.stat().st_mode & 0o077 for path in location.rglob("*")} == {0}
    listed = command.invoke(app, ["backup", str(location), "--list", "--json"])
    assert [one["id"] for one in orjson.loads(listed.stdout)] == [
        path.name for path in (location / "backups").iterdir()
    ]
    scene.flush()
    scene.store.delete([scene.dataset.layout.snapshot(2)])
    dry_run = command.invoke(app, ["reconcile"])

    assert dry_run.exit_code == 1, dry_run.output
    assert "test: database ahead, head 2 becomes 1\n" in dry_run.output
    assert "  lost: commits 2 to 3\n" in dry_run.output
    assert dry_run.output.endswith("nothing was changed: run it with --apply to do this\n")
