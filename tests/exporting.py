"""Exports of a dataset of a server process, made without its Spark."""

from concurrent.futures import ProcessPoolExecutor

from app.db.engine import Database
from app.lake.publish import Publisher
from app.model.job import MakeOptions
from app.pipeline.export import Exports
from app.pipeline.flush import Flush
from app.query.running import Running
from app.settings import load_settings
from app.storage.connection import Connection
from app.storage.store import Store
from tests.lake.manifests import dataset_of
from tests.pipeline.kernels import DirectKernels
from tests.server import Server


def make_exports(server: Server, dataset: str, kernel_process: ProcessPoolExecutor) -> None:
    """Make all exports in the server's database and lake: its worker then finds them fresh."""
    data = server.folder / "data"
    settings = load_settings(database_url=f"sqlite:///{data}/tarn.db", lake_uri=str(data / "lake"))
    database, store = Database(settings.database_url), Store(Connection.from_settings(settings))
    try:
        kernels = DirectKernels(settings, kernel_process)
        flush = Flush(database, store, Publisher(database, store, settings, "tester"), lambda: kernels)
        exports = Exports(settings, database, store, flush, lambda: kernels, Running())
        exports.make(dataset_of(database, dataset), MakeOptions(), lambda _: None)
    finally:
        database.close()
