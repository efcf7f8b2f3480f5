"""Prometheus metrics: of one API process, and of the shared jobs, journals and workers."""

from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tarn.coordination.database_metrics import DatabaseMetrics
from tarn.db.engine import Database
from tarn.errors import TarnError
from tarn.model.datasets.export import ExportKind
from tarn.model.ids import now
from tarn.telemetry import Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """The metrics of one API process. Labels are route templates, never paths: callers must not control cardinality."""

    def __init__(self, database: Database | None = None, telemetry: Telemetry | None = None, tenants: int = 0) -> None:
        self.registry = (telemetry or Telemetry()).registry
        self._most = tenants
        self._tenants: set[str] = set()
        if database is not None:
            self.registry.register(_Shared(database))
        tenant_labels = ("tenant",) if tenants else ()
        labels = ("method", "route", "status", *tenant_labels)
        self.requests = Counter("tarn_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "tarn_http_request_seconds",
            "Time to answer a request.",
            ("method", "route", *tenant_labels),
            registry=self.registry,
        )
        self.running = Gauge("tarn_http_requests_running", "Requests being answered.", registry=self.registry)
        self.streams = Gauge("tarn_event_streams", "Event streams that are open.", registry=self.registry)
        self.streams_ended = Counter(
            "tarn_event_streams_ended", "Event streams that ended, by reason.", ("reason",), registry=self.registry
        )
        self.events_sent = Counter("tarn_events_sent", "Events sent on event streams.", registry=self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float, tenant: str | None = None) -> None:
        method = method if method in METHODS else "other"
        tenant_labels = (self._tenant_label(tenant),) if self._most else ()
        self.requests.labels(method, route, str(status), *tenant_labels).inc()
        self.seconds.labels(method, route, *tenant_labels).observe(seconds)

    def _tenant_label(self, tenant: str | None) -> str:
        """Return the tenant's name, `other` beyond the maximum number of labels, or an empty string for none."""
        if tenant is None:
            return ""
        if tenant not in self._tenants and len(self._tenants) < self._most:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else OTHER

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _Shared(Collector):
    """Collector of the metrics in SQL: jobs, journals, webhooks, exports, workers. Empty while the database is down."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing: the database may be unavailable when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            jobs, journals, heartbeat, webhooks, oldest_stale = DatabaseMetrics.read(self._database)
        except TarnError:
            return
        job_counts = GaugeMetricFamily(
            "tarn_jobs", "Jobs in the database, by operation and state.", labels=["operation", "state"]
        )
        for each in jobs:
            job_counts.add_metric([each.operation, each.state], each.jobs)
        yield job_counts
        rows = sum(journal.rows for journal in journals)
        yield GaugeMetricFamily("tarn_journal_rows", "Statements that no snapshot holds yet.", value=rows)
        yield GaugeMetricFamily(
            "tarn_journal_datasets", "Datasets with statements in the journal.", value=len(journals)
        )
        characters = sum(journal.size for journal in journals)
        yield GaugeMetricFamily(
            "tarn_journal_characters", "Characters of the values of statements in the journal.", value=characters
        )
        oldest = journals[0].oldest if journals else None
        age = 0.0 if oldest is None else (now() - oldest).total_seconds()
        yield GaugeMetricFamily("tarn_journal_oldest_seconds", "Age of the oldest statement in the journal.", value=age)
        states = GaugeMetricFamily("tarn_webhooks", "Webhooks of tenants, by state.", labels=["state"])
        for state, number in webhooks.states.items():
            states.add_metric([state], number)
        yield states
        tries = CounterMetricFamily(
            "tarn_webhook_deliveries", "Attempts to deliver events to webhooks, by outcome.", labels=["outcome"]
        )
        tries.add_metric(["delivered"], webhooks.delivered)
        tries.add_metric(["failed"], webhooks.failed)
        yield tries
        stale = GaugeMetricFamily(
            "tarn_export_stale_seconds",
            "Age of the oldest export that is stale, by kind; 0 if none is stale.",
            labels=["export"],
        )
        for kind in ExportKind:
            oldest = oldest_stale.get(kind)
            stale.add_metric([kind], 0.0 if oldest is None else (now() - oldest).total_seconds())
        yield stale
        if heartbeat is not None:
            silent = (now() - heartbeat).total_seconds()
            yield GaugeMetricFamily(
                "tarn_worker_silent_seconds", "Seconds since the last heartbeat of any worker.", value=silent
            )
