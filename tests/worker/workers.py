"""Workers in this process, and functions that change the times of their jobs instead of waiting."""

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import update
from tarn.db.tables import jobs
from tarn.model.datasets.flush import Flusher
from tarn.model.ids import now
from tarn.model.work.job import Maintainer
from tarn.worker.loop import Worker
from tarn.worker.queue_consumer import QueueConsumer

from tests.in_process_api import InProcessApi


def make_worker(
    api: InProcessApi,
    flusher: Flusher | None = None,
    maintainer: Maintainer | None = None,
    consumer: QueueConsumer | None = None,
    **changes: Any,
) -> Worker:
    settings = api.services.settings.model_copy(update={"worker_poll": 0.01, "worker_heartbeat": 0.01, **changes})
    return Worker(settings, api.services.database, api.services.store, flusher, maintainer, consumer)


@contextmanager
def working(worker: Worker):
    """Run a worker concurrently with the block, and stop it at the end."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(20)
    assert not thread.is_alive()


@contextmanager
def flushing(worker: Worker):
    """Run a round of flushes concurrently with the block, and wait for it at the end."""
    thread = threading.Thread(target=worker.flush)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


@contextmanager
def stepping(worker: Worker):
    """Run one step of a worker concurrently with the block, and wait for it at the end."""
    thread = threading.Thread(target=worker.step)
    thread.start()
    yield
    thread.join()


def expire_heartbeats(api: InProcessApi) -> None:
    """Move the last heartbeat of every job an hour into the past."""
    _set(api, heartbeat=now() - timedelta(hours=1))


def make_retries_due(api: InProcessApi) -> None:
    """Make every waiting job due."""
    _set(api, not_before=None, disturbed=now() - timedelta(hours=1))


def _set(api: InProcessApi, **values: Any) -> None:
    with api.services.database.write() as connection:
        connection.execute(update(jobs).values(**values))
