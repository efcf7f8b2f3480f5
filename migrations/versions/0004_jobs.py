"""Jobs that are tried again: when, and since when they are left in peace."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0004"
down_revision = "0003"


def upgrade():
    op.add_column(
        "jobs",
        sa.Column("not_before", Moment(), nullable=True, comment="when a queued job may be taken, if not at once"),
    )
    op.add_column(
        "jobs",
        sa.Column(
            "disturbed",
            Moment(),
            nullable=True,
            comment="when an attempt last broke off: what it sent may still be under way",
        ),
    )
    # Deletes that failed were never tried again, and kept the names of their datasets.
    op.execute(
        "UPDATE jobs SET state = 'queued', finished = NULL, worker = NULL, heartbeat = NULL, attempts = 0 "
        "WHERE operation = 'delete' AND state = 'failed'"
    )
