"""Values of tags, locks, the queue, and a clock that does not jump."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0011"
down_revision = "0010"


def upgrade():
    op.add_column(
        "tags",
        sa.Column("value", sa.JSON(none_as_null=True), nullable=True, comment="null: it tells no more than its moment"),
    )
    op.create_table(
        "clock",
        sa.Column("boot", sa.String(length=64), nullable=False, comment="which run of the machine it counts in"),
        sa.Column("since", sa.Float(), nullable=False, comment="seconds since the machine started, when it said `at`"),
        sa.Column("at", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("boot", name=op.f("pk_clock")),
        comment="what SQLite, which has no clock of its own, goes by; one row at most",
    )
    op.create_table(
        "locks",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=True, comment="what its holder shows; null: it is free"),
        sa.Column("fence", sa.BigInteger(), nullable=False, comment="rises with every holder"),
        sa.Column("taken", Moment(), nullable=False),
        sa.Column("expires", Moment(), nullable=False, comment="by the database's clock"),
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
            comment="the last id given out; whoever adds an item holds the row",
        ),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_queue_heads_dataset_id")),
        sa.PrimaryKeyConstraint("dataset_id", name=op.f("pk_queue_heads")),
    )
    op.create_table(
        "queue_leases",
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("owner", sa.String(length=36), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False, comment="rises with every holder"),
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
            comment="rises within a dataset in the order of commits, whatever clocks say",
        ),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False, comment="who sent it"),
        sa.Column(
            "recipient", sa.String(length=64), nullable=True, comment="who is to take it; null: the worker does it"
        ),
        sa.Column("shared", sa.Boolean(), nullable=False, comment="whether all who may read the dataset may read it"),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("resource", sa.String(length=16), nullable=False),
        sa.Column("origin", sa.String(length=128), nullable=True),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("request", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False, comment="pending, done or dead"),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("finished", Moment(), nullable=True),
        sa.Column("not_before", Moment(), nullable=True, comment="when it may be tried again, if not at once"),
        sa.Column(
            "token", sa.String(length=64), nullable=True, comment="what its recipient shows; null: it was not taken"
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
