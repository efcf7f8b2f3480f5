"""Mappings over HTTP: validated by FtM, stored in versions, and processed by a job."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore
from typing import Any

import pytest
import yaml
from followthemoney import model
from followthemoney.mapping.query import QueryMapping
from tarn.api.routes import mappings
from tarn.datasets.registry import Dataset
from tarn.model.ftm.mapping import MOST_FORMATS, parsed
from tarn.model.names import Checksum

from tests.in_process_api import InProcessApi

HASH = Checksum("ab" * 32)
URL = f"/v1/datasets/test/mappings/{HASH}"
PERSON: dict[str, Any] = {"schema": "Person", "key": "id", "properties": {"name": {"column": "name"}}}
MAPPING: dict[str, Any] = {"csv_url": "http://127.0.0.1:9/data.csv", "entities": {"person": PERSON}}

ONE_DATABASE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


def put(api: InProcessApi, mapping: Any, kind: str = "application/json", **headers: str) -> Any:
    body = mapping if isinstance(mapping, bytes) else json.dumps(mapping).encode()
    return api.admin("PUT", URL, headers={"Content-Type": kind, **headers}, content=body)


def with_property(**rule: Any) -> dict[str, Any]:
    return {"entities": {"person": PERSON | {"properties": {"name": rule}}}}


def test_mapping_is_stored_in_versions_and_shown_normalised(api: InProcessApi, dataset: Dataset):
    first = put(api, MAPPING)
    second = put(api, MAPPING | {"filters": {"land": ["de", "fr"]}})

    assert (first.status_code, second.status_code) == (201, 200)
    shown = api.admin.get(URL)
    assert shown.json() == second.json()
    assert shown.headers["ETag"] == second.headers["ETag"] != first.headers["ETag"]
    assert shown.json()["origin"] == f"mapping:{HASH}"
    assert (shown.json()["processed"], shown.json()["fresh"]) == (None, False)
    query = shown.json()["queries"][0]
    assert query["filters"] == {"land": ["de", "fr"]}
    assert query["entities"]["person"]["properties"]["name"]["columns"] == ["name"]
    assert [one["content_hash"] for one in api.admin.get("/v1/datasets/test/mappings").json()["results"]] == [HASH]
    (version,) = api.admin.get(f"{URL}/versions").json()["results"]
    former = api.admin.get(f"{URL}/versions/{version['timestamp']}")
    assert "filters" not in yaml.safe_load(former.content)["test"]["queries"][0]
    assert api.admin.get(f"{URL}/versions/20300101T000000.000000Z").json()["type"] == "/problems/version-not-found"


@ONE_DATABASE
def test_equal_mapping_creates_no_version(api: InProcessApi, dataset: Dataset):
    put(api, MAPPING)
    again = put(api, yaml.safe_dump({"other": {"queries": [MAPPING]}}).encode(), "text/yaml")

    assert again.status_code == 200
    assert api.admin.get(f"{URL}/versions").json()["results"] == []


@ONE_DATABASE
@pytest.mark.parametrize(
    "form",
    [
        MAPPING,
        [MAPPING],
        {"query": MAPPING},
        {"queries": [MAPPING]},
        {"any": {"query": MAPPING}},
        {"any": {"queries": [MAPPING]}},
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "application/yaml", "text/x-yaml"])
def test_every_format_of_a_mapping_is_stored_in_the_same_form(
    api: InProcessApi, dataset: Dataset, form: Any, kind: str
):
    body = json.dumps(form) if kind == "application/json" else yaml.safe_dump(form)

    response = put(api, body.encode(), kind)

    assert response.status_code == 201, response.text
    stored = yaml.safe_load(api.services.store.get(dataset.layout.mapping(HASH)))
    (query,) = stored["test"]["queries"]
    assert "csv_url" not in query
    assert QueryMapping(model, query | {"csv_url": "/dev/null"}).entities[0].name == "person"


def test_mapping_is_replaced_only_if_its_precondition_holds(api: InProcessApi, dataset: Dataset):
    other = MAPPING | {"filters": {"a": "b"}}
    assert put(api, MAPPING, **{"If-Match": "*"}).status_code == 412
    tag = put(api, MAPPING, **{"If-None-Match": "*"}).headers["ETag"]

    for refused in (put(api, other, **{"If-None-Match": "*"}), put(api, other, **{"If-Match": '"else"'})):
        assert refused.status_code == 412
        assert refused.json()["head"] == tag
    assert api.admin.get(URL).headers["ETag"] == tag
    assert api.admin.get(URL, headers={"If-None-Match": tag}).status_code == 304
    assert put(api, other, **{"If-Match": tag}).status_code == 200


BAD = {
    "nothing": ({}, "queries"),
    "no query": ([], "queries"),
    "no entities": ({"entities": {}}, "queries.0.entities"),
    "string": ("text", "queries.0"),
    "unknown schema": ({"entities": {"a": PERSON | {"schema": "Parson"}}}, "queries.0.entities.a.schema"),
    "no schema": ({"entities": {"a": {"key": "id"}}}, "queries.0.entities.a.schema"),
    "no key": ({"entities": {"a": {"schema": "Person"}}}, "queries.0.entities.a"),
    "two identities": ({"entities": {"a": PERSON | {"id_column": "x"}}}, "queries.0.entities.a"),
    "unknown property": (
        {"entities": {"a": PERSON | {"properties": {"nam": {"column": "x"}}}}}, "queries.0.entities.a.properties.nam"
    ),
    "stub": (
        {"entities": {"a": PERSON | {"properties": {"familyPerson": {"column": "x"}}}}},
        "queries.0.entities.a.properties.familyPerson",
    ),
    "misspelt key": (with_property(colum="x"), "queries.0.entities.person.properties.name.colum"),
    "no source of values": (with_property(join=" "), "queries.0.entities.person.properties.name"),
    "number for a text": (with_property(literal=5), "queries.0.entities.person.properties.name.literals.0"),
    "empty split": (with_property(column="x", split=""), "queries.0.entities.person.properties.name.split"),
    "control character": (with_property(literal="a\x00b"), "queries.0.entities.person.properties.name.literals.0"),
    "unknown entity": (
        {"entities": {"a": {"schema": "Ownership", "key": "x", "properties": {"owner": {"entity": "b"}}}}},
        "queries.0.entities.a.properties.owner.entity",
    ),
    "entity of another schema": (
        {"entities": {"a": {"schema": "Ownership", "key": "x", "properties": {"owner": {"entity": "b"}}},
                      "b": {"schema": "Vessel", "key": "x"}}},
        "queries.0.entities.a.properties.owner.entity",
    ),
    "cycle": (
        {"entities": {name: {"schema": "Company", "key": "x", "properties": {"parent": {"entity": other}}}
                      for name, other in (("a", "b"), ("b", "a"))}},
        "queries.0.entities",
    ),
    "format": (
        {"entities": {"a": PERSON | {"properties": {"phone": {"column": "x", "format": "nowhere"}}}}},
        "queries.0.entities.a.properties.phone.format",
    ),
    "filter by a number": (MAPPING | {"filters": {"year": 2020}}, "queries.0.filters.year.0"),
    "database": (MAPPING | {"database": "sqlite:////etc/passwd", "table": "x"}, "queries.0"),
    "include": (MAPPING | {"include": "/etc/passwd"}, "queries.0.include"),
    "second query": ([MAPPING, {"entities": {"a": PERSON | {"schema": "Parson"}}}], "queries.1.entities.a.schema"),
}  # fmt: skip


@ONE_DATABASE
@pytest.mark.filterwarnings("ignore:Mapping uses a deprecated")
@pytest.mark.parametrize("name", BAD)
def test_mapping_that_ftm_cannot_use_is_refused_with_its_field_and_changes_nothing(
    api: InProcessApi, dataset: Dataset, name: str
):
    mapping, field = BAD[name]

    refused = put(api, mapping)

    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/schema-violation")
    assert field in [fault["field"] for fault in refused.json()["errors"]]
    assert all(fault["reason"] for fault in refused.json()["errors"])
    assert api.admin.get(URL).json()["type"] == "/problems/mapping-not-found"


@ONE_DATABASE
@pytest.mark.parametrize(
    ("body", "kind", "slug"),
    [
        (b"", "application/json", "empty-body"),
        (b"{", "application/json", "invalid-format"),
        (b'{"a": NaN}', "application/json", "invalid-format"),
        (b'{"a": "\\ud800"}', "application/json", "invalid-format"),
        (b"a: [", "application/yaml", "invalid-format"),
        (b"a: &x [1]\nb: *x", "application/yaml", "schema-violation"),
        (b"a: &x [*x]", "application/yaml", "invalid-format"),
        (b"a: 1" + b":59" * 300_000, "application/yaml", "invalid-format"),
        (b"a: " + b"9" * 100_000, "application/yaml", "invalid-format"),
        (b"[" + b"[]," * 60_000 + b"[]]", "application/yaml", "invalid-format"),
        (b"[" + b"[]," * 60_000 + b"[]]", "application/json", "invalid-format"),
        (b"a: !!python/object/apply:os.system [id]", "application/yaml", "invalid-format"),
        (b"a: 2020-13-45", "application/yaml", "schema-violation"),
        (b"[" * 100_000, "application/yaml", "invalid-format"),
        (b"\xff\xfe\xfa", "application/yaml", "invalid-format"),
        (b'entities: {"a\\ud800": 1}', "application/yaml", "invalid-format"),
        (b"{}", "text/csv", "unsupported-media-type"),
        (b"{}", "", "unsupported-media-type"),
        (b"x" * (2 << 20), "application/yaml", "body-too-large"),
    ],
)
def test_body_that_is_not_a_mapping_is_refused(api: InProcessApi, dataset: Dataset, body: bytes, kind: str, slug: str):
    assert put(api, body, kind).json()["type"] == f"/problems/{slug}"
    assert api.admin.get("/v1/datasets/test/mappings").json() == {"results": [], "next": None}


@ONE_DATABASE
def test_scalars_that_only_yaml_1_1_converts_stay_text(api: InProcessApi, dataset: Dataset):
    body = (
        b"entities: {a: &a {schema: Person, key: no, properties: {notes: {literals: [no, 1:59, 2020-01-02]}}}, b: *a}"
    )

    response = put(api, body, "application/yaml")

    assert response.status_code == 201, response.text
    entities = api.admin.get(URL).json()["queries"][0]["entities"]
    assert entities["a"] == entities["b"]
    assert entities["a"]["keys"] == ["no"]
    assert entities["a"]["properties"]["notes"]["literals"] == ["no", "1:59", "2020-01-02"]


@ONE_DATABASE
def test_body_over_a_limit_is_refused_with_its_line_and_value(api: InProcessApi, dataset: Dataset):
    refused = put(api, b"a: b\nc: 1" + b":59" * 300_000, "application/yaml").json()

    (fault,) = refused["errors"]
    assert fault["line"] == 2
    assert fault["reason"] == "a scalar is 900001 characters long, at most 131072 are read"


@ONE_DATABASE
def test_mapping_with_too_many_date_formats_is_refused(api: InProcessApi, dataset: Dataset):
    def using(most: int) -> list[dict[str, Any]]:
        forms = [f"%Y {number}" for number in range(most)]
        rules = [PERSON | {"properties": {"birthDate": {"column": "x", "format": form}}} for form in forms]
        return [{"entities": {str(at): rules[at] for at in range(start, most, 10)}} for start in range(10)]

    assert put(api, using(MOST_FORMATS) * 2).status_code == 201
    refused = put(api, using(MOST_FORMATS + 1)).json()
    assert refused["errors"][0]["reason"] == "exceeds the maximum of 200 different formats"


@ONE_DATABASE
def test_mappings_are_parsed_with_limited_concurrency_and_do_not_delay_other_requests(
    api: InProcessApi, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
):
    entered, third, release = Semaphore(0), Event(), Event()
    count = itertools.count(1)

    def slow(body: bytes, kind: str) -> Any:
        if next(count) > mappings.PARSED_AT_ONCE and not release.is_set():
            third.set()
        entered.release()
        assert release.wait(60)
        return parsed(body, kind)

    monkeypatch.setattr(mappings, "parsed", slow)
    with ThreadPoolExecutor(45) as pool:
        futures = [pool.submit(put, api, MAPPING) for _ in range(45)]
        try:
            for _ in range(mappings.PARSED_AT_ONCE):
                assert entered.acquire(timeout=60)
            assert not third.wait(0.5)
            assert api.admin.get("/v1/datasets/test/mappings").status_code == 200
        finally:
            release.set()
        assert {future.result().status_code for future in futures} == {200, 201}


@ONE_DATABASE
@pytest.mark.parametrize("name", ["AB" * 32, "ab" * 31, "..", "ab%2F" * 8])
def test_invalid_hash_is_refused(api: InProcessApi, dataset: Dataset, name: str):
    response = api.admin.put(f"/v1/datasets/test/mappings/{name}", MAPPING)
    assert response.json()["type"] in (
        "/problems/schema-violation",
        "/problems/route-not-found",
        "/problems/method-not-allowed",
    )


def test_process_creates_a_job_if_mapping_and_file_exist(api: InProcessApi, dataset: Dataset):
    assert api.admin.post(f"{URL}/process").json()["type"] == "/problems/mapping-not-found"
    put(api, MAPPING)
    assert api.admin.post(f"{URL}/process").json()["type"] == "/problems/file-not-found"
    api.services.store.put(dataset.layout.blob_data(HASH), b"id,name\n")

    response = api.admin.post(f"{URL}/process", {"encoding": "LATIN1", "delimiter": ";"})

    assert response.status_code == 202
    job = response.json()
    assert response.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert job["operation"] == "mapping"
    assert job["arguments"] == {"content_hash": HASH, "encoding": "iso8859-1", "delimiter": ";"}


@ONE_DATABASE
@pytest.mark.parametrize(
    "options",
    [{"encoding": "klingon"}, {"encoding": "rot13"}, {"encoding": "unicode_escape"}, {"encoding": "a\x00"},
     {"delimiter": ""}, {"delimiter": ",,"}, {"delimiter": '"'}, {"delimiter": "\n"}, {"force": "maybe"}, {"url": "x"}],
)  # fmt: skip
def test_process_refuses_unknown_options(api: InProcessApi, dataset: Dataset, options: dict[str, Any]):
    put(api, MAPPING)
    api.services.store.put(dataset.layout.blob_data(HASH), b"id,name\n")

    assert api.admin.post(f"{URL}/process", options).json()["type"] == "/problems/schema-violation"


@ONE_DATABASE
def test_mappings_are_listed_a_page_at_a_time(api: InProcessApi, dataset: Dataset):
    hashes = [f"{number:064x}" for number in range(3)]
    for one in hashes:
        assert api.admin.put(f"/v1/datasets/test/mappings/{one}", MAPPING).status_code == 201

    first = api.admin.get("/v1/datasets/test/mappings?limit=2").json()
    second = api.admin.get(f"/v1/datasets/test/mappings?limit=2&cursor={first['next']}").json()

    assert [one["content_hash"] for page in (first, second) for one in page["results"]] == hashes
    assert second["next"] is None
