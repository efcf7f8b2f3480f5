"""Crawl task: fetch files into the archive.

Cheap to import: the code that does the work (`crawl_files`) imports SQLAlchemy and FtM, which executors that only flush
are spared.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tarn.model.names import Origin
from tarn.pipeline.tasks.task import Task, TaskContext

if TYPE_CHECKING:
    from tarn.archive.fetching.fetch import Fetcher
    from tarn.archive.fetching.sources import ListedFile
    from tarn.model.ftm.omissions import Omissions
    from tarn.model.names import TenantName
    from tarn.model.work.job import Existing
    from tarn.settings import Settings


class FailedFile(NamedTuple):
    """A file that could not be fetched or stored, and why."""

    path: str
    reason: str


class FetchedFiles(NamedTuple):
    """Result of a task: how many files were stored, and which were not."""

    files: int
    size: int
    skipped: int
    failed: list[FailedFile]
    left: "tuple[ListedFile, ...]"
    """Files that the task had no time left for."""
    omitted: "Omissions"
    """Values that were left out of the files' Document and Folder entities."""


@dataclass(frozen=True, slots=True)
class FetchFiles(Task[FetchedFiles]):
    """Fetch files into the archive of a dataset."""

    dataset_id: str
    tenant: "TenantName"
    job: str
    origin: Origin
    existing: "Existing"
    files: "tuple[ListedFile, ...]" = field(repr=False)
    fetcher: "Fetcher" = field(repr=False)
    settings: "Settings" = field(repr=False)

    def run(self, context: TaskContext) -> Callable[[], FetchedFiles]:
        from tarn.pipeline.tasks.crawl_files import fetch_files

        fetched = fetch_files(self, context.store)
        return lambda: fetched
