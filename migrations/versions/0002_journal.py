"""The journal: heads, batches, events; tags and idempotency keys."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0002"
down_revision = "0001"


def upgrade():
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_created"), "idempotency", ["created"], unique=False)
    op.create_table(
        "journal",
        sa.Column("batch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.SmallInteger(), nullable=False, comment="1 add, 2 delete, 3 erase"),
        sa.Column("shard_key", sa.Integer(), nullable=True, comment="null: the event concerns every entity"),
        sa.Column("id", sa.LargeBinary(), nullable=True, comment="the statement's SHA-1, twenty bytes"),
        sa.Column("entity_id", sa.Text(), nullable=True),
        sa.Column("canonical_id", sa.Text(), nullable=True, comment="null: the same as the entity id"),
        sa.Column("schema", sa.Text(), nullable=True),
        sa.Column("prop", sa.Text(), nullable=True),
        sa.Column("value", sa.Text(), nullable=True),
        sa.Column("lang", sa.Text(), nullable=True),
        sa.Column("original_value", sa.Text(), nullable=True),
        sa.Column("external", sa.Boolean(), nullable=True),
        sa.Column("origin", sa.Text(), nullable=True, comment="null in a delete or erase: every origin"),
        sa.Column("first_seen", sa.BigInteger(), nullable=True, comment="microseconds since 1970"),
        sa.Column("last_seen", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("batch", "position", name=op.f("pk_journal")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "journal_batches",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), sa.Identity(always=False), nullable=False
        ),
        sa.Column("uid", sa.String(length=36), nullable=False),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("origin", sa.String(length=128), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False, comment="open, staged, committed, aborted or done"),
        sa.Column(
            "is_stage", sa.Boolean(), nullable=False, comment="a stage has no rows, only batches that refer to it"
        ),
        sa.Column(
            "stage",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            nullable=True,
            comment="the stage that the batch belongs to",
        ),
        sa.Column("segment", sa.BigInteger(), nullable=True),
        sa.Column("commit", sa.BigInteger(), nullable=True),
        sa.Column("entities", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False, comment="statements reserved from the tenant's quota"),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_journal_batches_dataset_id")),
        sa.ForeignKeyConstraint(["stage"], ["journal_batches.id"], name=op.f("fk_journal_batches_stage")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_journal_batches")),
        sa.UniqueConstraint("uid", name=op.f("uq_journal_batches_uid")),
    )
    op.create_index(
        "ix_journal_batches_dataset_id_state_segment",
        "journal_batches",
        ["dataset_id", "state", "segment"],
        unique=False,
    )
    op.create_index(op.f("ix_journal_batches_stage"), "journal_batches", ["stage"], unique=False)
    op.create_index("ix_journal_batches_state_expires", "journal_batches", ["state", "expires"], unique=False)
    op.create_table(
        "journal_head",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("commit", sa.BigInteger(), nullable=False, comment="the last commit number that was assigned"),
        sa.Column("segment", sa.BigInteger(), nullable=False, comment="the open segment"),
        sa.Column("rows", sa.BigInteger(), nullable=False, comment="committed rows that are not in a snapshot"),
        sa.Column("oldest", Moment(), nullable=True, comment="when the oldest of these rows was committed"),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_journal_head_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_journal_head")),
    )
    op.create_table(
        "tags",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_tags_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "tenant", "key", name=op.f("pk_tags")),
    )
    op.execute('INSERT INTO journal_head (dataset_id, "commit", segment, rows) SELECT id, 0, 1, 0 FROM datasets')
