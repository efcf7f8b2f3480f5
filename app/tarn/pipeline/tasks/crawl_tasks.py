"""Tasks of crawls, and what comes of them. Light to import: what does them is not."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tarn.model.names import DatasetName, Origin

if TYPE_CHECKING:
    from tarn.archive.fetch import Fetcher
    from tarn.archive.sources import ListedFile
    from tarn.model.job import Existing
    from tarn.model.names import TenantName
    from tarn.model.omissions import Omissions
    from tarn.settings import Settings


@dataclass(frozen=True, slots=True)
class FetchFiles:
    """Files that are to be fetched into an archive."""

    number: int
    dataset: DatasetName
    dataset_id: str
    tenant: "TenantName"
    job: str
    origin: Origin
    existing: "Existing"
    files: "tuple[ListedFile, ...]" = field(repr=False)
    fetcher: "Fetcher" = field(repr=False)
    settings: "Settings" = field(repr=False)


class FailedFile(NamedTuple):
    """A file that could not be taken, and why."""

    path: str
    reason: str


class FetchedFiles(NamedTuple):
    """What came of a task."""

    files: int
    size: int
    skipped: int
    missed: "list[FailedFile]"
    left: "tuple[ListedFile, ...]"
    """What there was no time for."""
    omitted: "Omissions"
    """Values that were left out of the Documents and Folders of the files."""
