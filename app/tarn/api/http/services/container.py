"""What routes work with: made once in `main`, found by every request."""

from dataclasses import dataclass, field
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, Request

from tarn.access.audit import Denials
from tarn.access.identity import Authenticator
from tarn.access.limits import Rate
from tarn.access.revision import Remembered
from tarn.api.http.limits.threads import READINESS
from tarn.api.http.services.event_hub import Hub
from tarn.api.http.services.identity_cache import Admission, Present
from tarn.api.http.services.metrics import Metrics
from tarn.api.http.services.ttl_cache import Recent
from tarn.archive.fetch import Fetcher
from tarn.archive.files import Archive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.journal.parser_pool import Parsers
from tarn.journal.writer import Writer
from tarn.model.entity import Exploder
from tarn.query.reader import Reader
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Watch


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
