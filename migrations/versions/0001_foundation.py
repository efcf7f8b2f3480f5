"""Tenants, keys, grants, audit; datasets; jobs and workers."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0001"
down_revision = None


def upgrade():
    op.create_table(
        "audit",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("at", Moment(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=True),
        sa.Column("key", sa.String(length=36), nullable=True),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("request", sa.String(length=128), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_tenant_id", "audit", ["tenant", "id"], unique=False)
    op.create_table(
        "datasets",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False, comment="active, deleting or deleted"),
        sa.Column("created", Moment(), nullable=False),
        sa.Column(
            "revision",
            sa.Integer(),
            nullable=False,
            comment="number of changes of the configuration, which are serialized by locking this row",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
    )
    op.create_index(
        "uq_datasets_name",
        "datasets",
        ["name"],
        unique=True,
        sqlite_where=sa.text("state <> 'deleted'"),
        postgresql_where=sa.text("state <> 'deleted'"),
    )
    op.create_table(
        "lake",
        sa.Column(
            "id",
            sa.String(length=36),
            nullable=False,
            comment="the id in lake.json, because a database serves one lake",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lake")),
    )
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column(
            "deleted",
            Moment(),
            nullable=True,
            comment="names are not reused, because old tags and queue items have them",
        ),
        sa.Column("rate_limit", sa.Float(), nullable=True),
        sa.Column("rate_burst", sa.Integer(), nullable=True),
        sa.Column("quota_statements", sa.BigInteger(), nullable=True),
        sa.Column("quota_bytes", sa.BigInteger(), nullable=True),
        sa.Column("used_statements", sa.BigInteger(), nullable=False),
        sa.Column("used_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started", Moment(), nullable=False),
        sa.Column("seen", Moment(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False, comment="SHA-256 of the key, which is not stored"),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("expires", Moment(), nullable=True),
        sa.Column("revoked", Moment(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name=op.f("fk_api_keys_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_tenant"), "api_keys", ["tenant"], unique=False)
    op.create_table(
        "grants",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column(
            "dataset",
            sa.String(length=128),
            nullable=False,
            comment="a name or a pattern, in which * matches any characters",
        ),
        sa.Column("level", sa.String(length=16), nullable=False),
        sa.Column("created", Moment(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name=op.f("fk_grants_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_grants")),
        sa.UniqueConstraint("tenant", "dataset", "level", name=op.f("uq_grants_tenant_dataset_level")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("operation", sa.String(length=32), nullable=False),
        sa.Column("dataset_id", sa.String(length=36), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("request", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False, comment="queued, running, done or failed"),
        sa.Column("created", Moment(), nullable=False),
        sa.Column("started", Moment(), nullable=True),
        sa.Column("finished", Moment(), nullable=True),
        sa.Column("worker", sa.String(length=36), nullable=True),
        sa.Column("heartbeat", Moment(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_jobs_dataset_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_state_id", "jobs", ["state", "id"], unique=False)
    op.create_index("ix_jobs_tenant_id", "jobs", ["tenant", "id"], unique=False)
