"""What API processes read, for whoever deletes files; and which tenant was served when."""

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
        sa.Column("beat", sa.BigInteger(), nullable=False, comment="counts its reports"),
        sa.Column(
            "oldest",
            sa.JSON(),
            nullable=False,
            comment="by dataset, the oldest snapshot that it reads; 0: nobody knows yet",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_readers")),
    )
    op.create_index("ix_jobs_tenant_started", "jobs", ["tenant", "started"])
