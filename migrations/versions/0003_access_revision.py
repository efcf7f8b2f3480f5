"""The access revision, which changes with every change of access rights."""

import sqlalchemy as sa
from alembic import op
from tarn.model.ids import new_id

revision = "0003"
down_revision = "0002"


def upgrade():
    table = op.create_table(
        "access_revision",
        sa.Column(
            "revision",
            sa.String(length=36),
            nullable=False,
            comment="one row; a new random value with every change of access rights",
        ),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_access_revision")),
    )
    op.bulk_insert(table, [{"revision": new_id()}])
