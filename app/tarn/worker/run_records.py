"""Records of runs: what a job did, kept beside the dataset's data for people and offline tools."""

from tarn.datasets import registry as datasets
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.model.job import Job
from tarn.storage.layout import DatasetLayout
from tarn.storage.store import Store


def record_run(database: Database, store: Store, job_id: str) -> None:
    """Put a job that is over where its dataset's runs are; a dataset that is deleted gets nothing.

    It may be deleted meanwhile, and its name be taken again. So we look after the put as well: either the dataset is
    still there, and whoever deletes it finds our file, or we take it away ourselves.
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
        found = datasets.find(connection, job.dataset)
    return found is not None and found.id == job.dataset_id
