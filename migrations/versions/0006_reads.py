"""Reads: refs, expired snapshots, and an index of batches by commit."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0006"
down_revision = "0005"


def upgrade():
    op.create_table(
        "refs",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("snapshot", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False, comment="the tenant that last set it"),
        sa.Column("updated", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_refs_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "name", name=op.f("pk_refs")),
        comment="names that keep a snapshot, mirrored in the layout",
    )
    op.add_column(
        "snapshots",
        sa.Column("expired", Moment(), nullable=True, comment="when the snapshot was expired; null: it is kept"),
    )
    op.create_index("ix_journal_batches_dataset_id_commit", "journal_batches", ["dataset_id", "commit"])
