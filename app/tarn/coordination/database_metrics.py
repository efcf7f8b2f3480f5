"""Figures for metrics that are in SQL, and so the same for every process."""

from datetime import datetime
from typing import NamedTuple

from tarn.coordination import webhooks
from tarn.db import worker_heartbeats, workload
from tarn.db.engine import Database
from tarn.model.work.workload import Done, Waiting


class DatabaseMetrics(NamedTuple):
    """Figures about jobs, journals, workers, webhooks and exports, read in one transaction."""

    jobs: list[Done]
    journals: list[Waiting]
    last_heartbeat: datetime | None
    webhooks: webhooks.WebhookTotals
    oldest_stale_exports: dict[str, datetime]

    @classmethod
    def read(cls, database: Database) -> "DatabaseMetrics":
        """Read the current figures. Raises Unavailable."""
        with database.read() as connection:
            return cls(
                jobs=workload.done(connection),
                journals=workload.waiting(connection),
                last_heartbeat=worker_heartbeats.last_seen(connection),
                webhooks=webhooks.totals(connection),
                oldest_stale_exports=workload.oldest_stale(connection),
            )
