"""Metrics and traces of a process: each step of a write updates its metrics; tracing costs nothing when disabled."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update
from tarn.api.application import create_app
from tarn.api.http.services.metrics import Metrics
from tarn.datasets.registry import Dataset
from tarn.db.tables import exports
from tarn.errors import PathExists, SnapshotConflict, StartRefused
from tarn.lake.commit import SnapshotPublisher
from tarn.model.ids import now
from tarn.pipeline.jobs.flush import Flush
from tarn.settings import load_settings
from tarn.storage.fault_injection import FaultyStore
from tarn.telemetry import Telemetry, build_telemetry
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import Worker

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.pipeline.kernels import DirectKernels

JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"]}}


def samples(text: str) -> dict[str, float]:
    """Return every sample of an exposition, keyed by name and label values."""
    return {
        sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(api: InProcessApi) -> dict[str, float]:
    return samples(api.anonymous.get("/metrics").text)


def sample(watch: Telemetry, name: str, **labels: str) -> float:
    return watch.registry.get_sample_value(name, labels) or 0.0


def test_write_updates_batch_size_and_depth_and_age_of_the_journal(api: InProcessApi):
    api.dataset("test")
    before = scrape(api)
    assert api.admin.post("/v1/datasets/test/entities", [JANE]).status_code == 200
    after = scrape(api)

    assert (before["tarn_batch_statements_count"], after["tarn_batch_statements_count"]) == (0, 1)
    assert after["tarn_batch_statements_sum"] == after["tarn_journal_rows"] == 2
    assert after["tarn_journal_commit_seconds_count"] == after["tarn_journal_commit_batches_count"] == 1
    assert after["tarn_journal_datasets"] == 1
    assert after["tarn_journal_characters"] >= len("Jane Doe")
    assert after["tarn_journal_oldest_seconds"] > 0
    assert (before["tarn_journal_rows"], before["tarn_journal_oldest_seconds"]) == (0, 0)


@ONE_DATABASE
def test_large_body_is_counted_as_one_batch_of_all_its_statements(api: InProcessApi):
    api.dataset("test")
    body = "\n".join(f'{{"id": "{n}", "schema": "Person", "properties": {{"name": ["N{n}"]}}}}' for n in range(3000))
    api.admin("POST", "/v1/datasets/test/entities", {"Content-Type": "application/x-ndjson"}, content=body)
    after = scrape(api)
    assert (after["tarn_batch_statements_count"], after["tarn_batch_statements_sum"]) == (1, 6000)


@ONE_DATABASE
def test_repeated_request_is_not_counted_as_a_second_batch(api: InProcessApi):
    api.dataset("test")
    for _ in range(2):
        api.admin.post("/v1/datasets/test/entities", [JANE], headers={"Idempotency-Key": "once"})
    assert scrape(api)["tarn_batch_statements_count"] == 1


@ONE_DATABASE
def test_read_updates_query_duration(api: InProcessApi):
    api.dataset("test")
    api.admin.post("/v1/datasets/test/entities", [JANE])
    before = scrape(api)["tarn_query_seconds_count"]
    assert api.admin.get("/v1/datasets/test/entities/jane").status_code == 200
    after = scrape(api)
    assert after["tarn_query_seconds_count"] > before
    assert after["tarn_query_seconds_sum"] > 0
    assert after["tarn_queries_failed_total"] == 0


@ONE_DATABASE
def test_flush_updates_lag_size_and_snapshots(api: InProcessApi, dataset: Dataset, kernels: DirectKernels):
    services, watch = api.services, Telemetry()
    api.admin.post("/v1/datasets/test/entities", [JANE])
    flusher = SparkFlusher(
        services.settings, services.database, services.store, "tester", kernels=lambda: kernels, watch=watch
    )
    outcome = flusher.flush([dataset.id], lambda: None)[dataset.id]

    assert outcome.error is None
    assert sample(watch, "tarn_flush_lag_seconds_count") == 1
    assert sample(watch, "tarn_flush_lag_seconds_sum") > 0
    assert sample(watch, "tarn_flush_statements_sum") == 2
    assert sample(watch, "tarn_flush_round_seconds_count") == 1
    assert sample(watch, "tarn_snapshots_total", operation="flush") == 1
    assert sample(watch, "tarn_publish_seconds_count", operation="flush") == 1
    assert sample(watch, "tarn_commit_retries_total", why="Refused") == 0
    assert scrape(api)["tarn_journal_rows"] == 0


@ONE_DATABASE
def test_every_failed_attempt_to_publish_is_counted_with_its_reason(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services, watch = api.services, Telemetry()
    settings = services.settings.model_copy(update={"commit_retries": 2})
    api.admin.post("/v1/datasets/test/entities", [JANE])
    faulty = FaultyStore(services.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"), every=True)
    publisher = SnapshotPublisher(services.database, faulty, settings, "tester", watch=watch)
    outcomes = Flush(services.database, faulty, publisher, lambda: kernels, watch=watch).run([dataset], lambda: None)

    assert isinstance(outcomes[dataset.id].error, SnapshotConflict)
    assert sample(watch, "tarn_commit_retries_total", why="Refused") == 3
    assert sample(watch, "tarn_snapshots_total", operation="flush") == 0
    assert sample(watch, "tarn_flush_lag_seconds_count") == 0


def test_export_is_stale_since_the_first_change_of_its_dataset(
    api: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services = api.services
    watch = Telemetry()
    flusher = SparkFlusher(
        services.settings, services.database, services.store, "tester", kernels=lambda: kernels, watch=watch
    )
    worker = Worker(services.settings, services.database, services.store, flusher, flusher.maintenance(), watch=watch)
    api.admin.post("/v1/datasets/test/entities", [JANE])
    assert api.admin.post("/v1/datasets/test/operations/export", {"kinds": ["statistics"]}).status_code == 202
    assert worker.step()
    fresh = scrape(api)["tarn_export_stale_seconds statistics"]
    with services.database.write() as connection:
        connection.execute(update(exports).values(made=now() - timedelta(days=3)))
    api.admin.post("/v1/datasets/test/entities", [JANE | {"id": "john"}])
    flusher.flush([dataset.id], lambda: None)
    stale = scrape(api)

    assert fresh == 0
    assert stale["tarn_export_stale_seconds statistics"] > 2 * 86_400
    assert stale["tarn_export_stale_seconds entities"] == 0, "it was never generated"
    assert sample(watch, "tarn_job_seconds_count", operation="export", outcome="done") == 1


# Tenants


def test_tenants_are_labelled_up_to_the_configured_number():
    metrics = Metrics(tenants=2)
    for tenant in ("one", "two", "three", "one", None):
        metrics.answered("GET", "/v1/whoami", 200, 0.1, tenant)
    counted = {
        name: value
        for name, value in samples(metrics.exposition().decode()).items()
        if name.startswith("tarn_http_requests_total")
    }
    assert counted == {
        "tarn_http_requests_total GET /v1/whoami 200 one": 2,
        "tarn_http_requests_total GET /v1/whoami 200 two": 1,
        "tarn_http_requests_total GET /v1/whoami 200 other": 1,
        "tarn_http_requests_total GET /v1/whoami 200 ": 1,
    }


@ONE_DATABASE
def test_tenants_are_not_labelled_by_default(api: InProcessApi):
    api.admin.get("/v1/whoami")
    text = api.anonymous.get("/metrics").text
    assert "tenant=" not in text
    assert "admin" not in text.replace("/v1/admin", "")


def test_concurrent_increments_are_not_lost():
    watch = Telemetry()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: watch.batches.observe(1), range(2000)))
    assert sample(watch, "tarn_batch_statements_count") == 2000


# Traces


def test_span_is_a_null_context_and_no_middleware_is_added_without_an_endpoint(api: InProcessApi):
    watch = build_telemetry(load_settings(), "api")
    assert isinstance(watch.span("query"), nullcontext)
    added = repr(create_app(api.services).user_middleware)
    assert ("RequestMiddleware" in added, "TraceMiddleware" in added) == (True, False)


def test_opentelemetry_sdk_is_not_imported_unless_traces_are_sent():
    command = "import sys, tarn.main; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    assert subprocess.check_output([sys.executable, "-c", command], text=True).strip() == "[]"


def test_endpoint_without_the_extra_refuses_to_start_and_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartRefused, match=r"tarn\[otel\]"):
        build_telemetry(load_settings(traces_endpoint="http://127.0.0.1:9/v1/traces"), "api")
