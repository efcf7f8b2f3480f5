"""Container of the services that routes use. `main` builds it once; every request reads it from the app state."""

from dataclasses import dataclass, field
from functools import cached_property
from threading import Event
from typing import Annotated, Any

from fastapi import Depends, Request

from tarn.access.audit import AuditLog, Denials
from tarn.access.grants import GrantService
from tarn.access.identity import Authenticator
from tarn.access.keys import KeyService
from tarn.access.limits import LimitService, RateLimiter
from tarn.access.revision import RevisionCache
from tarn.access.tenants import TenantService
from tarn.api.http.limits.threads import READINESS
from tarn.api.http.services.admission_cache import Admission, RevisionReader
from tarn.api.http.services.event_hub import Hub
from tarn.api.http.services.metrics import Metrics
from tarn.api.http.services.ttl_cache import TtlCache
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.file_service import FileService
from tarn.archive.files import Archive
from tarn.archive.uploads import Uploads
from tarn.coordination.events import EventReader
from tarn.coordination.locks import LockService
from tarn.coordination.queue_service import QueueService
from tarn.coordination.tags import TagService
from tarn.coordination.webhooks import WebhookService
from tarn.datasets.job_service import JobService
from tarn.datasets.registry import Dataset
from tarn.db.engine import Database
from tarn.db.workload import WorkloadReader
from tarn.journal.depth import JournalService
from tarn.journal.parsing.parser_pool import ParserPool
from tarn.journal.rejected import RejectedEventService
from tarn.journal.stages import StageService
from tarn.journal.writer import Writer
from tarn.lake.export_records import ExportService
from tarn.lake.refs import RefService
from tarn.lake.snapshots import SnapshotService
from tarn.model.ftm.entity import Exploder
from tarn.query.reader import Reader
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.telemetry import Telemetry


@dataclass(frozen=True)
class Services:
    """The connections, pools, caches and counters of one API process, and the services of its resources.

    The latter have no state of their own. They are properties, so that a copy with other settings has its own.
    """

    settings: Settings
    database: Database
    store: Store
    authenticator: Authenticator
    rate: RateLimiter
    denials: Denials
    telemetry: Telemetry
    metrics: Metrics
    writer: Writer
    parsers: ParserPool
    exploder: Exploder
    """Used on the event loop only; large bodies are parsed in other processes."""
    revision_reader: RevisionReader
    reader: Reader
    archive: Archive
    fetcher: Fetcher
    hub: Hub
    stopping: Event
    """Set when the server begins to shut down: nothing may wait any longer."""
    admissions: RevisionCache[Admission] = field(default_factory=RevisionCache)
    """Admitted callers, by operation, dataset and key."""
    dataset_cache: RevisionCache[Dataset | None] = field(default_factory=RevisionCache)
    """Datasets by name; None for names that do not exist."""
    readiness: TtlCache[Any] = field(default_factory=lambda: TtlCache(READINESS))

    @cached_property
    def tenants(self) -> TenantService:
        return TenantService(self.database)

    @cached_property
    def keys(self) -> KeyService:
        return KeyService(self.database)

    @cached_property
    def grants(self) -> GrantService:
        return GrantService(self.database)

    @cached_property
    def limits(self) -> LimitService:
        return LimitService(self.database, self.settings)

    @cached_property
    def audit(self) -> AuditLog:
        return AuditLog(self.database)

    @cached_property
    def workload(self) -> WorkloadReader:
        return WorkloadReader(self.database)

    @cached_property
    def jobs(self) -> JobService:
        return JobService(self.database)

    @cached_property
    def events(self) -> EventReader:
        return EventReader(self.database)

    @cached_property
    def tags(self) -> TagService:
        return TagService(self.database, self.store)

    @cached_property
    def locks(self) -> LockService:
        return LockService(self.database, self.store)

    @cached_property
    def queue(self) -> QueueService:
        return QueueService(self.database, self.store, self.settings)

    @cached_property
    def webhooks(self) -> WebhookService:
        return WebhookService(self.database)

    @cached_property
    def journal(self) -> JournalService:
        return JournalService(self.database)

    @cached_property
    def rejected_events(self) -> RejectedEventService:
        return RejectedEventService(self.database, self.settings)

    @cached_property
    def stages(self) -> StageService:
        return StageService(self.database, self.settings)

    @cached_property
    def snapshots(self) -> SnapshotService:
        return SnapshotService(self.database, self.store)

    @cached_property
    def refs(self) -> RefService:
        return RefService(self.database, self.store)

    @cached_property
    def files(self) -> FileService:
        return FileService(self.database, self.archive)

    @cached_property
    def uploads(self) -> Uploads:
        return Uploads(self.database, self.store, self.settings, self.archive)

    @cached_property
    def exports(self) -> ExportService:
        return ExportService(self.database, self.store)


def services_of(request: Request) -> Services:
    """Return the services of the application that handles this request."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


def public_url(services: Services, request: Request) -> str:
    """Return the API's base URL for clients: the configured one, or else that of this request."""
    return services.settings.public_url or str(request.base_url)


async def _services(request: Request) -> Services:
    # Async, because FastAPI runs a synchronous dependency on a thread, which costs more than this does.
    return services_of(request)


ServicesDep = Annotated[Services, Depends(_services)]
