"""Mappings: the last run of each."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0010"
down_revision = "0009"


def upgrade():
    op.create_table(
        "mapping_runs",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("content_hash", sa.String(length=64), nullable=False),
        sa.Column(
            "job", sa.String(length=36), nullable=False, comment="the job that ran it, so that no job runs it twice"
        ),
        sa.Column(
            "mapping", sa.String(length=64), nullable=False, comment="the mapping's entity tag at the time of the run"
        ),
        sa.Column("form", sa.JSON(), nullable=False, comment="options with which the file was read"),
        sa.Column("processed", Moment(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_mapping_runs_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "content_hash", name=op.f("pk_mapping_runs")),
        comment="the last committed run of each mapping",
    )
