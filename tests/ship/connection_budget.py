"""How many connections to PostgreSQL there may be at once, as docs/postgresql.md has it, from what the code allows."""

from tarn.journal.bulk import CONNECTIONS
from tarn.pipeline.tasks.crawl_files import POOL

MIGRATION = 1


def of_api(pool: int) -> int:
    """SQLAlchemy's pool, as many again when busy, and the bulk path's."""
    return 2 * pool + CONNECTIONS


def of_worker(pool: int, tasks: int) -> int:
    """A task of Spark reads the journal by one connection, or writes a mapping's rows by one, or crawls by a pool."""
    return 2 * pool + 2 * POOL * tasks


def of_all(pool: int, apis: int, workers: int, tasks: int) -> int:
    return apis * of_api(pool) + workers * of_worker(pool, tasks) + MIGRATION
