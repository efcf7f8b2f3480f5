"""Datasets and the catalog over HTTP."""

import threading
from datetime import UTC, datetime

import pytest
import yaml
from followthemoney.dataset import DataCatalog, Dataset
from tarn.model.names import DatasetName, FileName
from tarn.storage.layout import DatasetLayout
from tarn.worker.loop import Worker

from tests.in_process_api import InProcessApi

METADATA = {
    "title": "Donations",
    "summary": "Who gave what to whom",
    "url": "https://example.org/donations",
    "publisher": {"name": "Parliament", "country": "de"},
    "coverage": {"start": "2002", "countries": ["de"], "frequency": "monthly"},
    "tags": ["money"],
    "checksum": "sha256",
    "policy": {"exports": 15},
}


def test_created_dataset_is_shown_as_it_was_sent(house: InProcessApi):
    created = house.admin.post("/v1/datasets", {"name": "donations", **METADATA})

    shown = house.admin.get("/v1/datasets/donations")

    assert created.status_code == 201
    assert created.headers["Location"] == "/v1/datasets/donations"
    assert shown.json() == created.json()
    assert shown.headers["ETag"] == created.headers["ETag"]
    assert shown.json()["publisher"]["country"] == "de"
    assert shown.json()["policy"]["exports"] == 15


def test_created_dataset_has_its_documents_in_the_layout(house: InProcessApi):
    house.dataset("donations", **METADATA)

    layout = DatasetLayout(DatasetName("donations"))
    config = yaml.safe_load(house.services.store.get(layout.config))
    index = yaml.safe_load(house.services.store.get(layout.index))

    assert config["title"] == "Donations"
    assert config["id"]
    publisher = Dataset(index).model.publisher
    assert publisher is not None
    assert (publisher.name, publisher.country_label) == ("Parliament", "Germany")
    assert "policy" not in index


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../evil", "must be lower-case"),
        ("a/b", "must be lower-case"),
        ("a\x00b", "must be lower-case"),
        ("Upper", "must be lower-case"),
        ("with space", "must be lower-case"),
        ("ünïcode", "must be lower-case"),
        ("double__underscore", "must be lower-case"),
        ("_leading", "must be lower-case"),
        ("trailing_", "must be lower-case"),
        ("new\nline", "must be lower-case"),
        ("name\n", "must be lower-case"),
        ("", "must be lower-case"),
        ("x" * 256, "256 characters long"),
        ("versions", "reserved"),
        ("lakehouse", "reserved"),
        ("undefined", "reserved"),
    ],
)
def test_bad_name_is_refused_with_its_reason_and_nothing_is_made(house: InProcessApi, name: str, reason: str):
    before = list(house.services.store.list(""))

    answer = house.admin.post("/v1/datasets", {"name": name})

    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "name"
    assert reason in answer.json()["errors"][0]["reason"]
    assert list(house.services.store.list("")) == before
    assert house.admin.get("/v1/datasets").json()["results"] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"url": "ftp://example.org"}, "url"),
        ({"publisher": {"name": "x", "country": "atlantis"}}, "publisher.country"),
        ({"publisher": {"name": "x", "colour": "red"}}, "publisher.colour"),
        ({"coverage": {"frequency": "sometimes"}}, "coverage.frequency"),
        ({"target_file_bytes": 1}, "target_file_bytes"),
        ({"checksum": "md5"}, "checksum"),
        ({"tags": "money"}, "tags"),
        ({"policy": {"retention": {"count": 0}}}, "policy.retention.count"),
        ({"resources": []}, "resources"),
        ({"description": "a\u0085b"}, "description"),
        ({"publisher": {"name": "a\r\nb"}}, "publisher.name"),
    ],
)
def test_bad_metadata_is_refused_by_field_on_create_and_on_change(house: InProcessApi, change, field: str):
    house.dataset("good", title="Good")
    tag = house.admin.get("/v1/datasets/good").headers["ETag"]

    created = house.admin.post("/v1/datasets", {"name": "bad", **change})
    changed = house.admin.patch("/v1/datasets/good", change)

    assert (created.status_code, changed.status_code) == (422, 422)
    assert created.json()["errors"][0]["field"] == field
    assert changed.json()["errors"][0]["field"] == field
    assert house.admin.get("/v1/datasets/good").headers["ETag"] == tag
    assert house.admin.get("/v1/datasets/bad").status_code == 404


def test_rules_of_ftms_own_model_hold(house: InProcessApi):
    answer = house.admin.post("/v1/datasets", {"name": "old", "deprecated": True})

    assert answer.status_code == 422
    assert "coverage must have an end date" in answer.json()["errors"][0]["reason"]


def test_name_that_is_taken_conflicts(house: InProcessApi):
    house.dataset("donations", title="First")

    again = house.admin.post("/v1/datasets", {"name": "donations", "title": "Second"})

    assert again.status_code == 409
    assert again.json()["type"] == "/problems/already-exists"
    assert house.admin.get("/v1/datasets/donations").json()["title"] == "First"


def test_of_many_who_create_one_name_one_succeeds(house: InProcessApi):
    statuses: list[int] = []

    def create() -> None:
        statuses.append(house.admin.post("/v1/datasets", {"name": "wanted"}).status_code)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(statuses) == [201] + [409] * 7


def test_change_there_and_back_ends_where_it_began_and_keeps_each_version(house: InProcessApi):
    house.dataset("donations", title="A")
    first = house.admin.get("/v1/datasets/donations")

    house.admin.patch("/v1/datasets/donations", {"title": "B"})
    back = house.admin.patch("/v1/datasets/donations", {"title": "A"})

    versions = house.admin.get("/v1/datasets/donations/versions").json()["results"]
    configs = [version for version in versions if version["name"] == "config.yml"]
    texts = [
        house.admin.get(f"/v1/datasets/donations/versions/{version['timestamp']}/config.yml").text
        for version in configs
    ]
    assert back.json() == first.json()
    assert back.headers["ETag"] == first.headers["ETag"]
    assert [yaml.safe_load(text)["title"] for text in texts] == ["B", "A"]


def test_fields_left_out_of_a_change_stay_and_null_goes_back_to_the_default(house: InProcessApi):
    house.dataset("donations", title="Donations", summary="Who gave", url="https://example.org/")

    changed = house.admin.patch("/v1/datasets/donations", {"summary": None}).json()

    assert (changed["title"], changed["summary"], changed["url"]) == ("Donations", None, "https://example.org/")


def test_null_goes_back_to_the_default_of_a_field_that_is_never_null(house: InProcessApi):
    default = house.dataset("donations")
    fields = ("tags", "children", "deprecated", "target_file_bytes", "policy")
    other = {"tags": ["x"], "children": ["x"], "deprecated": False, "target_file_bytes": 1 << 20, "policy": {}}
    house.admin.patch("/v1/datasets/donations", other | {"policy": {"maintain": False}})

    changed = house.admin.patch("/v1/datasets/donations", dict.fromkeys(fields))

    assert (changed.status_code, changed.json()) == (200, default)


def test_null_is_no_value_of_a_new_dataset_where_it_means_nothing(house: InProcessApi):
    assert house.admin.post("/v1/datasets", {"name": "donations", "tags": None}).status_code == 422


def test_text_is_given_back_as_it_was_sent(house: InProcessApi):
    text = " two\u2028lines,\n\ta tab, \ufeff and Ünïcode: #1 "
    house.dataset("donations", description=text)

    assert house.admin.get("/v1/datasets/donations").json()["description"] == text


def test_answer_can_be_sent_back_as_a_change(house: InProcessApi):
    shown = house.dataset("donations", **METADATA)
    body = {field: value for field, value in shown.items() if field not in ("name", "id", "created")}

    answer = house.admin.patch("/v1/datasets/donations", body)

    assert answer.status_code == 200
    assert answer.json() == shown


def test_change_on_a_stale_tag_fails_and_changes_nothing(house: InProcessApi):
    tag = house.admin.post("/v1/datasets", {"name": "donations"}).headers["ETag"]
    house.admin.patch("/v1/datasets/donations", {"title": "B"}, headers={"If-Match": tag})

    stale = house.admin.patch("/v1/datasets/donations", {"title": "C"}, headers={"If-Match": tag})

    assert stale.status_code == 412
    assert stale.json()["expected"] == tag
    assert house.admin.get("/v1/datasets/donations").json()["title"] == "B"


def test_change_on_a_weak_tag_fails_for_it_promises_too_little(house: InProcessApi):
    tag = house.admin.post("/v1/datasets", {"name": "donations"}).headers["ETag"]

    weak = house.admin.patch("/v1/datasets/donations", {"title": "B"}, headers={"If-Match": f"W/{tag}"})
    shown = house.admin.get("/v1/datasets/donations", headers={"If-None-Match": f"W/{tag}"})

    assert (weak.status_code, shown.status_code) == (412, 304)


def test_concurrent_changes_of_different_fields_all_hold(house: InProcessApi):
    house.dataset("donations")
    fields = ["title", "summary", "description", "category", "deprecation"][:4]

    threads = [
        threading.Thread(target=house.admin.patch, args=("/v1/datasets/donations", {field: field})) for field in fields
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    shown = house.admin.get("/v1/datasets/donations").json()
    assert {field: shown[field] for field in fields} == {field: field for field in fields}


def test_document_the_caller_has_is_not_sent_again(house: InProcessApi):
    tag = house.admin.post("/v1/datasets", {"name": "donations"}).headers["ETag"]

    assert house.admin.get("/v1/datasets/donations", headers={"If-None-Match": tag}).status_code == 304
    assert house.admin.get("/v1/datasets/donations", headers={"If-None-Match": '"other"'}).status_code == 200


def test_delete_needs_the_name_once_more(house: InProcessApi):
    house.dataset("donations")

    missing = house.admin.delete("/v1/datasets/donations")
    wrong = house.admin.delete("/v1/datasets/donations", params={"confirm": "other"})

    assert (missing.status_code, wrong.status_code) == (422, 422)
    assert house.admin.get("/v1/datasets/donations").status_code == 200


def test_deleted_dataset_is_gone_at_once_and_its_name_is_free_once_the_job_is_done(house: InProcessApi):
    first = house.dataset("donations", **METADATA)

    accepted = house.admin.delete("/v1/datasets/donations", params={"confirm": "donations"})
    hidden = house.admin.get("/v1/datasets/donations").status_code
    too_early = house.admin.post("/v1/datasets", {"name": "donations"}).status_code
    Worker(house.services.settings, house.services.database, house.services.store).step()
    job = house.admin.get(accepted.headers["Location"]).json()
    left = [entry.path for entry in house.services.store.list("donations")]
    again = house.dataset("donations")

    assert (accepted.status_code, hidden, too_early) == (202, 404, 409)
    assert (job["state"], job["operation"], job["result"]) == ("done", "delete", {"operation": "delete", "files": 2})
    assert left == []
    assert again["id"] != first["id"]
    assert again["title"] is None


def test_catalog_loads_with_ftms_own_reader_and_holds_what_the_caller_may_read(house: InProcessApi):
    for name in ("public_one", "public_two", "secret"):
        house.dataset(name, title=name.upper(), **{k: v for k, v in METADATA.items() if k != "title"})
    reader = house.tenant("reader", **{"public_*": "read"})
    house.admin.patch("/v1/catalog", {"title": "Our lake"})

    answer = reader.get("/v1/catalog").json()

    catalog = DataCatalog(Dataset, answer)
    assert answer["title"] == "Our lake"
    assert catalog.names == {"public_one", "public_two"}
    assert catalog.require("public_one").model.title == "PUBLIC_ONE"


@pytest.mark.parametrize("text", [b"{", b"title: x", b"- a", b"\xff\xfe", b"[" * 200_000])
def test_document_broken_by_hand_answers_for_itself_and_not_for_the_list(house: InProcessApi, text: bytes):
    house.dataset("broken")
    house.dataset("good")
    house.services.store.put(DatasetLayout(DatasetName("broken")).config, text)

    shown = house.admin.get("/v1/datasets/broken")

    assert (shown.status_code, shown.json()["type"]) == (500, "/problems/document-invalid")
    assert [dataset["name"] for dataset in house.admin.get("/v1/datasets").json()["results"]] == ["good"]
    assert [dataset["name"] for dataset in house.admin.get("/v1/catalog").json()["datasets"]] == ["good"]
    assert house.admin.delete("/v1/datasets/broken?confirm=broken").status_code == 202


def test_catalog_broken_by_hand_says_so(house: InProcessApi):
    house.services.store.put("config.yml", b"title: [2030")

    shown, changed = house.admin.get("/v1/catalog"), house.admin.patch("/v1/catalog", {"title": "x"})

    assert [answer.json()["type"] for answer in (shown, changed)] == ["/problems/document-invalid"] * 2


def test_versions_of_one_moment_are_all_on_some_page(house: InProcessApi):
    house.dataset("donations")
    layout = DatasetLayout(DatasetName("donations"))
    names = ["index.json", "config.yml", "entities.ftm.json"]
    for name in names:
        house.services.store.put(layout.versions.at(datetime(2030, 1, 1, tzinfo=UTC), FileName(name)), b"")

    found, cursor = [], None
    for _ in names:
        params = {"limit": 1} | ({"cursor": cursor} if cursor else {})
        page = house.admin.get("/v1/datasets/donations/versions", params=params).json()
        found += [version["name"] for version in page["results"]]
        cursor = page["next"]

    assert (found, cursor) == (sorted(names, reverse=True), None)


def test_list_is_paged_by_name_and_ends(house: InProcessApi):
    for name in ("c", "a", "b", "e", "d"):
        house.dataset(name)

    names, cursor, pages = [], None, 0
    while pages == 0 or cursor:
        page = house.admin.get("/v1/datasets", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        names += [dataset["name"] for dataset in page["results"]]
        cursor, pages = page["next"], pages + 1

    assert (names, pages) == (["a", "b", "c", "d", "e"], 3)
