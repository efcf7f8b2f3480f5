"""Health, readiness, metrics, the OpenAPI document, CORS."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tarn.api.http.route_access import TABLE
from tarn.api.routes import system
from tarn.db import worker_heartbeats
from tarn.db.tables import workers as table
from tarn.errors import Unavailable, problem_types
from tarn.model.ids import now

from tests.in_process_api import InProcessApi


def test_health_is_answered_without_a_key(api: InProcessApi):
    assert api.anonymous.get("/healthz").json() == {"status": "ok"}


def test_readiness_reports_a_live_worker_and_one_without_heartbeat(api: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(system, "READY_SECONDS", 0.0)
    with api.services.database.write() as connection:
        worker_heartbeats.register(connection, "w1")
    live = api.anonymous.get("/readyz")
    with api.services.database.write() as connection:
        connection.execute(table.update().values(seen=now() - timedelta(minutes=5)))
    stale = api.anonymous.get("/readyz")

    assert (live.status_code, live.json()["status"], live.json()["worker"]) == (200, "ready", "ok")
    assert (stale.status_code, stale.json()["status"], stale.json()["worker"]) == (200, "degraded", "silent")


def test_concurrent_readiness_requests_share_one_check(api: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    checks: list[str] = []
    head = api.services.store.head

    def record_head(path: str) -> object:
        checks.append(path)
        return head(path)

    monkeypatch.setattr(api.services.store, "head", record_head)
    monkeypatch.setattr(system, "READY_SECONDS", 60.0)
    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(lambda _: api.anonymous.get("/readyz").status_code, range(60)))
    monkeypatch.setattr(system, "READY_SECONDS", 0.0)
    api.anonymous.get("/readyz")

    assert (responses, len(checks)) == ([200] * 60, 2)


@pytest.mark.parametrize("part", ["database", "storage"])
def test_readiness_fails_without_database_or_store(api: InProcessApi, part: str, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object, **__: object) -> None:
        raise Unavailable("gone")

    if part == "database":
        monkeypatch.setattr(api.services.database, "read", gone)
    else:
        monkeypatch.setattr(api.services.store, "head", gone)

    response = api.anonymous.get("/readyz")

    assert (response.status_code, response.json()["status"], response.json()[part]) == (503, "unavailable", "down")


def test_metrics_count_by_route_and_not_by_path(api: InProcessApi):
    api.dataset("donations")
    api.admin.get("/v1/datasets/donations")
    api.anonymous.get("/v1/nothing/at/all")
    api.anonymous("SHOUT", "/healthz")

    text = api.anonymous.get("/metrics").text

    assert 'tarn_http_requests_total{method="GET",route="/v1/datasets/{dataset}",status="200"} 1.0' in text
    assert 'route="unmatched",status="404"' in text
    assert "donations" not in text
    assert "SHOUT" not in text


def test_metrics_are_not_on_the_api_when_they_have_their_own_port(api: InProcessApi):
    settings = api.services.settings.model_copy(update={"metrics_port": 9000})
    moved = InProcessApi(type(api.services)(**vars(api.services) | {"settings": settings}), str(api.admin.key))

    assert moved.anonymous.get("/metrics").status_code == 404


def test_openapi_has_every_route_with_a_short_operation_id_and_its_problems(api: InProcessApi):
    document = api.anonymous.get("/openapi.json").json()
    operations = {op["operationId"]: op for path in document["paths"].values() for op in path.values()}

    assert operations.keys() == TABLE.keys() - {"openapi", "docs"}
    for name, operation in operations.items():
        identified = TABLE[name].identified
        assert ("401" in operation["responses"]) is identified, name
        assert ("security" in operation) is identified, name
        assert [status for status in operation["responses"] if status < "300"], name
        for status, response in operation["responses"].items():
            if status >= "400" and name != "ready":
                assert list(response["content"]) == ["application/problem+json"], (name, status)


def test_openapi_lists_the_problems_of_a_full_store_and_of_unreadable_documents(api: InProcessApi):
    document = api.anonymous.get("/openapi.json").json()
    operations = {(method, op["operationId"]): op for path in document["paths"].values() for method, op in path.items()}
    unreadable = {name for (_, name), op in operations.items() if "DocumentInvalidProblem" in str(op["responses"])}

    writing = {(method, name) for method, name in operations if method not in ("get", "head")}
    assert {operation for operation, op in operations.items() if "507" in op["responses"]} == writing
    documents = {"get_catalog", "get_catalog_json", "update_catalog", "get_dataset", "update_dataset", "delete_dataset"}
    assert unreadable == documents | {"list_exports", "get_freshness", "get_mapping", "process_mapping"}


def test_documentation_page_shows_every_operation_and_loads_nothing_from_elsewhere(api: InProcessApi):
    paths = api.anonymous.get("/openapi.json").json()["paths"]

    response = api.anonymous.get("/docs")

    assert response.headers["Content-Type"].startswith("text/html")
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert [path for path in paths if f"<code>{path}</code>" not in response.text] == []
    assert "//" not in response.text
    assert "<script" not in response.text


def test_openapi_has_one_closed_enum_of_problems(api: InProcessApi):
    schemas = api.anonymous.get("/openapi.json").json()["components"]["schemas"]

    assert schemas["ProblemSlug"]["enum"] == list(problem_types())
    assert [name for name in schemas if "__" in name or name.endswith(("-Input", "-Output"))] == []


@pytest.fixture
def cors_api(api: InProcessApi) -> InProcessApi:
    """Return services whose API allows one CORS origin."""
    settings = api.services.settings.model_copy(update={"cors_origins": ("https://app.example",)})
    return InProcessApi(type(api.services)(**vars(api.services) | {"settings": settings}), str(api.admin.key))


def test_only_configured_origins_may_call_from_a_browser(cors_api: InProcessApi):
    allowed = cors_api.anonymous.get("/healthz", headers={"Origin": "https://app.example"})
    refused = cors_api.anonymous.get("/healthz", headers={"Origin": "https://evil.example"})

    assert allowed.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "Access-Control-Allow-Origin" not in refused.headers


def test_preflight_has_an_id_and_its_refusal_is_a_problem(cors_api: InProcessApi):
    headers = {"Access-Control-Request-Method": "GET"}
    allowed = cors_api.anonymous("OPTIONS", "/v1/whoami", headers | {"Origin": "https://app.example"})
    refused = cors_api.anonymous("OPTIONS", "/v1/whoami", headers | {"Origin": "https://evil.example"})

    assert (allowed.status_code, refused.status_code) == (200, 403)
    assert refused.headers["Content-Type"] == "application/problem+json"
    assert refused.json()["instance"] == "/v1/whoami"
    assert allowed.headers["X-Request-ID"]
    assert refused.headers["X-Request-ID"]
    assert 'method="OPTIONS",route="unmatched",status="403"' in cors_api.anonymous.get("/metrics").text


def test_allowed_origin_may_read_an_unexpected_error(cors_api: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: object) -> None:
        raise RuntimeError

    cors_api.dataset("donations")
    monkeypatch.setattr(cors_api.services.store, "get", explode)

    response = cors_api.admin.get("/v1/datasets/donations", headers={"Origin": "https://app.example"})

    assert response.status_code == 500
    assert response.headers["Access-Control-Allow-Origin"] == "https://app.example"
