"""What routes work with: made once in `main`, found by every request."""

from dataclasses import dataclass, field
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, Request

from app.api.event_hub import Hub
from app.api.metrics import Metrics
from app.api.presence import Admission, Present
from app.api.recent import Recent
from app.api.threads import READINESS
from app.archive.fetch import Fetcher
from app.archive.files import Archive
from app.db.engine import Database
from app.journal.parsing import Parsers
from app.journal.writer import Writer
from app.lake.datasets import Dataset
from app.model.entity import Exploder
from app.query.reader import Reader
from app.settings import Settings
from app.storage.store import Store
from app.tenancy.audit import Denials
from app.tenancy.identity import Authenticator
from app.tenancy.limits import Rate
from app.tenancy.revision import Remembered
from app.watch import Watch


@dataclass(frozen=True)
class Services:
    """One process's connections and counters."""

    settings: Settings
    database: Database
    store: Store
    authenticator: Authenticator
    rate: Rate
    denials: Denials
    watch: Watch
    metrics: Metrics
    writer: Writer
    parsers: Parsers
    exploder: Exploder
    """Of the event loop alone; a large body is parsed elsewhere."""
    present: Present
    reader: Reader
    archive: Archive
    fetcher: Fetcher
    hub: Hub
    stopping: Event
    """Set when the server begins to stop: nobody is to be kept waiting any longer."""
    admissions: Remembered[Admission] = field(default_factory=Remembered)
    """By operation, dataset and key: whom it let through."""
    datasets: Remembered[Dataset | None] = field(default_factory=Remembered)
    """By name: those that exist and those that do not."""
    readiness: Recent[Any] = field(default_factory=lambda: Recent(READINESS))


def services(request: Request) -> Services:
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


def public_url(house: Services, request: Request) -> str:
    """Where clients reach the API: as it is set, or else as this request reached it."""
    return house.settings.public_url or str(request.base_url)


async def _services(request: Request) -> Services:
    # A dependency that is not async is run in a thread: a detour for what is at hand.
    return services(request)


ServicesDep = Annotated[Services, Depends(_services)]
