"""A simulated next version of Tarn: the migrations of this version and one more."""

import shutil
from pathlib import Path

import pytest
from tarn.db import migrate
from tarn.db.engine import Database

REVISION = "9990"

MIGRATION = '''"""Add a table and a column."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{head}"
compatible_from = "{oldest}"


def upgrade():
    op.create_table("later", sa.Column("id", sa.Integer(), primary_key=True))
    op.add_column("tags", sa.Column("later", sa.Text(), nullable=True))
'''


def migrate_to_next_version(database: Database, folder: Path, oldest: str | None = None) -> None:
    """Migrate a database as the next version would; it then supports versions from `oldest` on, by default this one."""
    package = folder / "migrations"
    shutil.copytree(migrate.SCRIPTS, package, ignore=shutil.ignore_patterns("__pycache__"))
    head = migrate.head()
    migration = MIGRATION.format(revision=REVISION, head=head, oldest=oldest or head)
    (package / "versions" / f"{REVISION}_next.py").write_text(migration)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "SCRIPTS", package)
        migrate.scripts.cache_clear()
        assert migrate.head() == REVISION
        migrate.upgrade(database)
    migrate.scripts.cache_clear()
