"""Snapshots: recorded heads, what manifests say of themselves, leases; rows set aside; jobs with arguments."""

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
        sa.Column("batch", sa.String(length=36), nullable=False, comment="the uid of the batch it came with"),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("commit", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False, comment="the journal's row as it was, bytes as hexadecimal"),
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
            comment="a dataset made again goes on above the one that had its name",
        ),
        sa.Column("snapshot", sa.String(length=36), nullable=True, comment="null: none yet"),
        sa.Column("content", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False, comment="the last segment that is in it"),
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
        comment="what the manifests say of themselves, to be found by id, segment or moment",
    )
    op.create_table(
        "leases",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("owner", sa.String(length=36), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="rises with every holder"),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_leases_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_leases")),
    )
    with op.batch_alter_table("jobs") as jobs:
        jobs.alter_column(
            "dataset_id", existing_type=sa.String(length=36), nullable=True, comment="null: it concerns several"
        )
        jobs.add_column(sa.Column("arguments", sa.JSON(), nullable=False, server_default="{}"))
        jobs.add_column(
            sa.Column("cancelled", Moment(), nullable=True, comment="when somebody asked for it to be given up")
        )
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
                    comment="characters of their values",
                )
            )
        with op.batch_alter_table(table) as altered:
            altered.alter_column("size", existing_type=sa.BigInteger(), existing_nullable=False, server_default=None)
