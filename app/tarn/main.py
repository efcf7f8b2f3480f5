"""The processes, put together: settings in; a running API, a worker, or both out."""

import gc
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from socket import AI_PASSIVE, SOCK_STREAM, create_server, getaddrinfo, socket
from threading import Event, Thread, Timer

import structlog
import uvicorn
from prometheus_client import CollectorRegistry, start_http_server
from sqlalchemy import insert, select
from sqlalchemy.engine import make_url

from tarn import logs
from tarn.access.audit import Denials
from tarn.access.bootstrap import ensure_admin
from tarn.access.identity import Authenticator
from tarn.access.limits import RateLimiter
from tarn.access.oidc import configured_issuer
from tarn.api.application import create_app
from tarn.api.http.ingest import UPLOADS
from tarn.api.http.middleware.protocol import Protocol
from tarn.api.http.services.container import Services
from tarn.api.http.services.event_hub import Hub
from tarn.api.http.services.identity_cache import RevisionReader
from tarn.api.http.services.metrics import Metrics
from tarn.archive.fetch import Fetcher
from tarn.archive.files import Archive
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.db.tables import lake as lake_table
from tarn.errors import StartRefused
from tarn.journal.parser_pool import ParserPool
from tarn.journal.writer import Writer
from tarn.model.entity import Exploder, warm_up
from tarn.model.ids import new_id
from tarn.model.recovery import BackupManifest, Reconciliation
from tarn.query.active_reads import ActiveReadReporter, holding
from tarn.query.reader import Reader
from tarn.recovery.backup import Backup
from tarn.recovery.reconcile import Reconcile, require_no_heartbeats
from tarn.recovery.restore import Restore
from tarn.settings import Settings
from tarn.storage.backup_store import BackupStore
from tarn.storage.connection import Connection
from tarn.storage.lake_root import open_lake
from tarn.storage.store import Store
from tarn.telemetry import build_telemetry
from tarn.worker.loop import Worker
from tarn.worker.queue import Consumer
from tarn.worker.worker_process import WorkerProcess, when_parent_dies

log = structlog.get_logger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep Python to itself while others wait for it. A small request needs it half a dozen times,
and each time would wait for five times as long by default, beside a query of somebody else."""


def run_serve(settings: Settings) -> None:
    """Everything on one machine: migrations, the API, and a worker as its child."""
    run_migrate(settings)
    _run_api(settings, with_worker=True)


def run_api(settings: Settings) -> None:
    """The API alone, on a database that has been migrated."""
    _run_api(settings, with_worker=False)


def run_worker(settings: Settings, until_stdin_closes: bool = False) -> None:
    """A worker alone. It stops on SIGTERM and SIGINT, handing back what it was doing, however long that would take."""
    # Spark is a second's import, and of no use to an API.
    from tarn.worker.flusher import SparkFlusher

    logs.configure(settings)
    watch = build_telemetry(settings, "worker")
    with _opened(settings, "tarn-worker") as (database, store):
        flusher = SparkFlusher(settings, database, store, owner=new_id(), watch=watch)
        consumer = Consumer(settings, database, store, owner=new_id())
        worker = Worker(settings, database, store, flusher, flusher.maintenance(), consumer, watch)
        if settings.worker_metrics_port is not None:
            _serve_metrics(settings.host, settings.worker_metrics_port, watch.registry, "TARN_WORKER_METRICS_PORT")

        def stop(*_: object) -> None:
            worker.stop()
            # What is amid a long Spark job gets as long as a request does, and is handed back then.
            late = Timer(settings.shutdown_grace, flusher.cancel)
            late.daemon = True
            late.start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        if until_stdin_closes:
            when_parent_dies(stop)
        with ActiveReadReporter(database, flusher.running, settings.reader_heartbeat):
            worker.run()


def run_migrate(settings: Settings) -> None:
    """Bring the database to this version's schema."""
    database = Database(settings.database_url, pool=1, name="tarn-migrate")
    try:
        migrate.upgrade(database)
    finally:
        database.close()


def run_backup(settings: Settings, place: str, keep: int | None) -> BackupManifest:
    """Back up database and lake, and keep only the newest so many backups. Raises StartRefused.

    Nobody but this user may read what it writes: there are webhooks' secrets and digests of keys in it.
    """
    logs.configure(settings)
    with _to_oneself(), _opened(settings) as (database, store):
        vault = _vault(settings, place, store)
        with holding(database, settings.reader_heartbeat) as pin:
            backup = Backup(database, store, vault, open_lake(store).id, pin)
            made = backup.run()
        if keep is not None:
            backup.keep(keep)
    return made


def list_backups(settings: Settings, place: str) -> list[BackupManifest]:
    """The backups at a place, oldest first. Raises StartRefused."""
    vault = BackupStore(Store(Connection.to_backups(settings, place)))
    return [vault.read(backup) for backup in vault.finished()]


def run_restore(settings: Settings, place: str, at: str | None) -> tuple[BackupManifest, Reconciliation]:
    """Restore a backup, the newest one if none is named, into the database and the lake that are set, both empty.

    Raises StartRefused.
    """
    logs.configure(settings)
    store = Store(Connection.from_settings(settings))
    vault = _vault(settings, place, store)
    found = vault.finished()
    if at is None and not found:
        raise StartRefused(f"{place} has no backup")
    database = Database(settings.database_url, settings.database_pool)
    told: list[Reconciliation] = []
    try:
        restore = Restore(database, store, vault, at or found[-1])
        reconcile = Reconcile(database, store, settings)

        def fit() -> None:
            require_no_heartbeats(database, settings)
            told.append(reconcile.run(apply=True))

        return restore.run(fit), told[0]
    finally:
        database.close()


def run_reconcile(settings: Settings, apply: bool) -> Reconciliation:
    """Look how a database and a lake of different moments fit together, and with `apply` make them one.

    Raises StartRefused, also while anybody is at work.
    """
    logs.configure(settings)
    with _opened(settings) as (database, store):
        require_no_heartbeats(database, settings)
        return Reconcile(database, store, settings).run(apply)


@contextmanager
def _to_oneself() -> Iterator[None]:
    """What this process writes is for its own user alone."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


def _vault(settings: Settings, place: str, store: Store) -> BackupStore:
    connection = Connection.to_backups(settings, place)
    if connection.overlaps(store.connection):
        raise StartRefused(f"{place} and the lake at {store.connection.uri} are within each other: keep them apart")
    return BackupStore(Store(connection))


def run_executor() -> None:
    """Become an executor of Spark. Raises StartRefused where Spark did not ask for one."""
    from tarn.pipeline.executor import executor_command

    command = executor_command(os.environ)
    os.execvp(command[0], command)  # noqa: S606 - our own command, and no shell


def build_services(settings: Settings, database: Database, store: Store) -> Services:
    """What the API's routes work with. Raises StartRefused for places that cannot be fetched from, or traced to."""
    stopping = Event()
    watch = build_telemetry(settings, "api")
    return Services(
        settings=settings,
        database=database,
        store=store,
        authenticator=Authenticator(database, settings, configured_issuer(settings)),
        rate=RateLimiter(),
        denials=Denials(database),
        watch=watch,
        metrics=Metrics(database, watch, settings.metrics_tenants),
        writer=Writer(database, settings, watch),
        parsers=ParserPool(UPLOADS, settings.parser_memory_bytes),
        exploder=Exploder(),
        present=RevisionReader(database),
        reader=Reader(settings, database, store, watch),
        archive=Archive(database, store, settings),
        fetcher=Fetcher.from_settings(settings),
        hub=Hub(settings, database, stopping),
        stopping=stopping,
    )


class Server(uvicorn.Server):
    """Uvicorn that says where it listens, which matters when the port was left to the system, and that it stops."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                sys.stdout.write(f"Tarn listens on http://{host}:{port}\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._services.stopping.set()
        await super().shutdown(sockets)
        # Running requests have had their time. A thread that waits for a parser ends with it, and the loop with that.
        self._services.parsers.close()


def _run_api(settings: Settings, with_worker: bool) -> None:
    logs.configure(settings)
    # Uvicorn passes a signal on once it has shut down; it must end this function, not skip its clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as sockets, _opened(settings, "tarn-api") as (database, store):
        listening = [sockets.enter_context(listener) for listener in _listeners(settings)]
        _announce(ensure_admin(database, settings), settings)
        services = build_services(settings, database, store)
        services.parsers.start()
        _collect_seldom()
        sys.setswitchinterval(SWITCH_SECONDS)
        config = uvicorn.Config(
            create_app(services),
            http=Protocol,
            ws="none",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.shutdown_grace,
        )
        if settings.metrics_port is not None:
            _serve_metrics(settings.host, settings.metrics_port, services.metrics.registry, "TARN_METRICS_PORT")
        services.exploder.limit.is_loading = True
        with (
            closing(services.reader),
            closing(services.writer),
            closing(services.parsers),
            closing(services.hub),
            closing(services.denials),
            WorkerProcess() if with_worker else nullcontext(),
        ):
            # Nobody waits for this: most of it is another process's start.
            Thread(target=services.reader.warm_up, daemon=True).start()
            Thread(target=_load_names, args=(services.exploder,), daemon=True).start()
            Server(config, services).run(listening)


def _load_names(exploder: Exploder) -> None:
    """Let FtM load what cleaning needs, once for the process; until then parsers clean what needs it."""
    warm_up(Exploder())
    exploder.limit.is_loading = False


def _listeners(settings: Settings) -> list[socket]:
    """A socket for each address of the host. Raises StartRefused if one cannot be had."""
    try:
        found = getaddrinfo(settings.host or None, settings.port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return [create_server(address, family=family, backlog=BACKLOG) for family, _, _, _, address in found]
    except (OSError, ValueError) as error:
        raise _unreachable(settings.host, settings.port, "TARN_PORT", error) from None


def _serve_metrics(host: str, port: int, registry: CollectorRegistry, variable: str) -> None:
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise _unreachable(host, port, variable, error) from None


def _unreachable(host: str, port: int, variable: str, error: Exception) -> StartRefused:
    # Python's own text ends with the address, which is said here already.
    reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
    return StartRefused(f"TARN_HOST={host} and {variable}={port} cannot be listened on: {reason}")


def _collect_seldom() -> None:
    """Let Python look for garbage in cycles seldom, and never among what was loaded at the start.

    Ingest makes and drops millions of small objects without cycles; the default made a third of its time of this.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@contextmanager
def _opened(settings: Settings, name: str = "tarn") -> Iterator[tuple[Database, Store]]:
    """The database and the lake, checked to be of this version and to belong together."""
    database = Database(settings.database_url, settings.database_pool, name)
    try:
        migrate.require_current(database)
        store = Store(Connection.from_settings(settings))
        _bind(database, open_lake(store).id)
        _warn_of_open_files(settings, store)
        yield database, store
    finally:
        database.close()


def _warn_of_open_files(settings: Settings, store: Store) -> None:
    """Log a warning if the database or the lake has permissions that TARN_UMASK forbids.

    A umask holds for new files only, and SQLite gives its log the permissions of the database: what an earlier version
    wrote stays open to other users until its owner changes that.
    """
    places = [store.connection.folder]
    if settings.database_url.startswith("sqlite"):
        places.append(Path(str(make_url(settings.database_url).database)))
    for place in places:
        if place is not None and place.exists() and place.stat().st_mode & int(settings.umask, 8):
            log.warning(
                "other users may read what was written earlier; run chmod -R on it once",
                path=str(place),
                mode=stat.filemode(place.stat().st_mode),
                umask=settings.umask,
            )


def _bind(database: Database, lake_id: str) -> None:
    """One database serves one lake: rows that speak of another lake's files would be worse than no start."""
    with database.write() as connection:
        database.serialize(connection, "lake")
        known = connection.execute(select(lake_table.c.id)).scalar()
        if known is None:
            connection.execute(insert(lake_table).values(id=lake_id))
        elif known != lake_id:
            raise StartRefused(
                f"the database belongs to the lake {known} and TARN_LAKE_URI holds the lake {lake_id}: "
                "use the lake's own database, or a new one"
            )


def _announce(key: str | None, settings: Settings) -> None:
    if key is not None:
        sys.stdout.write(
            f"The administrator's key, shown this once and kept in {settings.admin_key_file}:\n\n    {key}\n\n"
        )
