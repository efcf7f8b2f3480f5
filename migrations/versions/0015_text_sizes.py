"""Extracted texts of files: the tenant and size of each, for quotas.

Texts stored before this migration have no row. `tarn verify --repair` adds them.
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
        sa.Column("tenant", sa.String(length=64), nullable=False, comment="the tenant whose quota it counts towards"),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_file_texts_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "checksum", "origin", name=op.f("pk_file_texts")),
        comment="sizes of extracted texts, for quotas; the texts are in the archive",
    )
