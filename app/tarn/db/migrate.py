"""Bring the database to the schema this version needs, or say that it is not there yet.

A database may be ahead of the code: in a rolling upgrade it is migrated first, and processes of the version before go
on until they are replaced. It says itself whom it serves (`compatibility`, written by migrations and
`tarn.db.format_versions`).
Revisions are numbers of four digits, so the later one is the greater; docs/upgrades.md has the rules.
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

from tarn import migrations
from tarn.db.engine import Database
from tarn.db.tables import compatibility
from tarn.errors import StartRefused, Unavailable

LOCK_SECONDS, TRIES = 5, 12
"""How long a migration waits for a table that somebody uses, and how often. While it does, all who come after it wait
behind it: so it stands back in between, and lets them go first."""

LOCK_NOT_AVAILABLE = "55P03"


class SupportedRevisions(NamedTuple):
    """Which revision a database is at, and the oldest one whose code it serves."""

    revision: str | None
    oldest: str | None


def upgrade(database: Database) -> None:
    """Apply what is missing, in one transaction. A database that is ahead, and serves this version, is left as it is.

    Raises StartRefused for a database of a newer version that does not, and for one whose tables cannot be had.
    """
    for _ in range(TRIES):
        try:
            return _upgrade(database)
        except Unavailable as error:
            if getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) != LOCK_NOT_AVAILABLE:
                raise
    raise StartRefused(
        f"the database cannot be migrated: somebody has held one of its tables for {LOCK_SECONDS * TRIES} seconds. "
        "End the transaction that does (pg_stat_activity shows it), and run `tarn migrate` again"
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
    """Apply what is missing up to a revision, in the caller's transaction. Raises StartRefused."""
    config = alembic_config()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise StartRefused(f"the database cannot be migrated by this version of Tarn: {error}") from error


def require_current(database: Database) -> None:
    """Raise StartRefused unless the database has the schema of this version, or a later one that serves it."""
    with database.read() as connection:
        require(served(connection))


def require(found: SupportedRevisions) -> None:
    """Raise StartRefused unless such a database serves this version."""
    wanted = head()
    if found.revision == wanted or _is_ahead(found):
        return
    if found.revision is not None and found.revision not in revisions():
        serves = "" if found.oldest is None else f", serves versions made for {found.oldest} or later"
        raise StartRefused(
            f"the database is at revision {found.revision}{serves}, and this version, made for {wanted}, does not know "
            "it: run the newer version of Tarn that migrated it"
        )
    raise StartRefused(
        f"the database is at revision {found.revision or 'none'} and this version needs {wanted}: run `tarn migrate`"
    )


def served(connection: Connection, wait: bool = False) -> SupportedRevisions:
    """Whom a database serves. With `wait`, whoever is about to change that is waited for."""
    at = revision(connection)
    if not inspect(connection).has_table(compatibility.name):
        return SupportedRevisions(at, None)
    oldest = select(compatibility.c.oldest)
    return SupportedRevisions(
        at, connection.execute(oldest.with_for_update(read=True) if wait else oldest).scalar_one()
    )


def raise_oldest(connection: Connection, oldest: str) -> None:
    """Serve nobody who is older than this revision, from now on. What was given up before stays given up."""
    connection.execute(update(compatibility).where(compatibility.c.oldest < oldest).values(oldest=oldest))


def _is_ahead(found: SupportedRevisions) -> bool:
    """Whether a database is of a later version than this one, which it serves all the same."""
    return found.revision is not None and found.revision not in revisions() and found.oldest in revisions()


def revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def head() -> str:
    """The revision that this version is made for."""
    found = scripts().get_current_head()
    assert found is not None
    return found


def revisions() -> set[str]:
    """Those that this version knows."""
    return {script.revision for script in scripts().walk_revisions()}


def compatible_from() -> str:
    """The oldest revision whose code works on a database at this version's; its own, unless the migration says more."""
    script = scripts().get_revision(head())
    return str(getattr(script.module, "compatible_from", script.revision))


@cache
def scripts() -> ScriptDirectory:
    """The migrations that this version has."""
    return ScriptDirectory.from_config(alembic_config())


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    return config
