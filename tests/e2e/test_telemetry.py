"""Metrics and traces of a server, its worker and Spark, as Prometheus and a trace collector receive them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.s3 import free_port
from tests.server import running
from tests.test_telemetry import JANE, samples

pytestmark = pytest.mark.long

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736"
"""A trace that is in progress when a request is sent."""


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Start a trace collector; return its address and the spans that it receives."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in body.resource_spans:
                service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
                spans.extend((service, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def wait_for_metric(url: str, name: str, value: float) -> dict[str, float]:
    """Wait until a metric of a process has a value and return all metrics: counters increase just after the event."""
    deadline = time.monotonic() + 120
    while (metrics := samples(httpx.get(url).text)).get(name) != value:
        assert time.monotonic() < deadline, f"{name} is {metrics.get(name)}"
        time.sleep(0.05)
    return metrics


@pytest.mark.xdist_group("spark")
def test_requests_and_jobs_appear_in_metrics_and_traces(tmp_path: Path):
    port = free_port()
    with (
        collector() as (endpoint, spans),
        running(
            tmp_path,
            TARN_WORKER_METRICS_PORT=str(port),
            TARN_FLUSH_AGE="1",
            TARN_METRICS_TENANTS="1",
            TARN_TRACES_ENDPOINT=endpoint,
            OTEL_BSP_SCHEDULE_DELAY="200",
        ) as server,
    ):
        client = server.client()
        client.timeout = 180  # the first flush starts Spark
        client.post("/v1/datasets", json={"name": "leaks"})
        trace_context = {"traceparent": f"00-{CALLER}-00f067aa0ba902b7-01"}
        client.post("/v1/datasets/leaks/entities?commit=wait_for", json=[JANE], headers=trace_context)
        client.get("/v1/datasets/leaks/entities/jane", headers=trace_context)
        worker = wait_for_metric(f"http://127.0.0.1:{port}/metrics", "tarn_flush_lag_seconds_count", 1)
        api = wait_for_metric(f"{server.url}/metrics", "tarn_query_seconds_count", 1)
        assert server.stop() == 0
        log = server.log.read_text()

    assert worker["tarn_flush_statements_sum"] == 2
    assert worker["tarn_snapshots_total flush"] == 1
    assert worker["process_resident_memory_bytes"] > 0
    assert api["tarn_batch_statements_sum"] == 2
    assert api["tarn_journal_rows"] == 0
    assert api["tarn_http_requests_total GET /v1/datasets/{dataset}/entities/{entity} 200 admin"] == 1
    assert api["tarn_worker_silent_seconds"] < 60

    named = {(service, span.name) for service, span in spans}
    assert ("tarn-worker", "flush") in named
    assert ("tarn-worker", "publish") in named
    request_spans = {span.name: span for _, span in spans if span.trace_id.hex() == CALLER}
    read = request_spans["GET /v1/datasets/{dataset}/entities/{entity}"]
    assert request_spans["query"].parent_span_id == read.span_id
    assert read.parent_span_id.hex() == "00f067aa0ba902b7"
    assert "leaks" not in str([span for _, span in spans if span.kind == read.kind]), "a span has the name of a dataset"
    assert CALLER in log
