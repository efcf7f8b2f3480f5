"""Events: the outbox, and the webhooks that events are delivered to."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0012"
down_revision = "0011"


def upgrade():
    op.add_column(
        "jobs", sa.Column("told", Moment(), nullable=True, comment="when the last progress event was recorded")
    )
    op.create_table(
        "event_heads",
        sa.Column(
            "stream",
            sa.String(length=36),
            nullable=False,
            comment="a dataset's id; for a job on several datasets, the job's",
        ),
        sa.Column("last", sa.BigInteger(), nullable=False, comment="the last number that was assigned"),
        sa.Column("tail", sa.BigInteger(), nullable=False, comment="events up to this number are deleted"),
        sa.PrimaryKeyConstraint("stream", name=op.f("pk_event_heads")),
    )
    op.create_table(
        "events",
        sa.Column("stream", sa.String(length=36), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.Column("job", sa.String(length=36), nullable=True, comment="the job that it is about"),
        sa.Column(
            "audience",
            sa.JSON(),
            nullable=True,
            comment="tenants that may see it; null: all that may read the dataset",
        ),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "number", name=op.f("pk_events")),
        comment="the outbox: each event is written in the transaction of the change that it reports",
    )
    op.create_index(op.f("ix_events_at"), "events", ["at"])
    op.create_index("ix_events_job_number", "events", ["job", "number"])
    op.create_table(
        "webhooks",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False, comment="in plain text: deliveries are signed with it"),
        sa.Column("kinds", sa.JSON(), nullable=False, comment="an empty list means every kind"),
        sa.Column("datasets", sa.JSON(), nullable=False, comment="patterns of dataset names"),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("updated", Moment(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False, comment="active, failing or given_up"),
        sa.Column("attempts", sa.Integer(), nullable=False, comment="failed attempts to deliver the next event"),
        sa.Column("problem", sa.Text(), nullable=True, comment="why the last attempt failed"),
        sa.Column("next_try", Moment(), nullable=True, comment="earliest time for the next attempt; null: at once"),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False, comment="failed attempts since the webhook was created"),
        sa.Column("last_delivered", Moment(), nullable=True),
        sa.Column("worker", sa.String(length=36), nullable=True, comment="the worker that holds the lease"),
        sa.Column("leased_until", Moment(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name=op.f("fk_webhooks_tenant")),
        sa.PrimaryKeyConstraint("tenant", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "webhook_cursors",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("stream", sa.String(length=36), nullable=False),
        sa.Column(
            "number",
            sa.BigInteger(),
            nullable=False,
            comment="the last event that was delivered or skipped",
        ),
        sa.ForeignKeyConstraint(["tenant"], ["webhooks.tenant"], name=op.f("fk_webhook_cursors_tenant")),
        sa.PrimaryKeyConstraint("tenant", "stream", name=op.f("pk_webhook_cursors")),
    )
