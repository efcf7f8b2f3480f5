"""Bring the database to the schema this version needs, or say that it is not there yet."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

import migrations
from app.db.engine import Database
from app.errors import StartRefused


def upgrade(database: Database) -> None:
    """Apply what is missing, in one transaction. Raises StartRefused for a database of a newer version."""
    with database.write() as connection:
        database.serialize(connection, "migrate")
        config = alembic_config()
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise StartRefused(f"the database cannot be migrated by this version of Tarn: {error}") from error


def require_current(database: Database) -> None:
    """Raise StartRefused unless the database has exactly the schema of this version."""
    scripts = ScriptDirectory.from_config(alembic_config())
    wanted = scripts.get_current_head()
    with database.read() as connection:
        found = revision(connection)
    if found == wanted:
        return
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        raise StartRefused(
            f"the database is at revision {found}, which this version, made for {wanted}, does not know: "
            "run the newer version of Tarn that migrated it"
        )
    raise StartRefused(
        f"the database is at revision {found or 'none'} and this version needs {wanted}: run `tarn migrate`"
    )


def revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    return config
