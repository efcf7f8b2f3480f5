"""Entry points of the processes: build and run the API, a worker, or both, and the recovery commands, from settings."""

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
from tarn.api.http.services.admission_cache import RevisionReader
from tarn.api.http.services.container import Services
from tarn.api.http.services.event_hub import Hub
from tarn.api.http.services.metrics import Metrics
from tarn.archive.fetching.fetch import Fetcher
from tarn.archive.files import Archive
from tarn.child_process import run_when_parent_dies
from tarn.coordination.events import EventReader
from tarn.db import migrate
from tarn.db.engine import Database
from tarn.db.tables import lake as lake_table
from tarn.errors import StartRefused
from tarn.journal.parsing.parser_pool import ParserPool
from tarn.journal.writer import Writer
from tarn.model.datasets.recovery import BackupManifest, Reconciliation
from tarn.model.ftm.entity import Exploder, warm_up
from tarn.model.ids import new_id
from tarn.query.engine.active_reads import ActiveReadReporter, hold_snapshots
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
from tarn.worker.queue_consumer import QueueConsumer
from tarn.worker.worker_process import WorkerProcess

log = structlog.get_logger(__name__)

GC_THRESHOLDS = 100_000, 20, 50
"""Thresholds of the cyclic garbage collector, whose defaults are 700, 10 and 10."""

BACKLOG = 2048
"""Backlog of the listening sockets: connections waiting to be accepted."""


def run_serve(settings: Settings) -> None:
    """Run everything on one machine: migrations, the API, and a worker as its child process."""
    run_migrate(settings)
    _run_api(settings, with_worker=True)


def run_api(settings: Settings) -> None:
    """Run the API alone, on a database that has been migrated."""
    _run_api(settings, with_worker=False)


def run_worker(settings: Settings, until_stdin_closes: bool = False) -> None:
    """Run a worker alone. On SIGTERM and SIGINT it stops, and returns unfinished jobs to the queue."""
    # Python processes that Spark starts must not import modules of the current folder instead of Tarn's.
    os.environ["PYTHONSAFEPATH"] = "1"
    # Importing Spark takes a second, and the API does not need it.
    from tarn.worker.flusher import SparkFlusher

    logs.configure(settings)
    telemetry = build_telemetry(settings, "worker")
    with _opened(settings, "tarn-worker") as (database, store):
        flusher = SparkFlusher(settings, database, store, owner=new_id(), watch=telemetry)
        consumer = QueueConsumer(settings, database, store, owner=new_id())
        worker = Worker(settings, database, store, flusher, flusher.maintenance(), consumer, telemetry)
        if settings.worker_metrics_port is not None:
            _serve_metrics(settings.host, settings.worker_metrics_port, telemetry.registry, "TARN_WORKER_METRICS_PORT")

        def stop(*_: object) -> None:
            worker.stop()
            # A running Spark job gets the same grace period as a request; after that its job returns to the queue.
            late = Timer(settings.shutdown_grace, flusher.cancel)
            late.daemon = True
            late.start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        if until_stdin_closes:
            run_when_parent_dies(stop)
        database.notifications.listen()
        with ActiveReadReporter(database, flusher.running, settings.reader_heartbeat):
            worker.run()


def run_migrate(settings: Settings) -> None:
    """Migrate the database to the schema of this version."""
    database = Database(settings.database_url, pool=1, name="tarn-migrate")
    try:
        migrate.upgrade(database)
    finally:
        database.close()


def run_backup(settings: Settings, location: str, keep: int | None) -> BackupManifest:
    """Back up database and lake, and delete all but the newest `keep` backups. Raises StartRefused.

    Only this user may read the files: they contain webhook secrets and key digests.
    """
    logs.configure(settings)
    with _private_umask(), _opened(settings) as (database, store):
        backup_store = _backup_store(settings, location, store)
        with hold_snapshots(database, settings.reader_heartbeat) as pin:
            backup = Backup(database, store, backup_store, open_lake(store).id, pin)
            manifest = backup.run()
        if keep is not None:
            backup.keep(keep)
    return manifest


def list_backups(settings: Settings, location: str) -> list[BackupManifest]:
    """Return the backups at a location, oldest first. Raises StartRefused."""
    backup_store = BackupStore(Store(Connection.to_backups(settings, location)))
    return [backup_store.read(backup) for backup in backup_store.finished()]


def run_restore(settings: Settings, location: str, at: str | None) -> tuple[BackupManifest, Reconciliation]:
    """Restore a backup, by default the newest, into the configured database and lake; both must be empty.

    Raises StartRefused.
    """
    logs.configure(settings)
    store = Store(Connection.from_settings(settings))
    backup_store = _backup_store(settings, location, store)
    backups = backup_store.finished()
    if at is None and not backups:
        raise StartRefused(f"{location} has no backup")
    database = Database(settings.database_url, settings.database_pool)
    reports: list[Reconciliation] = []
    try:
        restore = Restore(database, store, backup_store, at or backups[-1])
        reconcile = Reconcile(database, store, settings)

        def run_reconciliation() -> None:
            require_no_heartbeats(database, settings)
            reports.append(reconcile.run(apply=True))

        return restore.run(run_reconciliation), reports[0]
    finally:
        database.close()


def run_reconcile(settings: Settings, apply: bool) -> Reconciliation:
    """Compare a database and a lake that were restored from different times, and with `apply` make them consistent.

    Raises StartRefused, also while any process of Tarn is running.
    """
    logs.configure(settings)
    with _opened(settings) as (database, store):
        require_no_heartbeats(database, settings)
        return Reconcile(database, store, settings).run(apply)


@contextmanager
def _private_umask() -> Iterator[None]:
    """Create files that only the user of this process can read."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


def _backup_store(settings: Settings, location: str, store: Store) -> BackupStore:
    connection = Connection.to_backups(settings, location)
    if connection.overlaps(store.connection):
        raise StartRefused(
            f"{location} and the lake at {store.connection.uri} are within each other: choose separate locations"
        )
    return BackupStore(Store(connection))


def run_executor() -> None:
    """Replace this process with a Spark executor. Raises StartRefused if Spark did not start it."""
    from tarn.pipeline.executor import executor_command

    command = executor_command(os.environ)
    os.execvp(command[0], command)  # noqa: S606 - our own command, and no shell


def build_services(settings: Settings, database: Database, store: Store) -> Services:
    """Build the services of the API's routes. Raises StartRefused for invalid fetch sources or trace endpoints."""
    stopping = Event()
    telemetry = build_telemetry(settings, "api")
    return Services(
        settings=settings,
        database=database,
        store=store,
        authenticator=Authenticator(database, settings, configured_issuer(settings)),
        rate=RateLimiter(),
        denials=Denials(database),
        telemetry=telemetry,
        metrics=Metrics(database, telemetry, settings.metrics_tenants),
        writer=Writer(database, settings, telemetry),
        parsers=ParserPool(UPLOADS, settings.parser_memory_bytes),
        exploder=Exploder(),
        revision_reader=RevisionReader(database),
        reader=Reader(settings, database, store, telemetry),
        archive=Archive(database, store, settings),
        fetcher=Fetcher.from_settings(settings),
        hub=Hub(settings, EventReader(database), database.notifications, stopping),
        stopping=stopping,
    )


class Server(uvicorn.Server):
    """Uvicorn server that prints its address (the system may choose the port) and signals shutdown to services."""

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
        self._services.database.notifications.wake()
        await super().shutdown(sockets)
        # The grace period of running requests is over. Closing the parsers ends the threads that wait for them, and so
        # the event loop.
        self._services.parsers.close()


def _run_api(settings: Settings, with_worker: bool) -> None:
    logs.configure(settings)
    # Uvicorn re-raises the signal after its shutdown; it must end this function without skipping the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as sockets, _opened(settings, "tarn-api") as (database, store):
        listening = [sockets.enter_context(listener) for listener in _listeners(settings)]
        _announce(ensure_admin(database, settings), settings)
        services = build_services(settings, database, store)
        services.parsers.start()
        database.notifications.listen()
        _collect_seldom()
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
            # In the background: most of the time is the start of another process, and no request depends on it.
            Thread(target=services.reader.warm_up, daemon=True).start()
            Thread(target=_load_names, args=(services.exploder,), daemon=True).start()
            Server(config, services).run(listening)


def _load_names(exploder: Exploder) -> None:
    """Load FtM's data for cleaning, once per process; until then, parser processes clean values that need it."""
    warm_up(Exploder())
    exploder.limit.is_loading = False


def _listeners(settings: Settings) -> list[socket]:
    """Return a listening socket for each address of the host. Raises StartRefused if one cannot be opened."""
    try:
        addresses = getaddrinfo(settings.host or None, settings.port, type=SOCK_STREAM, flags=AI_PASSIVE)
        return [create_server(address, family=family, backlog=BACKLOG) for family, _, _, _, address in addresses]
    except (OSError, ValueError) as error:
        raise _unreachable(settings.host, settings.port, "TARN_PORT", error) from None


def _serve_metrics(host: str, port: int, registry: CollectorRegistry, variable: str) -> None:
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise _unreachable(host, port, variable, error) from None


def _unreachable(host: str, port: int, variable: str, error: Exception) -> StartRefused:
    # Python's message ends with the address, which this message already contains.
    reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
    return StartRefused(f"TARN_HOST={host} and {variable}={port} cannot be listened on: {reason}")


def _collect_seldom() -> None:
    """Run the cyclic garbage collector rarely, and never on objects that were loaded at the start.

    Ingest creates and drops millions of small objects without cycles; with the default thresholds, garbage collection
    took a third of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@contextmanager
def _opened(settings: Settings, name: str = "tarn") -> Iterator[tuple[Database, Store]]:
    """Open the database and the lake, and check that their versions are current and that they belong together."""
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

    A umask applies to new files only, and SQLite gives its log the permissions of the database: files that an earlier
    version wrote remain readable by other users until their owner changes that.
    """
    paths = [store.connection.folder]
    if settings.database_url.startswith("sqlite"):
        paths.append(Path(str(make_url(settings.database_url).database)))
    for path in paths:
        if path is not None and path.exists() and path.stat().st_mode & int(settings.umask, 8):
            log.warning(
                "other users may read existing files; run chmod -R on this path once",
                path=str(path),
                mode=stat.filemode(path.stat().st_mode),
                umask=settings.umask,
            )


def _bind(database: Database, lake_id: str) -> None:
    """Bind the database to the lake. Raises StartRefused if it belongs to another: its rows name that lake's files."""
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
