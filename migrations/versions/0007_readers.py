"""Heartbeats of API processes with the snapshots that they read; an index of jobs by tenant and start."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0007"
down_revision = "0006"


def upgrade():
    op.create_table(
        "readers",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("seen", Moment(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False, comment="number of heartbeats"),
        sa.Column(
            "oldest",
            sa.JSON(),
            nullable=False,
            comment="the oldest snapshot that it reads, by dataset; 0: not known yet",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_readers")),
    )
    op.create_index("ix_jobs_tenant_started", "jobs", ["tenant", "started"])
