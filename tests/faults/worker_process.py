"""A worker in its own process, which prints every step it reaches and kills itself or waits at one of them.

    python -m tests.faults.worker_process ["statements committed" KILL|WAIT]

Settings come from the environment, as for `tarn worker`. Each step is a line on stdout. A process that
waits continues when its stdin ends.
"""

import signal
import sys

from tarn import logs
from tarn.main import _opened
from tarn.model.ids import new_id
from tarn.settings import load_settings
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.faults.steps import step_reporter


def main(step: str | None = None, fault: str = "KILL") -> None:
    settings = load_settings()
    logs.configure(settings)
    with _opened(settings) as (database, store):
        reached = step_reporter(step, fault)
        flusher = SparkFlusher(settings, database, store, new_id(), reached)
        worker = Worker(settings, database, store, flusher, flusher.maintenance())
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        reached("started")
        worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
