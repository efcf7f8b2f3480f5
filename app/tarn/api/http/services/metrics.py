"""Prometheus metrics of one API process, and of the work that all of them share."""

from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tarn.coordination import webhooks
from tarn.db import worker_heartbeats as workers
from tarn.db import workload as work
from tarn.db.engine import Database
from tarn.errors import TarnError
from tarn.model.export import Kind
from tarn.model.ids import now
from tarn.telemetry import Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Counters by route template, never by path: a label must not grow with what callers send."""

    def __init__(self, database: Database | None = None, watch: Telemetry | None = None, tenants: int = 0) -> None:
        self.registry = (watch or Telemetry()).registry
        self._most = tenants
        self._tenants: set[str] = set()
        if database is not None:
            self.registry.register(_Shared(database))
        who = ("tenant",) if tenants else ()
        labels = ("method", "route", "status", *who)
        self.requests = Counter("tarn_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "tarn_http_request_seconds", "Time to answer a request.", ("method", "route", *who), registry=self.registry
        )
        self.running = Gauge("tarn_http_requests_running", "Requests being answered.", registry=self.registry)
        self.streams = Gauge("tarn_event_streams", "Streams of events that are open.", registry=self.registry)
        self.streams_ended = Counter(
            "tarn_event_streams_ended", "Streams of events that came to an end.", ("reason",), registry=self.registry
        )
        self.events_sent = Counter("tarn_events_sent", "Events sent on streams.", registry=self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float, tenant: str | None = None) -> None:
        method = method if method in METHODS else "other"
        who = (self._told(tenant),) if self._most else ()
        self.requests.labels(method, route, str(status), *who).inc()
        self.seconds.labels(method, route, *who).observe(seconds)

    def _told(self, tenant: str | None) -> str:
        """The tenant's name, or `other` once as many are told apart as there may be; nobody's requests have none."""
        if tenant is None:
            return ""
        if tenant not in self._tenants and len(self._tenants) < self._most:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else OTHER

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _Shared(Collector):
    """What SQL knows of jobs, journals and workers. While it does not answer, there is nothing to tell."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing beforehand: the database need not be there when the registry is made."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            with self._database.read() as connection:
                jobs, journals = work.done(connection), work.waiting(connection)
                seen, hooks = workers.last_seen(connection), webhooks.totals(connection)
                behind = work.oldest_stale(connection)
        except TarnError:
            return
        kept = GaugeMetricFamily("tarn_jobs", "Jobs that are kept.", labels=["operation", "state"])
        for each in jobs:
            kept.add_metric([each.operation, each.state], each.jobs)
        yield kept
        rows = sum(journal.rows for journal in journals)
        yield GaugeMetricFamily("tarn_journal_rows", "Statements that no snapshot holds yet.", value=rows)
        yield GaugeMetricFamily("tarn_journal_datasets", "Datasets of which statements wait.", value=len(journals))
        characters = sum(journal.size for journal in journals)
        yield GaugeMetricFamily("tarn_journal_characters", "Characters of their values.", value=characters)
        oldest = journals[0].oldest if journals else None
        age = 0.0 if oldest is None else (now() - oldest).total_seconds()
        yield GaugeMetricFamily("tarn_journal_oldest_seconds", "How long the oldest of them has waited.", value=age)
        states = GaugeMetricFamily("tarn_webhooks", "Webhooks of tenants.", labels=["state"])
        for state, number in hooks.states.items():
            states.add_metric([state], number)
        yield states
        tries = CounterMetricFamily("tarn_webhook_deliveries", "Attempts to deliver events.", labels=["outcome"])
        tries.add_metric(["delivered"], hooks.delivered)
        tries.add_metric(["failed"], hooks.failed)
        yield tries
        stale = GaugeMetricFamily(
            "tarn_export_stale_seconds",
            "How long the longest outdated export has been there since it was made; 0 if none is outdated.",
            labels=["export"],
        )
        for kind in Kind:
            made = behind.get(kind)
            stale.add_metric([kind], 0.0 if made is None else (now() - made).total_seconds())
        yield stale
        if seen is not None:
            silent = (now() - seen).total_seconds()
            yield GaugeMetricFamily("tarn_worker_silent_seconds", "Since a worker last gave a sign.", value=silent)
