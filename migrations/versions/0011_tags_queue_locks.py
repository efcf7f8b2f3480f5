"""Values of tags, locks, the queue, and the database clock of SQLite."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0011"
down_revision = "0010"


def upgrade():
    op.add_column(
        "tags",
        sa.Column("value", sa.JSON(none_as_null=True), nullable=True, comment="null: the tag has only a timestamp"),
    )
    op.create_table(
        "clock",
        sa.Column(
            "boot",
            sa.String(length=64),
            nullable=False,
            comment="id of the machine's boot in which `since` was counted",
        ),
        sa.Column("since", sa.Float(), nullable=False, comment="seconds since the machine started, at the time `at`"),
        sa.Column("at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("boot", name=op.f("pk_clock")),
        comment="the database clock of SQLite, which has none of its own; at most one row",
    )
    op.create_table(
        "locks",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column(
            "token",
            sa.String(length=64),
            nullable=True,
            comment="secret that proves the lock is held; null: the lock is free",
        ),
        sa.Column("fence", sa.BigInteger(), nullable=False, comment="fencing number, rises with every holder"),
        sa.Column("taken", Moment(), nullable=False),
        sa.Column("expires", Moment(), nullable=False, comment="compared with the database's clock"),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_locks_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", "tenant", "name", name=op.f("pk_locks")),
        sa.UniqueConstraint("id", name=op.f("uq_locks_id")),
    )
    op.create_table(
        "queue_heads",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column(
            "last",
            sa.String(length=36),
            nullable=False,
            comment="the last id that was assigned; a transaction that adds an item locks the row",
        ),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_queue_heads_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_queue_heads")),
    )
    op.create_table(
        "queue_leases",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("owner", sa.String(length=36), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="fencing number, rises with every holder"),
        sa.Column("expires", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_queue_leases_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_queue_leases")),
    )
    op.create_table(
        "queue",
        sa.Column(
            "id",
            sa.String(length=36),
            nullable=False,
            comment="rises within a dataset in the order of commits, independent of clocks",
        ),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False, comment="the tenant that sent it"),
        sa.Column(
            "recipient",
            sa.String(length=64),
            nullable=True,
            comment="the tenant that it is addressed to; null: the worker processes it",
        ),
        sa.Column(
            "shared", sa.Boolean(), nullable=False, comment="whether every tenant that may read the dataset may read it"
        ),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("resource", sa.String(length=16), nullable=False),
        sa.Column("origin", sa.String(length=128), nullable=True),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("request", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False, comment="pending, done or dead"),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("finished", Moment(), nullable=True),
        sa.Column("not_before", Moment(), nullable=True, comment="earliest time for the next attempt; null: at once"),
        sa.Column(
            "token",
            sa.String(length=64),
            nullable=True,
            comment="secret that proves the lease; null: the item was not taken",
        ),
        sa.Column("leased_until", Moment(), nullable=True),
        sa.Column("problem", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_queue_dataset_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_queue")),
    )
    op.create_index("ix_queue_state_recipient_dataset_id_id", "queue", ["state", "recipient", "dataset_id", "id"])
    op.create_index("ix_queue_dataset_id_tenant_id", "queue", ["dataset_id", "tenant", "id"])
    op.create_index("ix_queue_dataset_id_tenant_state", "queue", ["dataset_id", "tenant", "state"])
    op.create_index("ix_queue_dataset_id_recipient_id", "queue", ["dataset_id", "recipient", "id"])
    op.create_index("ix_queue_state_finished", "queue", ["state", "finished"])
