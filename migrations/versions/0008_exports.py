"""Exports with the snapshots that they were made from, and their leases."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0008"
down_revision = "0007"


def upgrade():
    op.create_table(
        "export_leases",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("owner", sa.String(length=36), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="fencing number, rises with every holder"),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_export_leases_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_export_leases")),
    )
    op.create_table(
        "exports",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("snapshot", sa.String(length=36), nullable=True, comment="null: the dataset had no snapshot"),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.BigInteger(), nullable=False),
        sa.Column("resolved", Moment(), nullable=False, comment="when its snapshot was resolved as the head"),
        sa.Column("made", Moment(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha1", sa.String(length=40), nullable=False),
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_exports_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "kind", name=op.f("pk_exports")),
    )
