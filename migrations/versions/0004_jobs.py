"""Jobs that are retried: the earliest time of the next attempt, and when an attempt last ended abnormally."""

import sqlalchemy as sa
from alembic import op
from tarn.db.tables import Moment

revision = "0004"
down_revision = "0003"


def upgrade():
    op.add_column(
        "jobs",
        sa.Column("not_before", Moment(), nullable=True, comment="earliest time for the next attempt; null: at once"),
    )
    op.add_column(
        "jobs",
        sa.Column(
            "disturbed",
            Moment(),
            nullable=True,
            comment="when an attempt last ended abnormally: its requests to the store may still arrive",
        ),
    )
    # Failed deletions were not retried, and the names of their datasets stayed reserved.
    op.execute(
        "UPDATE jobs SET state = 'queued', finished = NULL, worker = NULL, heartbeat = NULL, attempts = 0 "
        "WHERE operation = 'delete' AND state = 'failed'"
    )
