"""What routes work with: made once in `main`, found by every request."""

from dataclasses import dataclass, field
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, Request

from tarn.access.audit import Denials
from tarn.access.identity import Authenticator
from tarn.access.limits import RateLimiter
from tarn.access.revision import RevisionCache
from tarn.api.http.limits.threads import READINESS
from tarn.api.http.services.event_hub import Hub
from tarn.api.http.services.identity_cache import Admission, RevisionReader
from tarn.api.http.services.metrics import Metrics
from tarn.api.http.services.ttl_cache import TtlCache
from tarn.archive.fetch import Fetcher
from tarn.archive.files import Archive
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.journal.parser_pool import ParserPool
from tarn.journal.writer import Writer
from tarn.model.entity import Exploder
from tarn.query.reader import Reader
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry


@dataclass(frozen=True)
class Services:
    """One process's connections and counters."""

    settings: Settings
    database: Database
    store: Store
    authenticator: Authenticator
    rate: RateLimiter
    denials: Denials
    watch: Telemetry
    metrics: Metrics
    writer: Writer
    parsers: ParserPool
    exploder: Exploder
    """Of the event loop alone; a large body is parsed elsewhere."""
    present: RevisionReader
    reader: Reader
    archive: Archive
    fetcher: Fetcher
    hub: Hub
    stopping: Event
    """Set when the server begins to stop: nobody is to be kept waiting any longer."""
    admissions: RevisionCache[Admission] = field(default_factory=RevisionCache)
    """By operation, dataset and key: whom it let through."""
    datasets: RevisionCache[Dataset | None] = field(default_factory=RevisionCache)
    """By name: those that exist and those that do not."""
    readiness: TtlCache[Any] = field(default_factory=lambda: TtlCache(READINESS))


def services_of(request: Request) -> Services:
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


def public_url(house: Services, request: Request) -> str:
    """Where clients reach the API: as it is set, or else as this request reached it."""
    return house.settings.public_url or str(request.base_url)


async def _services(request: Request) -> Services:
    # A dependency that is not async is run in a thread: a detour for what is at hand.
    return services_of(request)


ServicesDep = Annotated[Services, Depends(_services)]
