"""Health, readiness, metrics, the OpenAPI document, CORS."""

from datetime import timedelta

import pytest

from app.api.access import TABLE
from app.db import workers
from app.db.tables import workers as table
from app.errors import Unavailable, problem_types
from app.model.ids import now
from tests.house import House


def test_alive_without_a_key(house: House):
    assert house.nobody.get("/healthz").json() == {"status": "ok"}


def test_ready_tells_of_a_worker_that_lives_and_of_one_that_fell_silent(house: House):
    with house.services.database.write() as connection:
        workers.register(connection, "w1")
    lively = house.nobody.get("/readyz")
    with house.services.database.write() as connection:
        connection.execute(table.update().values(seen=now() - timedelta(minutes=5)))
    silent = house.nobody.get("/readyz")

    assert (lively.status_code, lively.json()["status"], lively.json()["worker"]) == (200, "ready", "ok")
    assert (silent.status_code, silent.json()["status"], silent.json()["worker"]) == (200, "degraded", "silent")


@pytest.mark.parametrize("part", ["database", "storage"])
def test_not_ready_without_its_database_or_its_store(house: House, part: str, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object, **__: object) -> None:
        raise Unavailable("gone")

    if part == "database":
        monkeypatch.setattr(house.services.database, "read", gone)
    else:
        monkeypatch.setattr(house.services.store, "head", gone)

    answer = house.nobody.get("/readyz")

    assert (answer.status_code, answer.json()["status"], answer.json()[part]) == (503, "unavailable", "down")


def test_metrics_count_by_route_and_not_by_path(house: House):
    house.dataset("donations")
    house.admin.get("/v1/datasets/donations")
    house.nobody.get("/v1/nothing/at/all")
    house.nobody("SHOUT", "/healthz")

    text = house.nobody.get("/metrics").text

    assert 'tarn_http_requests_total{method="GET",route="/v1/datasets/{dataset}",status="200"} 1.0' in text
    assert 'route="unmatched",status="404"' in text
    assert "donations" not in text
    assert "SHOUT" not in text


def test_metrics_leave_the_api_when_they_have_a_port_of_their_own(house: House):
    settings = house.services.settings.model_copy(update={"metrics_port": 9000})
    moved = House(type(house.services)(**vars(house.services) | {"settings": settings}), str(house.admin.key))

    assert moved.nobody.get("/metrics").status_code == 404


def test_openapi_has_every_route_by_a_short_name_with_its_problems(house: House):
    document = house.nobody.get("/openapi.json").json()
    operations = {op["operationId"]: op for path in document["paths"].values() for op in path.values()}

    assert operations.keys() == TABLE.keys()
    for name, operation in operations.items():
        identified = TABLE[name].identified
        assert ("401" in operation["responses"]) is identified, name
        assert ("security" in operation) is identified, name
        assert [status for status in operation["responses"] if status < "300"], name
        for status, response in operation["responses"].items():
            if status >= "400" and name != "ready":
                assert list(response["content"]) == ["application/problem+json"], (name, status)


def test_openapi_has_one_closed_enum_of_problems(house: House):
    schemas = house.nobody.get("/openapi.json").json()["components"]["schemas"]

    assert schemas["ProblemSlug"]["enum"] == list(problem_types())
    assert [name for name in schemas if "__" in name or name.endswith(("-Input", "-Output"))] == []


def test_only_configured_origins_may_call_from_a_browser(house: House):
    settings = house.services.settings.model_copy(update={"cors_origins": ("https://app.example",)})
    open_house = House(type(house.services)(**vars(house.services) | {"settings": settings}), str(house.admin.key))
    welcome = open_house.nobody.get("/healthz", headers={"Origin": "https://app.example"})
    stranger = open_house.nobody.get("/healthz", headers={"Origin": "https://evil.example"})

    assert welcome.headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert "Access-Control-Allow-Origin" not in stranger.headers
