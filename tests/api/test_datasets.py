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


def test_created_dataset_is_shown_as_it_was_sent(api: InProcessApi):
    created = api.admin.post("/v1/datasets", {"name": "donations", **METADATA})

    shown = api.admin.get("/v1/datasets/donations")

    assert created.status_code == 201
    assert created.headers["Location"] == "/v1/datasets/donations"
    assert shown.json() == created.json()
    assert shown.headers["ETag"] == created.headers["ETag"]
    assert shown.json()["publisher"]["country"] == "de"
    assert shown.json()["policy"]["exports"] == 15


def test_created_dataset_has_its_documents_in_the_lake(api: InProcessApi):
    api.dataset("donations", **METADATA)

    layout = DatasetLayout(DatasetName("donations"))
    config = yaml.safe_load(api.services.store.get(layout.config))
    index = yaml.safe_load(api.services.store.get(layout.index))

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
def test_bad_name_is_refused_with_its_reason_and_nothing_is_created(api: InProcessApi, name: str, reason: str):
    before = list(api.services.store.list(""))

    response = api.admin.post("/v1/datasets", {"name": name})

    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "name"
    assert reason in response.json()["errors"][0]["reason"]
    assert list(api.services.store.list("")) == before
    assert api.admin.get("/v1/datasets").json()["results"] == []


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
def test_bad_metadata_is_refused_by_field_on_create_and_on_change(api: InProcessApi, change, field: str):
    api.dataset("good", title="Good")
    tag = api.admin.get("/v1/datasets/good").headers["ETag"]

    created = api.admin.post("/v1/datasets", {"name": "bad", **change})
    changed = api.admin.patch("/v1/datasets/good", change)

    assert (created.status_code, changed.status_code) == (422, 422)
    assert created.json()["errors"][0]["field"] == field
    assert changed.json()["errors"][0]["field"] == field
    assert api.admin.get("/v1/datasets/good").headers["ETag"] == tag
    assert api.admin.get("/v1/datasets/bad").status_code == 404


def test_rules_of_ftms_dataset_model_are_enforced(api: InProcessApi):
    response = api.admin.post("/v1/datasets", {"name": "old", "deprecated": True})

    assert response.status_code == 422
    assert "coverage must have an end date" in response.json()["errors"][0]["reason"]


def test_name_that_is_taken_conflicts(api: InProcessApi):
    api.dataset("donations", title="First")

    again = api.admin.post("/v1/datasets", {"name": "donations", "title": "Second"})

    assert again.status_code == 409
    assert again.json()["type"] == "/problems/already-exists"
    assert api.admin.get("/v1/datasets/donations").json()["title"] == "First"


def test_concurrent_creation_of_one_name_succeeds_once(api: InProcessApi):
    statuses: list[int] = []

    def create() -> None:
        statuses.append(api.admin.post("/v1/datasets", {"name": "contested"}).status_code)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(statuses) == [201] + [409] * 7


def test_change_and_its_reversal_restore_the_content_and_keep_each_version(api: InProcessApi):
    api.dataset("donations", title="A")
    first = api.admin.get("/v1/datasets/donations")

    api.admin.patch("/v1/datasets/donations", {"title": "B"})
    reverted = api.admin.patch("/v1/datasets/donations", {"title": "A"})

    versions = api.admin.get("/v1/datasets/donations/versions").json()["results"]
    configs = [version for version in versions if version["name"] == "config.yml"]
    texts = [
        api.admin.get(f"/v1/datasets/donations/versions/{version['timestamp']}/config.yml").text for version in configs
    ]
    assert reverted.json() == first.json()
    assert reverted.headers["ETag"] == first.headers["ETag"]
    assert [yaml.safe_load(text)["title"] for text in texts] == ["B", "A"]


def test_omitted_fields_of_a_change_are_kept_and_null_restores_the_default(api: InProcessApi):
    api.dataset("donations", title="Donations", summary="Who gave", url="https://example.org/")

    changed = api.admin.patch("/v1/datasets/donations", {"summary": None}).json()

    assert (changed["title"], changed["summary"], changed["url"]) == ("Donations", None, "https://example.org/")


def test_null_restores_the_default_of_a_field_that_is_never_null(api: InProcessApi):
    default = api.dataset("donations")
    fields = ("tags", "children", "deprecated", "target_file_bytes", "policy")
    other = {"tags": ["x"], "children": ["x"], "deprecated": False, "target_file_bytes": 1 << 20, "policy": {}}
    api.admin.patch("/v1/datasets/donations", other | {"policy": {"maintain": False}})

    changed = api.admin.patch("/v1/datasets/donations", dict.fromkeys(fields))

    assert (changed.status_code, changed.json()) == (200, default)


def test_null_in_a_new_dataset_is_refused_where_it_has_no_meaning(api: InProcessApi):
    assert api.admin.post("/v1/datasets", {"name": "donations", "tags": None}).status_code == 422


def test_text_is_returned_unchanged(api: InProcessApi):
    text = " two\u2028lines,\n\ta tab, \ufeff and Ünïcode: #1 "
    api.dataset("donations", description=text)

    assert api.admin.get("/v1/datasets/donations").json()["description"] == text


def test_response_can_be_sent_back_as_a_change(api: InProcessApi):
    shown = api.dataset("donations", **METADATA)
    body = {field: value for field, value in shown.items() if field not in ("name", "id", "created")}

    response = api.admin.patch("/v1/datasets/donations", body)

    assert response.status_code == 200
    assert response.json() == shown


def test_change_with_a_stale_entity_tag_fails_and_changes_nothing(api: InProcessApi):
    tag = api.admin.post("/v1/datasets", {"name": "donations"}).headers["ETag"]
    api.admin.patch("/v1/datasets/donations", {"title": "B"}, headers={"If-Match": tag})

    stale = api.admin.patch("/v1/datasets/donations", {"title": "C"}, headers={"If-Match": tag})

    assert stale.status_code == 412
    assert stale.json()["expected"] == tag
    assert api.admin.get("/v1/datasets/donations").json()["title"] == "B"


def test_change_with_a_weak_entity_tag_fails(api: InProcessApi):
    tag = api.admin.post("/v1/datasets", {"name": "donations"}).headers["ETag"]

    weak = api.admin.patch("/v1/datasets/donations", {"title": "B"}, headers={"If-Match": f"W/{tag}"})
    shown = api.admin.get("/v1/datasets/donations", headers={"If-None-Match": f"W/{tag}"})

    assert (weak.status_code, shown.status_code) == (412, 304)


def test_concurrent_changes_of_different_fields_are_all_kept(api: InProcessApi):
    api.dataset("donations")
    fields = ["title", "summary", "description", "category", "deprecation"][:4]

    threads = [
        threading.Thread(target=api.admin.patch, args=("/v1/datasets/donations", {field: field})) for field in fields
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    shown = api.admin.get("/v1/datasets/donations").json()
    assert {field: shown[field] for field in fields} == {field: field for field in fields}


def test_unchanged_document_is_not_sent_again(api: InProcessApi):
    tag = api.admin.post("/v1/datasets", {"name": "donations"}).headers["ETag"]

    assert api.admin.get("/v1/datasets/donations", headers={"If-None-Match": tag}).status_code == 304
    assert api.admin.get("/v1/datasets/donations", headers={"If-None-Match": '"other"'}).status_code == 200


def test_delete_requires_the_name_as_confirmation(api: InProcessApi):
    api.dataset("donations")

    missing = api.admin.delete("/v1/datasets/donations")
    wrong = api.admin.delete("/v1/datasets/donations", params={"confirm": "other"})

    assert (missing.status_code, wrong.status_code) == (422, 422)
    assert api.admin.get("/v1/datasets/donations").status_code == 200


def test_deleted_dataset_is_gone_at_once_and_its_name_is_free_after_the_job(api: InProcessApi):
    first = api.dataset("donations", **METADATA)

    accepted = api.admin.delete("/v1/datasets/donations", params={"confirm": "donations"})
    hidden = api.admin.get("/v1/datasets/donations").status_code
    too_early = api.admin.post("/v1/datasets", {"name": "donations"}).status_code
    Worker(api.services.settings, api.services.database, api.services.store).step()
    job = api.admin.get(accepted.headers["Location"]).json()
    remaining = [entry.path for entry in api.services.store.list("donations")]
    again = api.dataset("donations")

    assert (accepted.status_code, hidden, too_early) == (202, 404, 409)
    assert (job["state"], job["operation"], job["result"]) == ("done", "delete", {"operation": "delete", "files": 2})
    assert remaining == []
    assert again["id"] != first["id"]
    assert again["title"] is None


def test_catalog_loads_with_ftms_reader_and_contains_datasets_that_the_caller_may_read(api: InProcessApi):
    for name in ("public_one", "public_two", "secret"):
        api.dataset(name, title=name.upper(), **{k: v for k, v in METADATA.items() if k != "title"})
    reader = api.tenant("reader", **{"public_*": "read"})
    api.admin.patch("/v1/catalog", {"title": "Our lake"})

    response = reader.get("/v1/catalog").json()

    catalog = DataCatalog(Dataset, response)
    assert response["title"] == "Our lake"
    assert catalog.names == {"public_one", "public_two"}
    assert catalog.require("public_one").model.title == "PUBLIC_ONE"


@pytest.mark.parametrize("text", [b"{", b"title: x", b"- a", b"\xff\xfe", b"[" * 5_000])
def test_corrupt_document_fails_its_own_request_and_not_the_list(api: InProcessApi, text: bytes):
    api.dataset("broken")
    api.dataset("good")
    api.services.store.put(DatasetLayout(DatasetName("broken")).config, text)

    shown = api.admin.get("/v1/datasets/broken")

    assert (shown.status_code, shown.json()["type"]) == (500, "/problems/document-invalid")
    assert [dataset["name"] for dataset in api.admin.get("/v1/datasets").json()["results"]] == ["good"]
    assert [dataset["name"] for dataset in api.admin.get("/v1/catalog").json()["datasets"]] == ["good"]
    assert api.admin.delete("/v1/datasets/broken?confirm=broken").status_code == 202


def test_corrupt_catalog_is_reported(api: InProcessApi):
    api.services.store.put("config.yml", b"title: [2030")

    shown, changed = api.admin.get("/v1/catalog"), api.admin.patch("/v1/catalog", {"title": "x"})

    assert [response.json()["type"] for response in (shown, changed)] == ["/problems/document-invalid"] * 2


def test_versions_with_equal_timestamps_are_all_listed_across_pages(api: InProcessApi):
    api.dataset("donations")
    layout = DatasetLayout(DatasetName("donations"))
    names = ["index.json", "config.yml", "entities.ftm.json"]
    for name in names:
        api.services.store.put(layout.versions.at(datetime(2030, 1, 1, tzinfo=UTC), FileName(name)), b"")

    listed, cursor = [], None
    for _ in names:
        params = {"limit": 1} | ({"cursor": cursor} if cursor else {})
        page = api.admin.get("/v1/datasets/donations/versions", params=params).json()
        listed += [version["name"] for version in page["results"]]
        cursor = page["next"]

    assert (listed, cursor) == (sorted(names, reverse=True), None)


def test_list_is_paged_by_name(api: InProcessApi):
    for name in ("c", "a", "b", "e", "d"):
        api.dataset(name)

    names, cursor, pages = [], None, 0
    while pages == 0 or cursor:
        page = api.admin.get("/v1/datasets", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        names += [dataset["name"] for dataset in page["results"]]
        cursor, pages = page["next"], pages + 1

    assert (names, pages) == (["a", "b", "c", "d", "e"], 3)
