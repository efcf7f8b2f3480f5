"""Database migrations: upgrade the schema to this version, or refuse a database that does not fit.

A database may be ahead of the code: in a rolling upgrade it is migrated first, and processes of the previous version
run until they are replaced. The table `compatibility`, written by migrations and `tarn.db.format_versions`, has the
oldest revision that is supported. Revisions are four-digit numbers, so the later one is the greater; docs/upgrades.md
has the rules.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, select, text, update

from tarn.db.engine import Database
from tarn.db.tables import compatibility
from tarn.errors import StartRefused, Unavailable

LOCK_SECONDS, TRIES = 5, 12
"""Lock timeout of a migration and number of attempts. Later queries on the table queue behind a waiting migration, so
it is cancelled after each attempt to let them through."""

LOCK_NOT_AVAILABLE = "55P03"

SCRIPTS = Path(__file__).parents[1] / "migrations"
"""Alembic's scripts, which ship inside the package."""


class SupportedRevisions(NamedTuple):
    """A database's revision, and the oldest revision whose code it supports."""

    revision: str | None
    oldest: str | None


def upgrade(database: Database) -> None:
    """Apply missing migrations in one transaction. A newer database that supports this version is left unchanged.

    Raises StartRefused for a newer database that does not, and if a table lock cannot be acquired.
    """
    for _ in range(TRIES):
        try:
            return _upgrade(database)
        except Unavailable as error:
            if getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
    raise StartRefused(
        f"the database cannot be migrated: another transaction has locked one of its tables for {LOCK_SECONDS * TRIES} "
        "seconds. End that transaction (see pg_stat_activity), and run `tarn migrate` again"
    )


def _upgrade(database: Database) -> None:
    with database.rebuild() as connection:
        database.serialize(connection, "migrate")
        if _is_ahead(served(connection)):
            return
        if not database.is_sqlite:
            connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        upgrade_in(connection, "head")
        raise_oldest(connection, compatible_from())


def upgrade_in(connection: Connection, revision: str) -> None:
    """Apply missing migrations up to a revision, in the caller's transaction. Raises StartRefused."""
    config = alembic_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise StartRefused(f"the database cannot be migrated by this version of Tarn: {error}") from error


def require_current(database: Database) -> None:
    """Raise StartRefused unless the database has the schema of this version, or a later one that supports it."""
    with database.read() as connection:
        require(served(connection))


def require(database: SupportedRevisions) -> None:
    """Raise StartRefused unless a database at this revision supports this version."""
    needed = head()
    if database.revision == needed or _is_ahead(database):
        return
    if database.revision is not None and database.revision not in revisions():
        supports = "" if database.oldest is None else f" (it supports versions from {database.oldest} on)"
        raise StartRefused(
            f"the database is at revision {database.revision}{supports}, which this version, at {needed}, does not "
            "know: run the newer version of Tarn that migrated it"
        )
    raise StartRefused(
        f"the database is at revision {database.revision or 'none'} and this version needs {needed}: run `tarn migrate`"
    )


def served(connection: Connection, wait: bool = False) -> SupportedRevisions:
    """Return a database's revision and oldest supported one. With `wait`, wait for a transaction that changes it."""
    current = revision(connection)
    if not inspect(connection).has_table(compatibility.name):
        return SupportedRevisions(current, None)
    oldest = select(compatibility.c.oldest)
    return SupportedRevisions(
        current, connection.execute(oldest.with_for_update(read=True) if wait else oldest).scalar_one()
    )


def raise_oldest(connection: Connection, oldest: str) -> None:
    """Raise the oldest supported revision to at least this one. It is never lowered."""
    connection.execute(update(compatibility).where(compatibility.c.oldest < oldest).values(oldest=oldest))


def _is_ahead(database: SupportedRevisions) -> bool:
    """Return whether a database is newer than this version and still supports it."""
    return database.revision is not None and database.revision not in revisions() and database.oldest in revisions()


def revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """Return the revision of this version."""
    current = scripts().get_current_head()
    assert current is not None
    return current


def revisions() -> set[str]:
    """Return the revisions that this version knows."""
    return {script.revision for script in scripts().walk_revisions()}


def compatible_from() -> str:
    """Return the oldest revision whose code works on this version's schema: its own, unless the migration says so."""
    script = scripts().get_revision(head())
    return str(getattr(script.module, "compatible_from", script.revision))


@cache
def scripts() -> ScriptDirectory:
    """Return the migration scripts of this version."""
    return ScriptDirectory.from_config(alembic_config())


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    return config
