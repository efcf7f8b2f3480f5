"""Prometheus metrics of one API process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Counters by route template, never by path: a label must not grow with what callers send."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        labels = ("method", "route", "status")
        self.requests = Counter("tarn_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "tarn_http_request_seconds", "Time to answer a request.", ("method", "route"), registry=self.registry
        )
        self.running = Gauge("tarn_http_requests_running", "Requests being answered.", registry=self.registry)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
