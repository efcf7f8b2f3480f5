"""Workers in this process, and the time that passes for them."""

import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import update
from tarn.db.tables import jobs
from tarn.model.flush import Flusher
from tarn.model.ids import now
from tarn.model.job import Maintainer
from tarn.worker.loop import Worker
from tarn.worker.queue import Consumer

from tests.in_process_api import InProcessApi


def make_worker(
    house: InProcessApi,
    flusher: Flusher | None = None,
    maintainer: Maintainer | None = None,
    consumer: Consumer | None = None,
    **changes: Any,
) -> Worker:
    settings = house.services.settings.model_copy(update={"worker_poll": 0.01, "worker_heartbeat": 0.01, **changes})
    return Worker(settings, house.services.database, house.services.store, flusher, maintainer, consumer)


@contextmanager
def working(worker: Worker):
    """A worker that runs beside what the test does; it has stopped when the block is over."""
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
    """A round of flushing beside what the test does; it is over when the block is."""
    thread = threading.Thread(target=worker.flush)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


@contextmanager
def stepping(worker: Worker):
    """A step of this worker beside what the test does; it is over when the block is."""
    thread = threading.Thread(target=worker.step)
    thread.start()
    yield
    thread.join()


def fall_silent(house: InProcessApi) -> None:
    """An hour without a sign of life of any worker passes."""
    _set(house, heartbeat=now() - timedelta(hours=1))


def let_time_pass(house: InProcessApi) -> None:
    """Every job that waits has waited long enough."""
    _set(house, not_before=None, disturbed=now() - timedelta(hours=1))


def _set(house: InProcessApi, **values: Any) -> None:
    with house.services.database.write() as connection:
        connection.execute(update(jobs).values(**values))
