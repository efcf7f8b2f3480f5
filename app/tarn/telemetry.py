"""Telemetry of a process: Prometheus metrics, and OpenTelemetry spans if tracing is enabled."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.process_collector import ProcessCollector

from tarn.errors import StartRefused

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from tarn.settings import Settings

SIZES = tuple(float(10**power) for power in range(8))
"""Histogram buckets of batch and segment sizes, in events: from one to ten million."""

LAGS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)
"""Histogram buckets, in seconds, of durations that are normally seconds and can become hours."""

SERVICE = "tarn"


class Telemetry:
    """Metrics and spans of one process. Thread-safe.

    Label values are from closed lists: never a dataset name or anything else that callers send.
    """

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self._tracer = tracer
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.batches = Histogram(
            "tarn_batch_statements",
            "Events per batch written to the journal.",
            buckets=SIZES,
            registry=registry,
        )
        self.groups = Histogram(
            "tarn_journal_commit_batches",
            "Small batches per shared transaction (group commit).",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self.commits = Histogram(
            "tarn_journal_commit_seconds", "Duration of a transaction that commits batches.", registry=registry
        )
        self.queries = Histogram(
            "tarn_query_seconds", "Duration of a DuckDB read, from its first file to its last row.", registry=registry
        )
        self.queries_failed = Counter("tarn_queries_failed", "DuckDB reads that failed.", registry=registry)
        self.flush_lag = Histogram(
            "tarn_flush_lag_seconds",
            "Time from the commit of the oldest event until a snapshot contains it.",
            buckets=LAGS,
            registry=registry,
        )
        self.flushed = Histogram(
            "tarn_flush_statements",
            "Events of a segment that was flushed to a snapshot.",
            buckets=SIZES,
            registry=registry,
        )
        self.rounds = Histogram(
            "tarn_flush_round_seconds",
            "Duration of a flush round over all its datasets.",
            buckets=LAGS,
            registry=registry,
        )
        self.snapshots = Counter("tarn_snapshots", "Published snapshots.", ("operation",), registry=registry)
        self.publishing = Histogram(
            "tarn_publish_seconds", "Time to publish a snapshot, retries included.", ("operation",), registry=registry
        )
        self.retries = Counter(
            "tarn_commit_retries",
            "Attempts to publish a snapshot that conflicted with another writer and were retried.",
            ("why",),
            registry=registry,
        )
        self.jobs = Histogram(
            "tarn_job_seconds",
            "Duration of a job's run, by outcome.",
            ("operation", "outcome"),
            buckets=LAGS,
            registry=registry,
        )

    def span(self, name: str, **attributes: Any) -> AbstractContextManager[Any]:
        """Return the context manager of a span; a no-op if tracing is disabled."""
        if self._tracer is None:
            return nullcontext()
        return self._tracer.start_as_current_span(name, attributes=attributes)

    @contextmanager
    def timed(self, histogram: Histogram, name: str, **attributes: Any) -> Iterator[None]:
        """Record the block's duration in the histogram, also if it fails, and trace it as a span."""
        start = time.perf_counter()
        try:
            with self.span(name, **attributes):
                yield
        finally:
            histogram.observe(time.perf_counter() - start)

    @property
    def tracer(self) -> "Tracer | None":
        return self._tracer


def build_telemetry(settings: "Settings", role: str) -> Telemetry:
    """Return the telemetry of a process, with spans if an endpoint is configured. Raises StartRefused."""
    return Telemetry(None if settings.traces_endpoint is None else _tracer(settings.traces_endpoint, role))


def _tracer(endpoint: str, role: str) -> "Tracer":
    """Return a tracer. OpenTelemetry is imported only here: it is an optional dependency."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise StartRefused(
            "TARN_TRACES_ENDPOINT is set, but OpenTelemetry is not installed: pip install 'tarn[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": f"{SERVICE}-{role}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer(SERVICE)
