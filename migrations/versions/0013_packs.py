"""Packs: many events of a batch in one row."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
compatible_from = "0012"


def upgrade():
    op.create_table(
        "journal_packs",
        sa.Column("batch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column(
            "position", sa.BigInteger(), autoincrement=False, nullable=False, comment="position of its first event"
        ),
        sa.Column("rows", sa.Integer(), nullable=False, comment="number of events, which have consecutive positions"),
        sa.Column("low", sa.Integer(), nullable=False, comment="the lowest shard key of its events"),
        sa.Column("high", sa.Integer(), nullable=False, comment="the greatest shard key of its events"),
        sa.Column("has_canonical", sa.Boolean(), nullable=False, comment="whether any event has a canonical id"),
        sa.Column("checksum", sa.BigInteger(), nullable=False, comment="CRC-32 of the data"),
        sa.Column(
            "data",
            sa.LargeBinary(),
            nullable=False,
            comment="the events in Arrow format, see app/tarn/journal/packs.py",
        ),
        sa.PrimaryKeyConstraint("batch", "position", name=op.f("pk_journal_packs")),
        comment="events of batches, many in one row; others are in `journal`",
    )
    if op.get_bind().dialect.name == "postgresql":
        # The data is compressed already.
        op.execute("ALTER TABLE journal_packs ALTER COLUMN data SET STORAGE EXTERNAL")
