"""A queue worker in its own process, which prints every step it reaches and kills itself or waits at one of them.

    python -m tests.faults.queue_process ["written" KILL|WAIT]

Settings come from the environment, as for `tarn worker`.
"""

import signal
import sys

from tarn import logs
from tarn.main import _opened
from tarn.model.ids import new_id
from tarn.settings import load_settings
from tarn.worker.loop import Worker
from tarn.worker.queue_consumer import QueueConsumer

from tests.faults.steps import step_reporter


def main(step: str | None = None, fault: str = "KILL") -> None:
    settings = load_settings()
    logs.configure(settings)
    with _opened(settings) as (database, store):
        reached = step_reporter(step, fault)
        worker = Worker(settings, database, store, consumer=QueueConsumer(settings, database, store, new_id(), reached))
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        reached("started")
        worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
