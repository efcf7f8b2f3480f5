"""Write entities over HTTP."""

import gzip
import json

import pytest
from tarn.model.ids import now

from tests.in_process_api import NOTHING_LEFT_OUT, InProcessApi
from tests.journal import journal

NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}
JANE = {"id": "jane", "schema": "Person", "properties": {"name": ["Jane Doe"], "country": ["Germany"]}}
PATH = "/v1/datasets/test/entities"


def lines(*entities: object) -> bytes:
    return b"".join(json.dumps(entity).encode() + b"\n" for entity in entities)


def person(number: int, **properties) -> dict:
    return {"id": f"p{number}", "schema": "Person", "properties": {"name": [f"Person {number}"], **properties}}


@pytest.fixture(autouse=True)
def dataset(api: InProcessApi):
    api.dataset("test")


def test_entity_becomes_statements_with_the_ids_of_ftm(api: InProcessApi):
    response = api.admin.post(PATH, JANE, params={"origin": "crawl"})

    assert response.status_code == 200
    assert response.json() == {
        "entities": 1,
        "statements": 3,
        "rejected": 0,
        "commit": 1,
        "snapshot": None,
        **NOTHING_LEFT_OUT,
    }
    events = {row["prop"]: row for row in journal.rows(api)}
    assert events["name"]["id"].hex() == "d5f32d066d6f1679e1ba2bd0b1ef9f474b2e0cfd"
    assert (events["country"]["value"], events["country"]["original_value"]) == ("de", "Germany")
    assert {row["origin"] for row in events.values()} == {"crawl"}
    assert {
        (row["kind"], row["entity_id"], row["schema"], row["commit"], row["segment"]) for row in events.values()
    } == {(1, "jane", "Person", 1, 1)}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (lines(person(1), person(2)), NDJSON),
        (lines(person(1), person(2)).rstrip(), NDJSON),
        (b"\n\n" + lines(person(1)) + b"\r\n" + lines(person(2)), NDJSON),
        (lines(person(1), person(2)), {"Content-Type": "application/json+ftm"}),
        (json.dumps([person(1), person(2)], indent=2).encode(), JSON),
        (lines(person(1), person(2)), JSON),
        (gzip.compress(lines(person(1), person(2)), mtime=0), NDJSON | {"Content-Encoding": "gzip"}),
    ],
)
def test_every_format_of_the_same_entities_gives_the_same_statements(api: InProcessApi, body: bytes, headers: dict):
    response = api.admin("POST", PATH, content=body, headers=headers)

    assert (response.json()["entities"], response.json()["statements"]) == (2, 4)
    assert {row["entity_id"] for row in journal.rows(api)} == {"p1", "p2"}
    assert {row["origin"] for row in journal.rows(api)} == {"default"}


def test_large_body_is_inserted_in_chunks_and_is_one_batch(api: InProcessApi):
    body = lines(*(person(number) for number in range(15_000)))

    response = api.admin("POST", PATH, content=body, headers=NDJSON)

    rows = journal.rows(api)
    assert response.json()["statements"] == len(rows) == 30_000
    assert {(row["commit"], row["state"]) for row in rows} == {(1, "committed")}
    assert [row["position"] for row in rows] == list(range(30_000))
    assert len(journal.batches(api)) == 1
    assert journal.head(api)["rows"] == 30_000


@pytest.mark.parametrize("count", [10, 40_000])
@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (b'{"id": "x", "schema": "Banana"}', "schema", "'Banana' is not a schema"),
        (b'{"id": "x", "schema": "Person", "properties": {"imo": ["x"]}}', "properties.imo", "not a property"),
        (b'{"schema": "Person"}', "id", "is missing"),
        (b'{"id": "%s", "schema": "Person"}' % (b"x" * 256), "id", "256 characters"),
        (b'{"id": "x"', None, "JSON"),
        (b'{"id": "\xff", "schema": "Person"}', None, "JSON"),
        (b'"just a string"', None, "must be a JSON object"),
    ],
)
def test_bad_record_is_named_and_nothing_of_its_body_is_stored(
    api: InProcessApi, count: int, bad: bytes, field, reason: str
):
    good = lines(*(person(number) for number in range(count)))

    response = api.admin("POST", PATH, content=good + bad + b"\n" + good, headers=NDJSON)

    problem = response.json()
    assert (response.status_code, problem["type"]) == (422, "/problems/schema-violation")
    assert problem["errors"] == [{"line": count + 1, "field": field, "reason": problem["errors"][0]["reason"]}]
    assert reason in problem["errors"][0]["reason"]
    assert journal.count(api) == 0
    assert journal.batches(api) == []
    assert api.admin.get("/v1/whoami").json()["limits"]["used_statements"] == 0


def test_skip_stores_exactly_the_good_records_and_lists_the_first_hundred_bad(api: InProcessApi):
    body = b"".join(lines(person(number)) + b"broken\n" for number in range(150))

    response = api.admin("POST", PATH, content=body, headers=NDJSON, params={"on_error": "skip"}).json()

    assert (response["entities"], response["rejected"], len(response["errors"])) == (150, 150, 100)
    assert [error["line"] for error in response["errors"][:3]] == [2, 4, 6]
    assert {row["entity_id"] for row in journal.rows(api)} == {f"p{number}" for number in range(150)}


@pytest.mark.parametrize("on_error", ["abort", "skip"])
def test_truncated_gzip_stores_nothing(api: InProcessApi, on_error: str):
    body = gzip.compress(lines(*(person(number) for number in range(30_000))))[:-100]

    response = api.admin(
        "POST", PATH, content=body, headers=NDJSON | {"Content-Encoding": "gzip"}, params={"on_error": on_error}
    )

    assert (response.status_code, response.json()["type"]) == (400, "/problems/invalid-format")
    assert journal.count(api) == 0


@pytest.mark.parametrize("origin", ["../../evil", "a'b", "a b", "", "x" * 129, "a/b", "a\x00"])
def test_bad_origin_is_refused(api: InProcessApi, origin: str):
    response = api.admin.post(PATH, JANE, params={"origin": origin})

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "query.origin"
    assert journal.count(api) == 0


@pytest.mark.parametrize(("body", "kind", "slug"), [
    (b"", "application/x-ndjson", "empty-body"),
    (b"  \n ", "application/x-ndjson", "empty-body"),
    (b"x", "application/octet-stream", "codec-configured"),
    (b"x", "text/csv", "unsupported-media-type"),
    (b'[{"id": "a"', "application/json", "invalid-format"),
])  # fmt: skip
def test_body_of_an_unsupported_media_type_is_refused(api: InProcessApi, body: bytes, kind: str, slug: str):
    response = api.admin("POST", PATH, content=body, headers={"Content-Type": kind})

    assert response.json()["type"] == f"/problems/{slug}"
    assert journal.count(api) == 0


@pytest.mark.contract("W8")
@pytest.mark.parametrize("records", ["entities", "statements", "stages/{stage}/entities", "stages/{stage}/statements"])
@pytest.mark.parametrize(("body", "kind", "status", "slug"), [
    (b"raw", "application/octet-stream", 415, "codec-configured"),
    (b"ARROW1", "application/vnd.apache.arrow.file", 415, "codec-not-streamable"),
    (b"PK", "application/zip", 415, "codec-not-streamable"),
    (b"", "application/x-ndjson", 400, "empty-body"),
])  # fmt: skip
def test_body_that_is_not_a_stream_of_records_is_refused_with_the_reason(
    api: InProcessApi, records: str, body: bytes, kind: str, status: int, slug: str
):
    stage = api.admin.post("/v1/datasets/test/stages", {"origin": "crawl"}).json()["id"]
    path = f"/v1/datasets/test/{records.format(stage=stage)}"
    response = api.admin("POST", path, content=body, headers={"Content-Type": kind})

    assert (response.status_code, response.json()["type"]) == (status, f"/problems/{slug}")
    assert len(response.json()["detail"]) > 20
    assert journal.count(api) == 0


def test_body_without_records_changes_nothing(api: InProcessApi):
    response = api.admin.post(PATH, [])

    assert response.json() == {
        "entities": 0,
        "statements": 0,
        "rejected": 0,
        "commit": None,
        "snapshot": None,
        **NOTHING_LEFT_OUT,
    }
    assert journal.batches(api) == []


def test_body_over_the_limit_stores_nothing(api: InProcessApi):
    settings = api.services.settings.model_copy(update={"max_body_bytes": 3 << 20})
    small = InProcessApi(type(api.services)(**vars(api.services) | {"settings": settings}), str(api.admin.key))

    response = small.admin("POST", PATH, content=lines(*(person(n) for n in range(60_000))), headers=NDJSON)

    assert response.status_code == 413
    assert journal.count(api) == 0


def test_put_is_an_erase_and_adds_in_one_batch(api: InProcessApi):
    api.admin.post(PATH, JANE, params={"origin": "crawl"})

    response = api.admin.put(f"{PATH}/jane", JANE | {"properties": {"name": ["J. Doe"]}}, params={"origin": "crawl"})

    assert response.json()["statements"] == 2
    events = [(row["kind"], row["prop"], row["origin"]) for row in journal.rows(api) if row["commit"] == 2]
    assert events == [(3, None, "crawl"), (1, "name", "crawl"), (1, "id", "crawl")]
    assert api.admin.delete(f"{PATH}/jane").json()["tombstones"] == 2


def test_put_uses_the_id_of_the_path_and_refuses_another(api: InProcessApi):
    body = {"schema": "Person", "properties": {"name": "Jane"}}

    assert api.admin.put(f"{PATH}/jane", body).status_code == 200
    other = api.admin.put(f"{PATH}/jane", body | {"id": "john"})

    assert (other.status_code, other.json()["errors"][0]["field"]) == (422, "id")
    assert {row["entity_id"] for row in journal.rows(api)} == {"jane"}


def test_delete_counts_live_statements_and_succeeds_for_a_missing_entity(api: InProcessApi):
    api.admin.post(PATH, JANE, params={"origin": "a"})
    api.admin.post(PATH, JANE, params={"origin": "b"})
    api.admin.post(PATH, JANE, params={"origin": "b"})

    counts = [
        api.admin.delete(f"{PATH}/nobody").json()["tombstones"],
        api.admin.delete(f"{PATH}/jane", params={"origin": "a"}).json()["tombstones"],
        api.admin.delete(f"{PATH}/jane", params={"origin": "a"}).json()["tombstones"],
        api.admin.delete(f"{PATH}/jane").json()["tombstones"],
        api.admin.delete(f"{PATH}/jane").json()["tombstones"],
    ]

    assert counts == [0, 3, 0, 3, 0]


def test_entity_written_after_its_delete_is_live_again(api: InProcessApi):
    api.admin.post(PATH, JANE)
    api.admin.delete(f"{PATH}/jane")
    api.admin.post(PATH, JANE)

    assert api.admin.delete(f"{PATH}/jane").json()["tombstones"] == 3


def test_only_the_newest_base_statement_is_live(api: InProcessApi):
    api.admin.post(PATH, JANE)
    api.admin.post(PATH, JANE | {"properties": {"name": ["Other"]}})

    assert api.admin.delete(f"{PATH}/jane").json()["tombstones"] == 4


def test_entity_tag_changes_only_with_the_data(api: InProcessApi):
    before = now()
    api.admin.post(PATH, JANE)
    first = journal.tag(api, "journal/last_updated")
    api.admin.post(PATH, {"id": "x", "schema": "Banana"})
    unchanged = journal.tag(api, "journal/last_updated")
    api.admin.post(PATH, JANE)

    assert before < first == unchanged < journal.tag(api, "journal/last_updated")


def test_reader_may_not_write_and_other_tenants_get_not_found(api: InProcessApi):
    reader, unrelated = api.tenant("reader", test="read"), api.tenant("unrelated")

    assert reader.post(PATH, JANE).status_code == 403
    assert unrelated.post(PATH, JANE).status_code == 404
    assert journal.count(api) == 0


def test_quota_is_enforced_for_small_and_large_bodies_and_released(api: InProcessApi):
    alice = api.tenant("alice", test="write")
    api.admin.put("/v1/admin/tenants/alice/limits", {"quota_statements": 45_000})
    large = lines(*(person(number) for number in range(30_000)))

    refused = alice("POST", PATH, content=large, headers=NDJSON)
    used = alice.get("/v1/whoami").json()["limits"]["used_statements"]
    fits = alice("POST", PATH, content=lines(*(person(n) for n in range(22_499))), headers=NDJSON)
    last = alice.post(PATH, person(1))
    over = alice.post(PATH, person(2))

    assert (refused.status_code, used) == (429, 0)
    assert (fits.status_code, last.status_code, over.status_code) == (200, 200, 429)
    assert over.json()["type"] == "/problems/quota-exceeded"
    assert over.headers["Retry-After"]
    assert len(journal.rows(api)) == 45_000


def test_full_journal_delays_writers(api: InProcessApi):
    settings = api.services.settings.model_copy(update={"journal_max_rows": 3})
    api.services.writer._settings = settings
    api.admin.post(PATH, JANE)

    small = api.admin.post(PATH, JANE)
    large = api.admin("POST", PATH, content=lines(*(person(n) for n in range(30_000))), headers=NDJSON)

    for response in (small, large):
        assert (response.status_code, response.json()["type"]) == (429, "/problems/backpressure")
        assert int(response.headers["Retry-After"]) > 0
    assert journal.count(api) == 3


def test_write_is_in_the_audit_log_with_its_size(api: InProcessApi):
    api.admin.post(PATH, JANE, params={"origin": "crawl"})

    newest = api.admin.get("/v1/admin/audit").json()["results"][0]

    assert (newest["action"], newest["outcome"], newest["detail"]) == (
        "add_entities",
        "done",
        {"rows": 3, "origin": "crawl"},
    )
