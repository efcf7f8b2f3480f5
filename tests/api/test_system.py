"""Health, readiness, metrics, the OpenAPI document, CORS."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from tarn.api.http.route_access import TABLE
from tarn.api.routes import system
from tarn.db import worker_heartbeats as workers
from tarn.db.tables import workers as table
from tarn.errors import Unavailable, problem_types
from tarn.model.ids import now

from tests.in_process_api import InProcessApi


def test_alive_without_a_key(house: InProcessApi):
    assert house.nobody.get("/healthz").json() == {"status": "ok"}


def test_ready_tells_of_a_worker_that_lives_and_of_one_that_fell_silent(
    house: InProcessApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(system, "READY_SECONDS", 0.0)
    with house.services.database.write() as connection:
        workers.register(connection, "w1")
    lively = house.nobody.get("/readyz")
    with house.services.database.write() as connection:
        connection.execute(table.update().values(seen=now() - timedelta(minutes=5)))
    silent = house.nobody.get("/readyz")

    assert (lively.status_code, lively.json()["status"], lively.json()["worker"]) == (200, "ready", "ok")
    assert (silent.status_code, silent.json()["status"], silent.json()["worker"]) == (200, "degraded", "silent")


def test_many_who_ask_whether_it_is_ready_make_one_look(house: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    looks: list[str] = []
    head = house.services.store.head

    def note(path: str) -> object:
        looks.append(path)
        return head(path)

    monkeypatch.setattr(house.services.store, "head", note)
    monkeypatch.setattr(system, "READY_SECONDS", 60.0)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: house.nobody.get("/readyz").status_code, range(60)))
    monkeypatch.setattr(system, "READY_SECONDS", 0.0)
    house.nobody.get("/readyz")

    assert (answers, len(looks)) == ([200] * 60, 2)


@pytest.mark.parametrize("part", ["database", "storage"])
def test_not_ready_without_its_database_or_its_store(house: InProcessApi, part: str, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object, **__: object) -> None:
        raise Unavailable("gone")

    if part == "database":
        monkeypatch.setattr(house.services.database, "read", gone)
    else:
        monkeypatch.setattr(house.services.store, "head", gone)

    answer = house.nobody.get("/readyz")

    assert (answer.status_code, answer.json()["status"], answer.json()[part]) == (503, "unavailable", "down")


def test_metrics_count_by_route_and_not_by_path(house: InProcessApi):
    house.dataset("donations")
    house.admin.get("/v1/datasets/donations")
    house.nobody.get("/v1/nothing/at/all")
    house.nobody("SHOUT", "/healthz")

    text = house.nobody.get("/metrics").text

    assert 'tarn_http_requests_total{method="GET",route="/v1/datasets/{dataset}",status="200"} 1.0' in text
    assert 'route="unmatched",status="404"' in text
    assert "donations" not in text
    assert "SHOUT" not in text


def test_metrics_leave_the_api_when_they_have_a_port_of_their_own(house: InProcessApi):
    settings = house.services.settings.model_copy(update={"metrics_port": 9000})
    moved = InProcessApi(type(house.services)(**vars(house.services) | {"settings": settings}), str(house.admin.key))

    assert moved.nobody.get("/metrics").status_code == 404


def test_openapi_has_every_route_by_a_short_name_with_its_problems(house: InProcessApi):
    document = house.nobody.get("/openapi.json").json()
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


def test_openapi_tells_of_a_full_store_and_of_unreadable_documents(house: InProcessApi):
    document = house.nobody.get("/openapi.json").json()
    operations = {(method, op["operationId"]): op for path in document["paths"].values() for method, op in path.items()}
    unreadable = {name for (_, name), op in operations.items() if "DocumentInvalidProblem" in str(op["responses"])}

    writing = {(method, name) for method, name in operations if method not in ("get", "head")}
    assert {place for place, op in operations.items() if "507" in op["responses"]} == writing
    documents = {"get_catalog", "get_catalog_json", "update_catalog", "get_dataset", "update_dataset", "delete_dataset"}
    assert unreadable == documents | {"list_exports", "get_freshness", "get_mapping", "process_mapping"}


def test_page_of_the_documentation_shows_every_operation_and_asks_nobody_else(house: InProcessApi):
    paths = house.nobody.get("/openapi.json").json()["paths"]

    answer = house.nobody.get("/docs")

    assert answer.headers["Content-Type"].startswith("text/html")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert [path for path in paths if f"<code>{path}</code>" not in answer.text] == []
    assert "//" not in answer.text
    assert "<script" not in answer.text


def test_openapi_has_one_closed_enum_of_problems(house: InProcessApi):
    schemas = house.nobody.get("/openapi.json").json()["components"]["schemas"]

    assert schemas["ProblemSlug"]["enum"] == list(problem_types())
    assert [name for name in schemas if "__" in name or name.endswith(("-Input", "-Output"))] == []


@pytest.fixture
def open_house(house: InProcessApi) -> InProcessApi:
    """A house that pages of one origin may call."""
    settings = house.services.settings.model_copy(update={"cors_origins": ("https://app.example",)})
    return InProcessApi(type(house.services)(**vars(house.services) | {"settings": settings}), str(house.admin.key))


def test_only_configured_origins_may_call_from_a_browser(open_house: InProcessApi):
    welcome = open_house.nobody.get("/healthz", headers={"Origin": "https://app.example"})
    stranger = open_house.nobody.get("/healthz", headers={"Origin": "https://evil.example"})

    assert welcome.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "Access-Control-Allow-Origin" not in stranger.headers


def test_preflight_has_an_id_and_its_refusal_is_a_problem(open_house: InProcessApi):
    asked = {"Access-Control-Request-Method": "GET"}
    welcome = open_house.nobody("OPTIONS", "/v1/whoami", asked | {"Origin": "https://app.example"})
    stranger = open_house.nobody("OPTIONS", "/v1/whoami", asked | {"Origin": "https://evil.example"})

    assert (welcome.status_code, stranger.status_code) == (200, 403)
    assert stranger.headers["Content-Type"] == "application/problem+json"
    assert stranger.json()["instance"] == "/v1/whoami"
    assert welcome.headers["X-Request-ID"]
    assert stranger.headers["X-Request-ID"]
    assert 'method="OPTIONS",route="unmatched",status="403"' in open_house.nobody.get("/metrics").text


def test_page_may_read_an_error_that_nobody_foresaw(open_house: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: object) -> None:
        raise RuntimeError

    open_house.dataset("donations")
    monkeypatch.setattr(open_house.services.store, "get", explode)

    answer = open_house.admin.get("/v1/datasets/donations", headers={"Origin": "https://app.example"})

    assert answer.status_code == 500
    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
