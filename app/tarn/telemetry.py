"""What a process tells of its own work: counters for Prometheus, and spans where tracing is on."""

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
"""Of batches and segments, in events: from one to ten million."""

LAGS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)
"""Of what takes seconds when all is well, and hours when it is not."""

SERVICE = "tarn"


class Telemetry:
    """Counters and spans of one process. Safe to share between threads.

    Labels are from closed lists: never a dataset's name, nor anything else that callers send.
    """

    def __init__(self, tracer: "Tracer | None" = None) -> None:
        self._tracer = tracer
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.batches = Histogram(
            "tarn_batch_statements",
            "Events of a batch that was written to the journal.",
            buckets=SIZES,
            registry=registry,
        )
        self.groups = Histogram(
            "tarn_journal_commit_batches",
            "Small batches that shared a transaction.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self.commits = Histogram(
            "tarn_journal_commit_seconds", "Time of a transaction that made batches durable.", registry=registry
        )
        self.queries = Histogram(
            "tarn_query_seconds", "Time of a read on DuckDB, from its first file to its last row.", registry=registry
        )
        self.queries_failed = Counter(
            "tarn_queries_failed", "Reads on DuckDB that ended in an error.", registry=registry
        )
        self.flush_lag = Histogram(
            "tarn_flush_lag_seconds",
            "From the commit of the oldest event until a snapshot held it.",
            buckets=LAGS,
            registry=registry,
        )
        self.flushed = Histogram(
            "tarn_flush_statements", "Events of a segment that became a snapshot.", buckets=SIZES, registry=registry
        )
        self.rounds = Histogram(
            "tarn_flush_round_seconds",
            "Time of a round of flushing, all its datasets.",
            buckets=LAGS,
            registry=registry,
        )
        self.snapshots = Counter("tarn_snapshots", "Snapshots that were published.", ("operation",), registry=registry)
        self.publishing = Histogram(
            "tarn_publish_seconds", "Time to publish a snapshot, retries included.", ("operation",), registry=registry
        )
        self.retries = Counter(
            "tarn_commit_retries", "Tries to publish that were lost and made again.", ("why",), registry=registry
        )
        self.jobs = Histogram(
            "tarn_job_seconds",
            "Time of a job's run, by what came of it.",
            ("operation", "outcome"),
            buckets=LAGS,
            registry=registry,
        )

    def span(self, name: str, **attributes: Any) -> AbstractContextManager[Any]:
        """A piece of work in a trace; nothing where tracing is off."""
        if self._tracer is None:
            return nullcontext()
        return self._tracer.start_as_current_span(name, attributes=attributes)

    @contextmanager
    def timed(self, histogram: Histogram, name: str, **attributes: Any) -> Iterator[None]:
        """A piece of work whose time is counted, whatever comes of it, and told as a span."""
        begun = time.perf_counter()
        try:
            with self.span(name, **attributes):
                yield
        finally:
            histogram.observe(time.perf_counter() - begun)

    @property
    def tracer(self) -> "Tracer | None":
        return self._tracer


def build_telemetry(settings: "Settings", role: str) -> Telemetry:
    """The watch of a process, with spans if there is somewhere to send them. Raises StartRefused."""
    return Telemetry(None if settings.traces_endpoint is None else _tracer(settings.traces_endpoint, role))


def _tracer(endpoint: str, role: str) -> "Tracer":
    """Nothing of OpenTelemetry's is imported unless it is asked for."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise StartRefused(
            "TARN_TRACES_ENDPOINT is set, and tracing is not installed: pip install 'tarn[otel]'"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": f"{SERVICE}-{role}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer(SERVICE)
