"""Exports of a dataset of a server process, generated without its Spark."""

from concurrent.futures import ProcessPoolExecutor

from tarn.db.engine import Database
from tarn.lake.commit import SnapshotPublisher
from tarn.model.work.job import MakeOptions
from tarn.pipeline.jobs.export import Exports
from tarn.pipeline.jobs.flush import Flush
from tarn.query.engine.active_reads import ActiveReads
from tarn.settings import load_settings
from tarn.storage.connection import Connection
from tarn.storage.store import Store

from tests.lake.manifests import dataset_of
from tests.pipeline.kernels import DirectKernels
from tests.server import Server


def make_exports(server: Server, dataset: str, kernel_process: ProcessPoolExecutor) -> None:
    """Generate all exports in the server's database and lake, so that its worker finds them fresh."""
    data = server.folder / "data"
    settings = load_settings(database_url=f"sqlite:///{data}/tarn.db", lake_uri=str(data / "lake"))
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    try:
        kernels = DirectKernels(settings, kernel_process)
        flush = Flush(database, store, SnapshotPublisher(database, store, settings, "tester"), lambda: kernels)
        exports = Exports(settings, database, store, flush, lambda: kernels, ActiveReads())
        exports.make(dataset_of(database, dataset), MakeOptions(), lambda _: None)
    finally:
        database.close()
