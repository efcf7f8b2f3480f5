"""Every error as a problem document."""

import time

import pytest
from tarn.errors import problem_types

from tests.in_process_api import ONE_DATABASE, InProcessApi

JSON = {"accept": "application/json", "content-type": "application/json"}


def assert_problem(response, status: int, slug: str) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["X-Request-ID"]
    problem = response.json()
    assert problem["type"] == f"/problems/{slug}"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"] == response.request.url.path
    return problem


def test_unknown_route_is_not_found(api: InProcessApi):
    assert_problem(api.anonymous.get("/v1/nothing"), 404, "route-not-found")


def test_wrong_method_lists_the_allowed_ones(api: InProcessApi):
    response = api.admin.delete("/v1/whoami")

    problem = assert_problem(response, 405, "method-not-allowed")
    assert problem["allowed"] == ["GET"]
    assert response.headers["Allow"] == "GET"


def test_wrong_method_lists_those_of_every_route_at_the_path(api: InProcessApi):
    response = api.admin.put("/v1/datasets/donations", {})

    assert assert_problem(response, 405, "method-not-allowed")["allowed"] == ["DELETE", "GET", "PATCH"]
    assert response.headers["Allow"] == "DELETE, GET, PATCH"


def test_path_with_an_extra_slash_is_not_redirected_to_the_host_header(api: InProcessApi):
    response = api.admin.get("/v1/datasets/", headers={"Host": "evil.example"}, follow_redirects=False)

    assert_problem(response, 404, "route-not-found")


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
def test_malformed_json_names_line_and_reason(api: InProcessApi, body: bytes, line: int, reason: str):
    response = api.admin("POST", "/v1/datasets", content=body, headers={"Content-Type": "application/json"})

    problem = assert_problem(response, 400, "invalid-format")
    assert problem["errors"][0]["line"] == line
    assert reason in problem["errors"][0]["reason"]


def test_missing_body_is_refused(api: InProcessApi):
    response = api.admin("POST", "/v1/datasets", content=b" ", headers={"Content-Type": "application/json"})

    assert_problem(response, 400, "empty-body")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-ndjson", "application/octet-stream", None])
def test_body_of_another_media_type_is_refused(api: InProcessApi, kind: str | None):
    response = api.admin(
        "POST", "/v1/datasets", content=b'{"name": "a"}', headers={"Content-Type": kind} if kind else {}
    )

    assert assert_problem(response, 415, "unsupported-media-type")["supported"] == ["application/json"]


def test_response_type_that_the_caller_does_not_accept_is_refused(api: InProcessApi):
    response = api.admin.get("/v1/datasets", headers={"Accept": "text/csv, application/json;q=0"})

    assert_problem(response, 406, "not-acceptable")


@pytest.mark.parametrize(
    "accept",
    ["application/json", "*/*", "text/html, application/*;q=0.1", "APPLICATION/JSON ; Q=1", "a, */*;x=y;q=nonsense"],
)
def test_response_type_that_the_caller_accepts_is_sent(api: InProcessApi, accept: str):
    assert api.admin.get("/v1/datasets", headers={"Accept": accept}).status_code == 200


@pytest.mark.parametrize("name", ["accept", "content-type"])
def test_media_type_that_is_costly_to_parse_is_refused(api: InProcessApi, name: str):
    hostile = 'application/json;x="' + ";" * 60_000
    begun = time.perf_counter()

    response = api.admin("POST", "/v1/datasets", content=b'{"name": "a"}', headers=JSON | {name: hostile})

    assert assert_problem(response, 422, "schema-violation")["errors"][0]["field"] == f"header.{name}"
    assert time.perf_counter() - begun < 1


def test_unknown_query_parameter_is_refused(api: InProcessApi):
    problem = assert_problem(api.admin.get("/v1/datasets?limt=5&x=1"), 422, "schema-violation")

    assert [error["field"] for error in problem["errors"]] == ["query.limt", "query.x"]
    assert "cursor, limit" in problem["errors"][0]["reason"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=", "cursor=%00", "cursor=abc"])
def test_bad_query_value_is_refused(api: InProcessApi, query: str):
    problem = assert_problem(api.admin.get(f"/v1/datasets?{query}"), 422, "schema-violation")

    assert problem["errors"][0]["field"] == f"query.{query.split('=')[0]}"


def test_cursor_of_another_list_or_tenant_is_refused(api: InProcessApi):
    for name in ("a", "b", "c"):
        api.dataset(name)
    cursor = api.admin.get("/v1/datasets?limit=1").json()["next"]
    alice = api.tenant("alice", any="read")

    assert_problem(api.admin.get(f"/v1/admin/tenants?cursor={cursor}"), 422, "schema-violation")
    assert_problem(alice.get(f"/v1/datasets?cursor={cursor}"), 422, "schema-violation")


@pytest.mark.parametrize("name", ["..%2f..", "a%00b", "A", "a%20b", "x" * 256, "versions"])
def test_impossible_dataset_name_in_a_path_is_refused(api: InProcessApi, name: str):
    response = api.admin.get(f"/v1/datasets/{name}")

    assert response.status_code in (404, 422)
    assert response.headers["Content-Type"] == "application/problem+json"
    assert api.anonymous.get(f"/v1/datasets/{name}").status_code in (401, 404)


@pytest.mark.parametrize("path", ["jobs/%00", "admin/keys/%00", "admin/tenants/%00", "datasets/a/versions/%00/%00"])
def test_character_that_no_database_stores_in_a_path_is_refused(api: InProcessApi, path: str):
    api.dataset("a")

    assert api.admin.get(f"/v1/{path}").status_code in (404, 405, 422)
    assert api.anonymous.get(f"/v1/{path}").status_code in (401, 404, 405)


def test_unexpected_exception_leaks_nothing(api: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: object) -> None:
        raise RuntimeError("secret /etc/passwd")

    monkeypatch.setattr(api.services.store, "get", explode)
    api.dataset("donations")

    response = api.admin.get("/v1/datasets/donations")

    assert_problem(response, 500, "internal")
    assert "secret" not in response.text
    assert "RuntimeError" not in response.text


def test_unreachable_database_is_503_until_it_is_back(api: InProcessApi, monkeypatch: pytest.MonkeyPatch):
    from sqlalchemy.exc import OperationalError

    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise OperationalError("SELECT secret", {}, Exception("connection refused"))

        patch.setattr(api.services.database.engine, "connect", refuse)
        response = api.admin.get("/v1/whoami")

    assert_problem(response, 503, "unavailable")
    assert response.headers["Retry-After"]
    assert "SELECT" not in response.text
    assert api.admin.get("/v1/whoami").status_code == 200


def test_valid_request_id_is_kept_and_an_invalid_one_is_replaced(api: InProcessApi):
    valid = api.anonymous.get("/healthz", headers={"X-Request-ID": "mine-1"})
    replaced = api.anonymous.get("/healthz", headers={"X-Request-ID": "x" * 200})

    assert valid.headers["X-Request-ID"] == "mine-1"
    assert len(replaced.headers["X-Request-ID"]) == 36


@ONE_DATABASE
def test_every_problem_type_is_documented_at_its_url(api: InProcessApi):
    documents = {slug: api.anonymous.get(f"/problems/{slug}").json() for slug in problem_types()}

    assert {slug: (document["type"], document["status"]) for slug, document in documents.items()} == {
        slug: (f"/problems/{slug}", problem.status) for slug, problem in problem_types().items()
    }
