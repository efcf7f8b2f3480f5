"""Database migrations."""

import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.db.tables import metadata
from tarn.errors import StartRefused

pytestmark = pytest.mark.both_databases


def test_migrations_create_exactly_the_tables_of_the_code(database: Database):
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "target_metadata": metadata})
        assert compare_metadata(context, metadata) == []


def test_second_migration_changes_nothing(database: Database):
    migrate.upgrade(database)
    migrate.require_current(database)


def test_several_processes_can_migrate_concurrently(tmp_path):
    url = f"sqlite:///{tmp_path}/new.db"
    failures: list[BaseException] = []

    def start() -> None:
        database = Database(url)
        try:
            migrate.upgrade(database)
            migrate.require_current(database)
        except BaseException as error:  # noqa: BLE001 - the test fails with any error
            failures.append(error)
        database.close()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []


def test_database_without_migrations_is_refused_with_the_command_to_run(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/new.db")

    with pytest.raises(StartRefused, match="run `tarn migrate`"):
        migrate.require_current(database)
    database.close()


def test_database_of_a_newer_version_is_refused(database: Database):
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'from-the-future'"))
        connection.execute(text("UPDATE compatibility SET oldest = 'not-so-far-away'"))

    with pytest.raises(StartRefused, match="from-the-future") as refused:
        migrate.require_current(database)
    assert "newer version" in str(refused.value)
    assert "tarn migrate" not in str(refused.value)
    with pytest.raises(StartRefused, match="cannot be migrated"):
        migrate.upgrade(database)
