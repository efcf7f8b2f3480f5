"""Every error there is, as a problem document."""

import time

import pytest
from tarn.errors import problem_types

from tests.in_process_api import ONE_DATABASE, InProcessApi

JSON = {"accept": "application/json", "content-type": "application/json"}


def assert_problem(answer, status: int, slug: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["X-Request-ID"]
    problem = answer.json()
    assert problem["type"] == f"/problems/{slug}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"] == answer.request.url.path
    return problem


def test_unknown_route(house: InProcessApi):
    assert_problem(house.nobody.get("/v1/nothing"), 404, "route-not-found")


def test_wrong_method_names_the_right_ones(house: InProcessApi):
    answer = house.admin.delete("/v1/whoami")

    problem = assert_problem(answer, 405, "method-not-allowed")
    assert problem["allowed"] == ["GET"]
    assert answer.headers["Allow"] == "GET"


def test_wrong_method_names_those_of_every_route_at_the_path(house: InProcessApi):
    answer = house.admin.put("/v1/datasets/donations", {})

    assert assert_problem(answer, 405, "method-not-allowed")["allowed"] == ["DELETE", "GET", "PATCH"]
    assert answer.headers["Allow"] == "DELETE, GET, PATCH"


def test_path_with_a_slash_too_many_is_not_redirected_to_where_the_host_header_says(house: InProcessApi):
    answer = house.admin.get("/v1/datasets/", headers={"Host": "evil.example"}, follow_redirects=False)

    assert_problem(answer, 404, "route-not-found")


@pytest.mark.parametrize(
    ("body", "line", "reason"),
    [
        (b"{", 1, "unexpected end of data"),
        (b'{"name":\n "a",}', 2, "trailing comma"),
        (b'{"name": NaN}', 1, ""),
        (b'{"name": "\xff"}', 1, "not valid UTF-8"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 1, "depth limit"),
        (b'{"name": "\\ud800"}', 1, ""),
    ],
)
def test_malformed_json_names_line_and_reason(house: InProcessApi, body: bytes, line: int, reason: str):
    answer = house.admin("POST", "/v1/datasets", content=body, headers={"Content-Type": "application/json"})

    problem = assert_problem(answer, 400, "invalid-format")
    assert problem["errors"][0]["line"] == line
    assert reason in problem["errors"][0]["reason"]


def test_no_body(house: InProcessApi):
    answer = house.admin("POST", "/v1/datasets", content=b" ", headers={"Content-Type": "application/json"})

    assert_problem(answer, 400, "empty-body")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-ndjson", "application/octet-stream", None])
def test_body_of_another_type(house: InProcessApi, kind: str | None):
    answer = house.admin(
        "POST", "/v1/datasets", content=b'{"name": "a"}', headers={"Content-Type": kind} if kind else {}
    )

    assert assert_problem(answer, 415, "unsupported-media-type")["supported"] == ["application/json"]


def test_answer_the_caller_does_not_accept(house: InProcessApi):
    answer = house.admin.get("/v1/datasets", headers={"Accept": "text/csv, application/json;q=0"})

    assert_problem(answer, 406, "not-acceptable")


@pytest.mark.parametrize(
    "accept",
    ["application/json", "*/*", "text/html, application/*;q=0.1", "APPLICATION/JSON ; Q=1", "a, */*;x=y;q=nonsense"],
)
def test_answer_the_caller_accepts(house: InProcessApi, accept: str):
    assert house.admin.get("/v1/datasets", headers={"Accept": accept}).status_code == 200


@pytest.mark.parametrize("name", ["accept", "content-type"])
def test_media_type_that_is_costly_to_parse_is_refused(house: InProcessApi, name: str):
    hostile = 'application/json;x="' + ";" * 60_000
    begun = time.perf_counter()

    answer = house.admin("POST", "/v1/datasets", content=b'{"name": "a"}', headers=JSON | {name: hostile})

    assert assert_problem(answer, 422, "schema-violation")["errors"][0]["field"] == f"header.{name}"
    assert time.perf_counter() - begun < 1


def test_unknown_query_parameter(house: InProcessApi):
    problem = assert_problem(house.admin.get("/v1/datasets?limt=5&x=1"), 422, "schema-violation")

    assert [error["field"] for error in problem["errors"]] == ["query.limt", "query.x"]
    assert "cursor, limit" in problem["errors"][0]["reason"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=", "cursor=%00", "cursor=abc"])
def test_bad_query_value(house: InProcessApi, query: str):
    problem = assert_problem(house.admin.get(f"/v1/datasets?{query}"), 422, "schema-violation")

    assert problem["errors"][0]["field"] == f"query.{query.split('=')[0]}"


def test_cursor_of_another_list_or_tenant_is_refused(house: InProcessApi):
    for name in ("a", "b", "c"):
        house.dataset(name)
    cursor = house.admin.get("/v1/datasets?limit=1").json()["next"]
    alice = house.tenant("alice", any="read")

    assert_problem(house.admin.get(f"/v1/admin/tenants?cursor={cursor}"), 422, "schema-violation")
    assert_problem(alice.get(f"/v1/datasets?cursor={cursor}"), 422, "schema-violation")


@pytest.mark.parametrize("name", ["..%2f..", "a%00b", "A", "a%20b", "x" * 256, "versions"])
def test_impossible_dataset_in_a_path(house: InProcessApi, name: str):
    answer = house.admin.get(f"/v1/datasets/{name}")

    assert answer.status_code in (404, 422)
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert house.nobody.get(f"/v1/datasets/{name}").status_code in (401, 404)


@pytest.mark.parametrize("path", ["jobs/%00", "admin/keys/%00", "admin/tenants/%00", "datasets/a/versions/%00/%00"])
def test_character_that_no_database_keeps_in_a_path(house: InProcessApi, path: str):
    house.dataset("a")

    assert house.admin.get(f"/v1/{path}").status_code in (404, 405, 422)
    assert house.nobody.get(f"/v1/{path}").status_code in (401, 404, 405)


def test_unexpected_exception_leaks_nothing(house: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: object) -> None:
        raise RuntimeError("secret /etc/passwd")

    monkeypatch.setattr(house.services.store, "get", explode)
    house.dataset("donations")

    answer = house.admin.get("/v1/datasets/donations")

    assert_problem(answer, 500, "internal")
    assert "secret" not in answer.text
    assert "RuntimeError" not in answer.text


def test_database_that_is_gone_is_503_and_comes_back(house: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    from sqlalchemy.exc import OperationalError

    with monkeypatch.context() as gone:

        def refuse(*_: object, **__: object) -> None:
            raise OperationalError("SELECT secret", {}, Exception("connection refused"))

        gone.setattr(house.services.database.engine, "connect", refuse)
        answer = house.admin.get("/v1/whoami")

    assert_problem(answer, 503, "unavailable")
    assert answer.headers["Retry-After"]
    assert "SELECT" not in answer.text
    assert house.admin.get("/v1/whoami").status_code == 200


def test_request_id_is_taken_when_it_is_sane_and_made_when_not(house: InProcessApi):
    taken = house.nobody.get("/healthz", headers={"X-Request-ID": "mine-1"})
    made = house.nobody.get("/healthz", headers={"X-Request-ID": "x" * 200})

    assert taken.headers["X-Request-ID"] == "mine-1"
    assert len(made.headers["X-Request-ID"]) == 36


@ONE_DATABASE
def test_every_problem_type_is_explained_where_it_points(house: InProcessApi):
    explained = {slug: house.nobody.get(f"/problems/{slug}").json() for slug in problem_types()}

    assert {slug: (one["type"], one["status"]) for slug, one in explained.items()} == {
        slug: (f"/problems/{slug}", known.status) for slug, known in problem_types().items()
    }
