"""Prometheus metrics of one API process, and of the work that all of them share."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.db import work, workers
from app.db.engine import Database
from app.errors import TarnError
from app.model.ids import now
from app.tenancy import webhooks

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Counters by route template, never by path: a label must not grow with what callers send."""

    def __init__(self, database: Database | None = None) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        if database is not None:
            self.registry.register(_Shared(database))
        labels = ("method", "route", "status")
        self.requests = Counter("tarn_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "tarn_http_request_seconds", "Time to answer a request.", ("method", "route"), registry=self.registry
        )
        self.running = Gauge("tarn_http_requests_running", "Requests being answered.", registry=self.registry)
        self.streams = Gauge("tarn_event_streams", "Streams of events that are open.", registry=self.registry)
        self.streams_ended = Counter(
            "tarn_event_streams_ended", "Streams of events that came to an end.", ("reason",), registry=self.registry
        )
        self.events_sent = Counter("tarn_events_sent", "Events sent on streams.", registry=self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

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
        except TarnError:
            return
        kept = GaugeMetricFamily("tarn_jobs", "Jobs that are kept.", labels=["operation", "state"])
        for each in jobs:
            kept.add_metric([each.operation, each.state], each.jobs)
        yield kept
        rows = sum(journal.rows for journal in journals)
        yield GaugeMetricFamily("tarn_journal_rows", "Statements that no snapshot holds yet.", value=rows)
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
        if seen is not None:
            silent = (now() - seen).total_seconds()
            yield GaugeMetricFamily("tarn_worker_silent_seconds", "Since a worker last gave a sign.", value=silent)
