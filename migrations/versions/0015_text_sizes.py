"""Texts of files: who put each and how many bytes it has, to count them against a quota.

Texts that are there already have no row: only the store knows them. `tarn verify --repair` counts them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
compatible_from = "0012"


def upgrade():
    op.create_table(
        "file_texts",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("checksum", sa.String(length=64), nullable=False),
        sa.Column("origin", sa.String(length=128), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False, comment="whose quota it counts against"),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_file_texts_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "checksum", "origin", name=op.f("pk_file_texts")),
        comment="texts of contents, as they are counted; what they say is in the archive",
    )
