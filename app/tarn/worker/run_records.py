"""Run records: the result of each finished job, stored in the dataset's folder for people and offline tools."""

from tarn.datasets import registry
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.model.work.job import Job
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store


def record_run(database: Database, store: Store, job_id: str) -> None:
    """Write the record of a finished job into its dataset's runs folder. Does nothing if the dataset is deleted.

    The dataset may be deleted concurrently, and its name be reused. So its existence is checked again after the put:
    either the dataset still exists, and its deletion will find the file, or the file is deleted here.
    """
    with database.read() as connection:
        job = jobs.get(connection, job_id)
    if job.dataset is None or job.finished is None or not job.state.over or not _exists(database, job):
        return
    path = DatasetLayout(job.dataset).run(job.operation, job.finished)
    store.put(path, f"{job.model_dump_json(indent=2)}\n".encode())
    if not _exists(database, job):
        store.delete([path])


def _exists(database: Database, job: Job) -> bool:
    assert job.dataset is not None
    with database.read() as connection:
        dataset = registry.find(connection, job.dataset)
    return dataset is not None and dataset.id == job.dataset_id
