"""What a process tells of its work: each stage of the flow moves its own metrics; tracing costs nothing when off."""

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


def told(text: str) -> dict[str, float]:
    """Every sample of an exposition; its labels follow its name, as they are written."""
    return {
        sample.name + "".join(f" {value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(house: InProcessApi) -> dict[str, float]:
    return told(house.nobody.get("/metrics").text)


def of(watch: Telemetry, name: str, **labels: str) -> float:
    return watch.registry.get_sample_value(name, labels) or 0.0


def test_a_write_shows_in_the_size_of_batches_and_in_the_journals_depth_and_age(house: InProcessApi):
    house.dataset("test")
    before = scrape(house)
    assert house.admin.post("/v1/datasets/test/entities", [JANE]).status_code == 200
    after = scrape(house)

    assert (before["tarn_batch_statements_count"], after["tarn_batch_statements_count"]) == (0, 1)
    assert after["tarn_batch_statements_sum"] == after["tarn_journal_rows"] == 2
    assert after["tarn_journal_commit_seconds_count"] == after["tarn_journal_commit_batches_count"] == 1
    assert after["tarn_journal_datasets"] == 1
    assert after["tarn_journal_characters"] >= len("Jane Doe")
    assert after["tarn_journal_oldest_seconds"] > 0
    assert (before["tarn_journal_rows"], before["tarn_journal_oldest_seconds"]) == (0, 0)


@ONE_DATABASE
def test_a_large_body_is_one_batch_of_all_its_statements(house: InProcessApi):
    house.dataset("test")
    many = "\n".join(f'{{"id": "{n}", "schema": "Person", "properties": {{"name": ["N{n}"]}}}}' for n in range(3000))
    house.admin("POST", "/v1/datasets/test/entities", {"Content-Type": "application/x-ndjson"}, content=many)
    after = scrape(house)
    assert (after["tarn_batch_statements_count"], after["tarn_batch_statements_sum"]) == (1, 6000)


@ONE_DATABASE
def test_a_repeated_request_is_no_second_batch(house: InProcessApi):
    house.dataset("test")
    for _ in range(2):
        house.admin.post("/v1/datasets/test/entities", [JANE], headers={"Idempotency-Key": "once"})
    assert scrape(house)["tarn_batch_statements_count"] == 1


@ONE_DATABASE
def test_a_read_shows_in_the_time_of_queries(house: InProcessApi):
    house.dataset("test")
    house.admin.post("/v1/datasets/test/entities", [JANE])
    before = scrape(house)["tarn_query_seconds_count"]
    assert house.admin.get("/v1/datasets/test/entities/jane").status_code == 200
    after = scrape(house)
    assert after["tarn_query_seconds_count"] > before
    assert after["tarn_query_seconds_sum"] > 0
    assert after["tarn_queries_failed_total"] == 0


@ONE_DATABASE
def test_a_flush_shows_in_its_lag_and_size_and_as_a_snapshot(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services, watch = house.services, Telemetry()
    house.admin.post("/v1/datasets/test/entities", [JANE])
    flusher = SparkFlusher(
        services.settings, services.database, services.store, "tester", kernels=lambda: kernels, watch=watch
    )
    made = flusher.flush([dataset.id], lambda: None)[dataset.id]

    assert not isinstance(made, Exception)
    assert of(watch, "tarn_flush_lag_seconds_count") == 1
    assert of(watch, "tarn_flush_lag_seconds_sum") > 0
    assert of(watch, "tarn_flush_statements_sum") == 2
    assert of(watch, "tarn_flush_round_seconds_count") == 1
    assert of(watch, "tarn_snapshots_total", operation="flush") == 1
    assert of(watch, "tarn_publish_seconds_count", operation="flush") == 1
    assert of(watch, "tarn_commit_retries_total", why="Refused") == 0
    assert scrape(house)["tarn_journal_rows"] == 0


@ONE_DATABASE
def test_every_try_to_publish_that_is_lost_is_counted_with_its_reason(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services, watch = house.services, Telemetry()
    settings = services.settings.model_copy(update={"commit_retries": 2})
    house.admin.post("/v1/datasets/test/entities", [JANE])
    faulty = FaultyStore(services.store)
    faulty.fail("put_new", "*/snapshots/*", PathExists("exists"), every=True)
    publisher = SnapshotPublisher(services.database, faulty, settings, "tester", watch=watch)
    done = Flush(services.database, faulty, publisher, lambda: kernels, watch=watch).run([dataset], lambda: None)

    assert isinstance(done[dataset.id].error, SnapshotConflict)
    assert of(watch, "tarn_commit_retries_total", why="Refused") == 3
    assert of(watch, "tarn_snapshots_total", operation="flush") == 0
    assert of(watch, "tarn_flush_lag_seconds_count") == 0


def test_an_export_is_stale_from_when_its_dataset_moves_on(
    house: InProcessApi, dataset: Dataset, kernels: DirectKernels
):
    services = house.services
    watch = Telemetry()
    flusher = SparkFlusher(
        services.settings, services.database, services.store, "tester", kernels=lambda: kernels, watch=watch
    )
    worker = Worker(services.settings, services.database, services.store, flusher, flusher.maintenance(), watch=watch)
    house.admin.post("/v1/datasets/test/entities", [JANE])
    assert house.admin.post("/v1/datasets/test/operations/export", {"kinds": ["statistics"]}).status_code == 202
    assert worker.step()
    fresh = scrape(house)["tarn_export_stale_seconds statistics"]
    with services.database.write() as connection:
        connection.execute(update(exports).values(made=now() - timedelta(days=3)))
    house.admin.post("/v1/datasets/test/entities", [JANE | {"id": "john"}])
    flusher.flush([dataset.id], lambda: None)
    stale = scrape(house)

    assert fresh == 0
    assert stale["tarn_export_stale_seconds statistics"] > 2 * 86_400
    assert stale["tarn_export_stale_seconds entities"] == 0, "it was never made"
    assert of(watch, "tarn_job_seconds_count", operation="export", outcome="done") == 1


# Tenants


def test_tenants_are_told_apart_up_to_as_many_as_are_allowed():
    metrics = Metrics(tenants=2)
    for tenant in ("one", "two", "three", "one", None):
        metrics.answered("GET", "/v1/whoami", 200, 0.1, tenant)
    counted = {
        name: value
        for name, value in told(metrics.exposition().decode()).items()
        if name.startswith("tarn_http_requests_total")
    }
    assert counted == {
        "tarn_http_requests_total GET /v1/whoami 200 one": 2,
        "tarn_http_requests_total GET /v1/whoami 200 two": 1,
        "tarn_http_requests_total GET /v1/whoami 200 other": 1,
        "tarn_http_requests_total GET /v1/whoami 200 ": 1,
    }


@ONE_DATABASE
def test_no_tenant_is_named_unless_it_is_asked_for(house: InProcessApi):
    house.admin.get("/v1/whoami")
    text = house.nobody.get("/metrics").text
    assert "tenant=" not in text
    assert "admin" not in text.replace("/v1/admin", "")


def test_counting_from_many_threads_loses_nothing():
    watch = Telemetry()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: watch.batches.observe(1), range(2000)))
    assert of(watch, "tarn_batch_statements_count") == 2000


# Traces


def test_without_an_endpoint_a_span_is_nothing_and_no_middleware_is_added(house: InProcessApi):
    watch = build_telemetry(load_settings(), "api")
    assert isinstance(watch.span("query"), nullcontext)
    added = repr(create_app(house.services).user_middleware)
    assert ("RequestScope" in added, "TraceScope" in added) == (True, False)


def test_opentelemetrys_own_code_is_not_even_loaded_unless_traces_are_sent():
    look = "import sys, tarn.main; print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    assert subprocess.check_output([sys.executable, "-c", look], text=True).strip() == "[]"


def test_an_endpoint_without_the_extra_refuses_the_start_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartRefused, match=r"tarn\[otel\]"):
        build_telemetry(load_settings(traces_endpoint="http://127.0.0.1:9/v1/traces"), "api")
