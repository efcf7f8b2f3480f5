"""Packs: many events of a journal's batch in one row."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
compatible_from = "0012"


def upgrade():
    op.create_table(
        "journal_packs",
        sa.Column("batch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False, comment="of its first event"),
        sa.Column("rows", sa.Integer(), nullable=False, comment="events in it, whose positions follow on each other"),
        sa.Column("low", sa.Integer(), nullable=False, comment="the least shard key of its events"),
        sa.Column("high", sa.Integer(), nullable=False, comment="the greatest"),
        sa.Column("has_canonical", sa.Boolean(), nullable=False, comment="some name a canonical id, of whatever shard"),
        sa.Column("checksum", sa.BigInteger(), nullable=False, comment="CRC-32 of the data"),
        sa.Column("data", sa.LargeBinary(), nullable=False, comment="the events: Arrow, see app/journal/packs.py"),
        sa.PrimaryKeyConstraint("batch", "position", name=op.f("pk_journal_packs")),
        comment="many events of a batch in one row, beside those in `journal`",
    )
    if op.get_bind().dialect.name == "postgresql":
        # What is compressed already is not to be compressed again.
        op.execute("ALTER TABLE journal_packs ALTER COLUMN data SET STORAGE EXTERNAL")
