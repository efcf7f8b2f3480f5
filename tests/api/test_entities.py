"""Entities written over HTTP."""

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
def dataset(house: InProcessApi):
    house.dataset("test")


def test_entity_becomes_its_statements_with_ids_of_ftm(house: InProcessApi):
    answer = house.admin.post(PATH, JANE, params={"origin": "crawl"})

    assert answer.status_code == 200
    assert answer.json() == {
        "entities": 1,
        "statements": 3,
        "rejected": 0,
        "commit": 1,
        "snapshot": None,
        **NOTHING_LEFT_OUT,
    }
    events = {row["prop"]: row for row in journal.rows(house)}
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
def test_every_form_of_the_same_entities_is_the_same(house: InProcessApi, body: bytes, headers: dict):
    answer = house.admin("POST", PATH, content=body, headers=headers)

    assert (answer.json()["entities"], answer.json()["statements"]) == (2, 4)
    assert {row["entity_id"] for row in journal.rows(house)} == {"p1", "p2"}
    assert {row["origin"] for row in journal.rows(house)} == {"default"}


def test_large_body_goes_in_by_chunks_and_is_one_batch(house: InProcessApi):
    body = lines(*(person(number) for number in range(15_000)))

    answer = house.admin("POST", PATH, content=body, headers=NDJSON)

    rows = journal.rows(house)
    assert answer.json()["statements"] == len(rows) == 30_000
    assert {(row["commit"], row["state"]) for row in rows} == {(1, "committed")}
    assert [row["position"] for row in rows] == list(range(30_000))
    assert len(journal.batches(house)) == 1
    assert journal.head(house)["rows"] == 30_000


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
def test_bad_record_is_named_and_nothing_of_its_body_stays(
    house: InProcessApi, count: int, bad: bytes, field, reason: str
):
    good = lines(*(person(number) for number in range(count)))

    answer = house.admin("POST", PATH, content=good + bad + b"\n" + good, headers=NDJSON)

    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (422, "/problems/schema-violation")
    assert problem["errors"] == [{"line": count + 1, "field": field, "reason": problem["errors"][0]["reason"]}]
    assert reason in problem["errors"][0]["reason"]
    assert journal.count(house) == 0
    assert journal.batches(house) == []
    assert house.admin.get("/v1/whoami").json()["limits"]["used_statements"] == 0


def test_skip_keeps_exactly_the_good_records_and_tells_of_the_first_hundred_bad(house: InProcessApi):
    body = b"".join(lines(person(number)) + b"broken\n" for number in range(150))

    answer = house.admin("POST", PATH, content=body, headers=NDJSON, params={"on_error": "skip"}).json()

    assert (answer["entities"], answer["rejected"], len(answer["errors"])) == (150, 150, 100)
    assert [error["line"] for error in answer["errors"][:3]] == [2, 4, 6]
    assert {row["entity_id"] for row in journal.rows(house)} == {f"p{number}" for number in range(150)}


@pytest.mark.parametrize("on_error", ["abort", "skip"])
def test_truncated_gzip_leaves_nothing(house: InProcessApi, on_error: str):
    body = gzip.compress(lines(*(person(number) for number in range(30_000))))[:-100]

    answer = house.admin(
        "POST", PATH, content=body, headers=NDJSON | {"Content-Encoding": "gzip"}, params={"on_error": on_error}
    )

    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-format")
    assert journal.count(house) == 0


@pytest.mark.parametrize("origin", ["../../evil", "a'b", "a b", "", "x" * 129, "a/b", "a\x00"])
def test_bad_origin_is_refused(house: InProcessApi, origin: str):
    answer = house.admin.post(PATH, JANE, params={"origin": origin})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "query.origin"
    assert journal.count(house) == 0


@pytest.mark.parametrize(("body", "kind", "slug"), [
    (b"", "application/x-ndjson", "empty-body"),
    (b"  \n ", "application/x-ndjson", "empty-body"),
    (b"x", "application/octet-stream", "codec-configured"),
    (b"x", "text/csv", "unsupported-media-type"),
    (b'[{"id": "a"', "application/json", "invalid-format"),
])  # fmt: skip
def test_body_that_is_none_of_ours_is_refused(house: InProcessApi, body: bytes, kind: str, slug: str):
    answer = house.admin("POST", PATH, content=body, headers={"Content-Type": kind})

    assert answer.json()["type"] == f"/problems/{slug}"
    assert journal.count(house) == 0


@pytest.mark.contract("W8")
@pytest.mark.parametrize("records", ["entities", "statements", "stages/{stage}/entities", "stages/{stage}/statements"])
@pytest.mark.parametrize(("body", "kind", "status", "slug"), [
    (b"raw", "application/octet-stream", 415, "codec-configured"),
    (b"ARROW1", "application/vnd.apache.arrow.file", 415, "codec-not-streamable"),
    (b"PK", "application/zip", 415, "codec-not-streamable"),
    (b"", "application/x-ndjson", 400, "empty-body"),
])  # fmt: skip
def test_body_that_is_no_stream_of_records_is_refused_with_the_reason(
    house: InProcessApi, records: str, body: bytes, kind: str, status: int, slug: str
):
    stage = house.admin.post("/v1/datasets/test/stages", {"origin": "crawl"}).json()["id"]
    path = f"/v1/datasets/test/{records.format(stage=stage)}"
    answer = house.admin("POST", path, content=body, headers={"Content-Type": kind})

    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{slug}")
    assert len(answer.json()["detail"]) > 20
    assert journal.count(house) == 0


def test_body_without_records_changes_nothing(house: InProcessApi):
    answer = house.admin.post(PATH, [])

    assert answer.json() == {
        "entities": 0,
        "statements": 0,
        "rejected": 0,
        "commit": None,
        "snapshot": None,
        **NOTHING_LEFT_OUT,
    }
    assert journal.batches(house) == []


def test_body_over_the_limit_leaves_nothing(house: InProcessApi):
    settings = house.services.settings.model_copy(update={"max_body_bytes": 3 << 20})
    small = InProcessApi(type(house.services)(**vars(house.services) | {"settings": settings}), str(house.admin.key))

    answer = small.admin("POST", PATH, content=lines(*(person(n) for n in range(60_000))), headers=NDJSON)

    assert answer.status_code == 413
    assert journal.count(house) == 0


def test_put_is_an_erase_and_adds_in_one_batch(house: InProcessApi):
    house.admin.post(PATH, JANE, params={"origin": "crawl"})

    answer = house.admin.put(f"{PATH}/jane", JANE | {"properties": {"name": ["J. Doe"]}}, params={"origin": "crawl"})

    assert answer.json()["statements"] == 2
    events = [(row["kind"], row["prop"], row["origin"]) for row in journal.rows(house) if row["commit"] == 2]
    assert events == [(3, None, "crawl"), (1, "name", "crawl"), (1, "id", "crawl")]
    assert house.admin.delete(f"{PATH}/jane").json()["tombstones"] == 2


def test_put_takes_its_id_from_the_path_and_no_other(house: InProcessApi):
    body = {"schema": "Person", "properties": {"name": "Jane"}}

    assert house.admin.put(f"{PATH}/jane", body).status_code == 200
    other = house.admin.put(f"{PATH}/jane", body | {"id": "john"})

    assert (other.status_code, other.json()["errors"][0]["field"]) == (422, "id")
    assert {row["entity_id"] for row in journal.rows(house)} == {"jane"}


def test_delete_counts_what_was_live_and_is_no_error_for_what_is_not_there(house: InProcessApi):
    house.admin.post(PATH, JANE, params={"origin": "a"})
    house.admin.post(PATH, JANE, params={"origin": "b"})
    house.admin.post(PATH, JANE, params={"origin": "b"})

    counts = [
        house.admin.delete(f"{PATH}/nobody").json()["tombstones"],
        house.admin.delete(f"{PATH}/jane", params={"origin": "a"}).json()["tombstones"],
        house.admin.delete(f"{PATH}/jane", params={"origin": "a"}).json()["tombstones"],
        house.admin.delete(f"{PATH}/jane").json()["tombstones"],
        house.admin.delete(f"{PATH}/jane").json()["tombstones"],
    ]

    assert counts == [0, 3, 0, 3, 0]


def test_revived_after_a_delete(house: InProcessApi):
    house.admin.post(PATH, JANE)
    house.admin.delete(f"{PATH}/jane")
    house.admin.post(PATH, JANE)

    assert house.admin.delete(f"{PATH}/jane").json()["tombstones"] == 3


def test_only_the_newest_base_statement_lives(house: InProcessApi):
    house.admin.post(PATH, JANE)
    house.admin.post(PATH, JANE | {"properties": {"name": ["Other"]}})

    assert house.admin.delete(f"{PATH}/jane").json()["tombstones"] == 4


def test_tag_moves_with_the_data_and_not_without(house: InProcessApi):
    before = now()
    house.admin.post(PATH, JANE)
    first = journal.tag(house, "journal/last_updated")
    house.admin.post(PATH, {"id": "x", "schema": "Banana"})
    still = journal.tag(house, "journal/last_updated")
    house.admin.post(PATH, JANE)

    assert before < first == still < journal.tag(house, "journal/last_updated")


def test_reader_may_not_write_and_strangers_see_nothing(house: InProcessApi):
    reader, stranger = house.tenant("reader", test="read"), house.tenant("stranger")

    assert reader.post(PATH, JANE).status_code == 403
    assert stranger.post(PATH, JANE).status_code == 404
    assert journal.count(house) == 0


def test_quota_is_held_for_small_and_large_bodies_and_given_back(house: InProcessApi):
    alice = house.tenant("alice", test="write")
    house.admin.put("/v1/admin/tenants/alice/limits", {"quota_statements": 45_000})
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
    assert len(journal.rows(house)) == 45_000


def test_full_journal_makes_writers_wait(house: InProcessApi):
    settings = house.services.settings.model_copy(update={"journal_max_rows": 3})
    house.services.writer._settings = settings
    house.admin.post(PATH, JANE)

    small = house.admin.post(PATH, JANE)
    large = house.admin("POST", PATH, content=lines(*(person(n) for n in range(30_000))), headers=NDJSON)

    for answer in (small, large):
        assert (answer.status_code, answer.json()["type"]) == (429, "/problems/backpressure")
        assert int(answer.headers["Retry-After"]) > 0
    assert journal.count(house) == 3


def test_write_is_in_the_audit_log_with_its_size(house: InProcessApi):
    house.admin.post(PATH, JANE, params={"origin": "crawl"})

    newest = house.admin.get("/v1/admin/audit").json()["results"][0]

    assert (newest["action"], newest["outcome"], newest["detail"]) == (
        "add_entities",
        "done",
        {"rows": 3, "origin": "crawl"},
    )
