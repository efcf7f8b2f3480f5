"""Upgrades: supported versions, formats that processes can read; autovacuum settings of the journal."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
compatible_from = "0012"

# docs/postgresql.md has the reasons. Other settings keep the server's defaults.
STORAGE = {
    # Millions of rows are inserted and deleted, and none is updated: the number of dead rows matters, not their share.
    "journal": {
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 100_000,
        "autovacuum_vacuum_insert_scale_factor": 0,
        "autovacuum_vacuum_insert_threshold": 1_000_000,
        "autovacuum_analyze_scale_factor": 0,
        "autovacuum_analyze_threshold": 1_000_000,
        "autovacuum_vacuum_cost_delay": 0,
    },
    # The same number of events in fewer, larger rows.
    "journal_packs": {"autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 500},
    "journal_batches": {
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 1_000,
        "autovacuum_analyze_scale_factor": 0,
        "autovacuum_analyze_threshold": 10_000,
    },
    # Few rows, each updated with every write: with free space in its page, an update stays there and prunes the page.
    **{
        table: {"fillfactor": 20, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000}
        for table in ("journal_head", "event_heads", "queue_heads", "snapshot_heads", "readers", "workers")
    },
}


def upgrade():
    table = op.create_table(
        "compatibility",
        sa.Column(
            "oldest",
            sa.String(length=32),
            nullable=False,
            comment="the oldest revision whose code this database supports; one row",
        ),
        sa.PrimaryKeyConstraint("oldest", name=op.f("pk_compatibility")),
    )
    op.bulk_insert(table, [{"oldest": compatible_from}])
    op.add_column(
        "readers",
        sa.Column(
            "speaks", sa.JSON(), nullable=True, comment="data formats that it reads; null: those of the first version"
        ),
    )
    if op.get_bind().dialect.name == "postgresql":
        for name, settings in STORAGE.items():
            said = ", ".join(f"{key} = {value}" for key, value in settings.items())
            op.execute(f"ALTER TABLE {name} SET ({said})")
