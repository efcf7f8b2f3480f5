"""Snapshots: recorded heads, an index of manifests, leases; rejected rows; arguments of jobs."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0005"
down_revision = "0004"


def upgrade():
    op.create_table(
        "journal_rejected",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("batch", sa.String(length=36), nullable=False, comment="the uid of its batch"),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("commit", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False, comment="the row of the journal, bytes as hexadecimal"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_journal_rejected_dataset_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_journal_rejected")),
        sa.UniqueConstraint(
            "dataset_id", "batch", "position", name=op.f("uq_journal_rejected_dataset_id_batch_position")
        ),
    )
    op.create_table(
        "snapshot_heads",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column(
            "seq",
            sa.BigInteger(),
            nullable=False,
            comment="starts above that of an earlier dataset of the same name",
        ),
        sa.Column("snapshot", sa.String(length=36), nullable=True, comment="null: there is none yet"),
        sa.Column("content", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False, comment="the last segment that it includes"),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_snapshot_heads_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_snapshot_heads")),
    )
    op.execute(
        "INSERT INTO snapshot_heads (dataset_id, seq, snapshot, content, segment) "
        "SELECT id, 0, NULL, 0, 0 FROM datasets"
    )
    op.create_table(
        "snapshots",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("content", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_snapshots_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "seq", name=op.f("pk_snapshots")),
        sa.UniqueConstraint("dataset_id", "id", name=op.f("uq_snapshots_dataset_id_id")),
        comment="index of the manifests",
    )
    op.create_table(
        "leases",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("owner", sa.String(length=36), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="fencing number, rises with every holder"),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_leases_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_leases")),
    )
    with op.batch_alter_table("jobs") as jobs:
        jobs.alter_column(
            "dataset_id",
            existing_type=sa.String(length=36),
            nullable=True,
            comment="null: the job concerns several datasets",
        )
        jobs.add_column(sa.Column("arguments", sa.JSON(), nullable=False, server_default="{}"))
        jobs.add_column(sa.Column("cancelled", Moment(), nullable=True, comment="when cancellation was requested"))
        jobs.alter_column(
            "state",
            existing_type=sa.String(length=16),
            existing_nullable=False,
            comment="queued, running, done, failed or cancelled",
        )
    with op.batch_alter_table("jobs") as jobs:
        jobs.alter_column("arguments", existing_type=sa.JSON(), existing_nullable=False, server_default=None)
    for table in ("journal_head", "journal_batches"):
        with op.batch_alter_table(table) as altered:
            altered.add_column(
                sa.Column(
                    "size",
                    sa.BigInteger(),
                    nullable=False,
                    server_default="0",
                    comment="total characters of their values",
                )
            )
        with op.batch_alter_table(table) as altered:
            altered.alter_column("size", existing_type=sa.BigInteger(), existing_nullable=False, server_default=None)
