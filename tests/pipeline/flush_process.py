"""A flush on Spark in a process of its own: `python -m tests.pipeline.flush_process DATABASE_URL LAKE MASTER ID…`.

Prints the outcome as JSON. A process can have one Spark session, so each master needs its own.
"""

import sys

import orjson
from tarn.db.engine import Database
from tarn.pipeline.jobs import flush_plan
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher


def main(database_url: str, lake: str, master: str, *dataset_ids: str) -> None:
    settings = load_settings(database_url=database_url, lake_uri=lake, spark_master=master, spark_memory="1g")
    flush_plan.WORTH_SPLITTING = 100  # so that every executor gets tasks
    database = Database(settings.database_url)
    flusher = SparkFlusher(settings, database, Store(Connection.from_settings(settings)), "another process")
    done = flusher.flush(dataset_ids, lambda: None)
    flusher.close()
    database.close()
    added = {name: [snapshot.rows.added for snapshot in outcome.snapshots] for name, outcome in done.items()}
    sys.stdout.write(orjson.dumps(added).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
