"""Flusher on Spark: which datasets are due, crash recovery, and flushing with restart of a dead Spark session."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

import structlog
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException
from sqlalchemy import Select, func, or_, select

from tarn.datasets.registry import ACTIVE, Dataset
from tarn.db.database_clock import database_time
from tarn.db.engine import Database
from tarn.db.tables import datasets, journal_batches, journal_head, leases
from tarn.errors import Internal, TarnError, Unavailable
from tarn.journal.batches import COMMITTED
from tarn.lake.commit import SnapshotPublisher, StepCallback
from tarn.lake.leases import DATASET_LEASE
from tarn.model.datasets.flush import FlushOutcome, FlushProgress
from tarn.model.ftm.schema_buckets import buckets
from tarn.model.ids import now
from tarn.model.names import DatasetName
from tarn.model.work.round_robin import round_robin
from tarn.pipeline.executor_timeout import NoExecutor
from tarn.pipeline.jobs.flush import Flush, TaskRunner
from tarn.pipeline.session import Sessions
from tarn.pipeline.spark_runner import SparkTaskRunner
from tarn.pipeline.tasks.journal_slice import Journal
from tarn.pipeline.tasks.kernel import Kernel
from tarn.query.engine.active_reads import ActiveReads
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry
from tarn.worker.maintenance import Maintenance

log = structlog.get_logger(__name__)


class SparkFlusher:
    """Flushes datasets on Spark. Its leases belong to one owner, the worker."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        owner: str,
        reached: StepCallback = lambda _: None,
        kernels: Callable[[], TaskRunner] | None = None,
        watch: Telemetry | None = None,
    ) -> None:
        self._watch = watch or Telemetry()
        self._settings = settings
        self._database = database
        self._store = store
        self._publisher = SnapshotPublisher(database, store, settings, owner, reached, self._watch)
        self._sessions = Sessions(settings)
        self._kernel = Kernel(Journal.at(settings.database_url), store.connection, buckets(), settings.kernel_memory)
        self._reached = reached
        self.running = ActiveReads()
        """Snapshots that exports are reading; vacuum must not delete their files."""
        self._kernels = kernels or self._on_spark
        self._flush = Flush(database, store, self._publisher, self._kernels, reached, self._watch)

    def due(self) -> list[str]:
        """Return the datasets whose journal exceeds the limit of rows, bytes or age. They are ordered round-robin by
        the tenant of the oldest committed batch."""
        settings = self._settings
        waiting = journal_head.c.oldest < now() - timedelta(seconds=settings.flush_age)
        full = or_(journal_head.c.rows >= settings.flush_rows, journal_head.c.size >= settings.flush_bytes, waiting)
        committed = journal_batches.c.dataset_id == journal_head.c.dataset_id, journal_batches.c.state == COMMITTED
        first = select(journal_batches.c.tenant).where(*committed).order_by(journal_batches.c.commit).limit(1)
        with self._database.read() as connection:
            rows = connection.execute(
                select(first.scalar_subquery().label("tenant"), journal_head.c.dataset_id)
                .join(datasets, datasets.c.id == journal_head.c.dataset_id)
                .where(datasets.c.state == ACTIVE, journal_head.c.rows > 0, full)
                .order_by(journal_head.c.oldest)
            )
            return round_robin((row.tenant, row.dataset_id) for row in rows)

    def seconds_until_due(self) -> float:
        with self._database.read() as connection:
            oldest: datetime | None = connection.execute(
                select(func.min(journal_head.c.oldest))
                .join(datasets, datasets.c.id == journal_head.c.dataset_id)
                .where(datasets.c.state == ACTIVE, journal_head.c.rows > 0)
            ).scalar()
        if oldest is None:
            return math.inf
        return (oldest - now()).total_seconds() + self._settings.flush_age

    def recover(self) -> None:
        """Finish the commits of dead workers: of datasets whose lease expired without being released."""
        with self._database.read() as connection:
            rows = connection.execute(
                _active_datasets()
                .join(leases, leases.c.dataset_id == datasets.c.id)
                .where(DATASET_LEASE.is_abandoned(database_time(connection)))
            ).all()
        for row in rows:
            try:
                self._publisher.recover(Dataset(row.id, DatasetName(row.name)))
            except TarnError as error:
                log.warning("a dataset could not be recovered yet", dataset=row.name, problem=error.slug)

    def flush(
        self, dataset_ids: Sequence[str], hold: Callable[[], None], moved: FlushProgress = lambda *_: None
    ) -> Mapping[str, FlushOutcome]:
        """Flush these datasets, in one Spark job per round. Deleted datasets are ignored.

        Raises Unavailable if Spark cannot be reached, and Internal if its job failed.
        """
        with self._database.read() as connection:
            rows = connection.execute(_active_datasets().where(datasets.c.id.in_(dataset_ids))).all()
        requested = [Dataset(row.id, DatasetName(row.name)) for row in rows]
        with self._watch.timed(self._watch.rounds, "flush", datasets=len(requested)), self.translated_errors():
            return self._flush.run(requested, hold, moved)

    def tidy(self) -> None:
        self._flush.tidy()

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translate errors of Spark into errors of Tarn. A broken session is ended, so that the next use starts a new
        one."""
        self._sessions.begin()
        try:
            yield
        except NoExecutor as error:
            # A restarted master does not know this driver, and gives it no executors until it registers again.
            self._sessions.discard()
            raise Unavailable(str(error), retry_after=5) from error
        except (Py4JJavaError, PySparkException) as error:
            if self._sessions.is_stale():
                raise Unavailable("Spark was started again meanwhile", retry_after=5) from error
            raise Internal("the Spark job failed; see the worker's log for the cause") from error
        except (Py4JNetworkError, Py4JError, ConnectionError, EOFError) as error:
            self._sessions.discard()
            raise Unavailable("Spark does not answer", retry_after=5) from error
        except (AttributeError, AssertionError, TypeError) as error:
            # PySpark raises these in one thread while another thread ends the session.
            if not self._sessions.is_stale():
                raise
            raise Unavailable("Spark was started again meanwhile", retry_after=5) from error

    def warm_up(self) -> None:
        """Start Spark and its Python processes, so that the first job does not have to.

        Only where they are not taken from other users of a cluster.
        """
        if not self._settings.spark_master.startswith("local"):
            return
        with self.translated_errors():
            self._on_spark().warm_up()

    def maintenance(self) -> Maintenance:
        """Return the maintenance jobs, which share this Spark session. They use lease owners of their own, as they run
        concurrently with flushes and must not take over their leases."""
        return Maintenance(
            self._settings,
            self._database,
            self._store,
            self._kernels,
            self._reached,
            self.translated_errors,
            self.running,
            self._watch,
        )

    def cancel(self) -> None:
        """Cancel all running Spark jobs."""
        self._sessions.cancel()

    def close(self) -> None:
        self._sessions.close()

    def _on_spark(self) -> SparkTaskRunner:
        return SparkTaskRunner(self._sessions.current(), self._kernel, self._settings.executor_timeout)


def _active_datasets() -> Select[tuple[str, str]]:
    return select(datasets.c.id, datasets.c.name).where(datasets.c.state == ACTIVE)
