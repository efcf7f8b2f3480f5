"""The maximum number of connections to PostgreSQL in docs/postgresql.md, computed from the limits in the code."""

from tarn.journal.bulk import CONNECTIONS
from tarn.pipeline.tasks.crawl_files import POOL

MIGRATION = 1

LISTENER = 1
"""The connection of an API or a worker that listens for notifications."""


def max_api_connections(pool: int) -> int:
    """Return the limit of an API: SQLAlchemy's pool, its overflow of the same size, the listener, and the bulk path."""
    return 2 * pool + LISTENER + CONNECTIONS


def max_worker_connections(pool: int, tasks: int) -> int:
    """Return the limit of a worker: its pool with overflow, the listener, and for each Spark task that of a crawl, the
    largest.
    """
    return 2 * pool + LISTENER + 2 * POOL * tasks


def max_connections(pool: int, apis: int, workers: int, tasks: int) -> int:
    """Return the limit of all processes, with one migration."""
    return apis * max_api_connections(pool) + workers * max_worker_connections(pool, tasks) + MIGRATION
