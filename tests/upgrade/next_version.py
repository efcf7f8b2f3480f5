"""The next version of Tarn, as far as a database is concerned: this one's migrations and one more."""

import shutil
from pathlib import Path

import pytest
from tarn import migrations
from tarn.db import migrate
from tarn.db.engine import Database

REVISION = "9990"

STEP = '''"""What the next version needs."""

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
    """Migrate as it does. It serves versions made for `oldest` and later; without one, this one, too."""
    package = folder / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    head = migrate.head()
    step = STEP.format(revision=REVISION, head=head, oldest=oldest or head)
    (package / "versions" / f"{REVISION}_next.py").write_text(step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "__file__", str(package / "__init__.py"))
        migrate.scripts.cache_clear()
        assert migrate.head() == REVISION
        migrate.upgrade(database)
    migrate.scripts.cache_clear()
