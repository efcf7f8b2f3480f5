"""Alembic's entry: runs in the transaction of `tarn.db.migrate`, and nowhere else."""

from alembic import context
from tarn.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
context.run_migrations()
