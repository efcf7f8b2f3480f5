"""Maintenance jobs of a worker: which class runs which operation.

A lease owner may acquire the same lease twice. So every thread that runs jobs has lease owners of its own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import local
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.errors import Unavailable
from tarn.integrity.vacuum import Vacuum
from tarn.integrity.verify import verify
from tarn.lake.commit import SnapshotPublisher, StepCallback
from tarn.model.ids import new_id
from tarn.model.names import TenantName
from tarn.model.work.job import (
    CompactOptions,
    CrawlOptions,
    ExportOptions,
    Job,
    MakeOptions,
    MappingOptions,
    Operation,
    OptimizeOptions,
    PurgeOptions,
    Report,
    RevertOptions,
    VacuumOptions,
    VerifyOptions,
)
from tarn.pipeline.jobs.compact import Compact
from tarn.pipeline.jobs.crawl import Crawl
from tarn.pipeline.jobs.export import Exports
from tarn.pipeline.jobs.flush import Flush, TaskRunner
from tarn.pipeline.jobs.mapping import Mappings
from tarn.pipeline.jobs.optimize import Optimize
from tarn.pipeline.jobs.purge import Purge
from tarn.pipeline.jobs.revert import Revert
from tarn.pipeline.jobs.rewrite import Rewriter
from tarn.query.engine.active_reads import ActiveReads
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry

Options = TypeVar("Options", bound=BaseModel)


class Maintenance:
    """Runs maintenance jobs, with separate lease owners for each thread."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        store: Store,
        task_runner: Callable[[], TaskRunner],
        reached: StepCallback,
        translated_errors: Callable[[], AbstractContextManager[None]],
        running: ActiveReads,
        watch: Telemetry,
    ) -> None:
        self._settings = settings
        self._database = database
        self._store = store
        self._task_runner = task_runner
        self._reached = reached
        self._translated_errors = translated_errors
        self._running = running
        self._watch = watch
        self._local = local()

    def _jobs(self) -> dict[Operation, Callable[[Job, Dataset, Report], BaseModel]]:
        """Return the job runners of this thread."""
        if not hasattr(self._local, "jobs"):
            self._local.jobs = self._build_jobs()
        jobs: dict[Operation, Callable[[Job, Dataset, Report], BaseModel]] = self._local.jobs
        return jobs

    def _build_jobs(self) -> dict[Operation, Callable[[Job, Dataset, Report], BaseModel]]:
        settings, database, store = self._settings, self._database, self._store
        task_runner, reached, watch = self._task_runner, self._reached, self._watch
        publisher = SnapshotPublisher(database, store, settings, new_id(), reached, watch)
        rewriting = Rewriter(database, store, publisher, task_runner, reached)
        vacuum = Vacuum(database, store, settings, publisher, reached)
        flush = Flush(database, store, publisher, task_runner, reached, watch)
        exports = Exports(settings, database, store, flush, task_runner, self._running, reached)
        crawl = Crawl(settings, database, store, task_runner, reached)
        mappings = Mappings(settings, database, store, task_runner, reached)
        return {
            Operation.COMPACT: _typed(CompactOptions, Compact(rewriting).run),
            Operation.OPTIMIZE: _typed(OptimizeOptions, Optimize(rewriting).run),
            Operation.VACUUM: _typed(VacuumOptions, vacuum.run),
            Operation.VERIFY: _typed(VerifyOptions, partial(verify, database, store, settings, new_id())),
            Operation.PURGE: _typed(PurgeOptions, Purge(database, rewriting, flush, vacuum).run),
            Operation.REVERT: _typed(RevertOptions, Revert(database, rewriting, flush).run),
            Operation.EXPORT: _typed(ExportOptions, exports.export),
            Operation.MAKE: _typed(MakeOptions, exports.make),
            Operation.CRAWL: lambda job, dataset, report: crawl.run(
                dataset, _read(CrawlOptions, job), report, TenantName(job.tenant), job.id
            ),
            Operation.MAPPING: lambda job, dataset, report: mappings.run(
                job, dataset, _read(MappingOptions, job), report
            ),
        }

    @property
    def operations(self) -> set[Operation]:
        return set(self._jobs())

    def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Run a job and return its result. Raises what `report` raises, DatasetNotFound, and any error of the job
        itself."""
        assert job.dataset is not None
        assert job.dataset_id is not None
        with self._translated_errors():
            result = self._jobs()[job.operation](job, Dataset(job.dataset_id, job.dataset), report)
        return result.model_dump(mode="json")


def _typed(options: type[Any], run: Callable[[Dataset, Any, Report], BaseModel]) -> Callable[..., BaseModel]:
    return lambda job, dataset, report: run(dataset, _read(options, job), report)


def _read(options: type[Options], job: Job) -> Options:
    """Parse a job's options. Raises Unavailable for options that only a newer version knows: a newer worker will run
    the job."""
    try:
        return options.model_validate(job.arguments)
    except ValidationError as error:
        first = ".".join(map(str, error.errors(include_url=False, include_input=False)[0]["loc"]))
        raise Unavailable(f"this worker does not support the job's option {first!r}", retry_after=5) from None
