"""Read entities over HTTP: one, lists, queries, aggregations, adjacent entities."""

import random
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import orjson
import pytest
from httpx2 import Response
from tarn.api.routes.entity_reads import MOST_DATASETS
from tarn.datasets.registry import Dataset
from tarn.model.datasets.snapshot import Snapshot
from tarn.query.entities import MAX_ORIGINS

from tests.in_process_api import Caller, InProcessApi

Flushing = Callable[[], list[Snapshot]]

ROOT = "/v1/datasets/test"
ENTITIES = f"{ROOT}/entities"


@pytest.fixture(autouse=True)
def _dataset(dataset: Dataset) -> None:
    """Create the dataset `test` for every test."""


def entity(id: str, schema: str = "Person", **properties: Any) -> dict[str, Any]:
    lists = {name: values if type(values) is list else [values] for name, values in properties.items()}
    return {"id": id, "schema": schema, "properties": lists}


def add(api: InProcessApi, *entities: dict[str, Any], origin: str = "crawl", dataset: str = "test") -> None:
    response = api.admin.post(f"/v1/datasets/{dataset}/entities?origin={origin}", list(entities))
    assert response.status_code == 200, response.text


def add_statements(api: InProcessApi, *statements: dict[str, Any], origin: str = "crawl") -> None:
    """Write statements, which unlike entities can have a canonical id of their own."""
    lines = b"\n".join(map(orjson.dumps, statements))
    response = api.admin.post(
        f"{ROOT}/statements?origin={origin}", content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    assert response.status_code == 200, response.text


def merge(api: InProcessApi, canonical_id: str, *ids: str) -> None:
    """Give people one canonical entity, named Jane."""
    for one in ids:
        statement = {
            "entity_id": one,
            "canonical_id": canonical_id,
            "schema": "Person",
            "prop": "name",
            "value": "Jane",
        }
        add_statements(api, statement, statement | {"prop": "id", "value": one})


def make_invalid(api: InProcessApi, id: str) -> None:
    """Give an entity two schemata that have no common schema."""
    add(api, entity(id, "Person", name="Who"), origin="one")
    add(api, entity(id, "Vessel", name="What"), origin="two")


def ids_of(response: Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [item["id"] for item in response.json()["results"]]


def lines_of(response: Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [orjson.loads(line) for line in response.content.splitlines()]


def query(api: InProcessApi, where: Any = None, **rest: Any) -> Response:
    return api.admin.post(f"{ENTITIES}/query", {"where": where, **rest})


def problem(response: Response) -> tuple[int, str]:
    return response.status_code, response.json()["type"].removeprefix("/problems/")


def single_error(response: Response) -> tuple[int, str | None, str]:
    (error,) = response.json()["errors"]
    return response.status_code, error["field"], error["reason"]


# One entity


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
def test_entity_is_found_by_canonical_id_entity_id_and_referent(api: InProcessApi, flush: Flushing, flushed: bool):
    add(api, entity("jane", name="Jane Doe", country="de"))
    merge(api, "Q1", "a", "b")
    snapshots = flush() if flushed else []

    by_canonical_id = api.admin.get(f"{ENTITIES}/jane")
    merged = [api.admin.get(f"{ENTITIES}/{name}") for name in ("Q1", "a", "b")]

    assert by_canonical_id.json()["properties"] == {"country": ["de"], "name": ["Jane Doe"]}
    assert (
        by_canonical_id.json()["caption"],
        by_canonical_id.json()["schema"],
        by_canonical_id.json()["datasets"],
    ) == (
        "Jane Doe",
        "Person",
        ["test"],
    )
    assert by_canonical_id.headers["Content-Type"] == "application/json"
    assert [response.json() for response in merged] == [merged[0].json()] * 3
    assert (merged[0].json()["id"], merged[0].json()["referents"]) == ("Q1", ["a", "b"])
    assert by_canonical_id.headers.get("Tarn-Snapshot") == (snapshots[0].id if flushed else None)


def test_entity_filtered_by_origin_has_only_that_origins_statements(api: InProcessApi, flush: Flushing):
    add(api, entity("jane", name="Jane"), origin="crawl")
    flush()
    add(api, entity("jane", name="Janet"), origin="wiki")

    unfiltered = api.admin.get(f"{ENTITIES}/jane").json()
    parts = [api.admin.get(f"{ENTITIES}/jane?origin={origin}").json() for origin in ("crawl", "wiki")]

    assert (unfiltered["properties"], unfiltered["origin"]) == ({"name": ["Jane", "Janet"]}, ["crawl", "wiki"])
    assert [part["properties"]["name"] for part in parts] == [["Jane"], ["Janet"]]
    assert [part["origin"] for part in parts] == [["crawl"], ["wiki"]]
    assert problem(api.admin.get(f"{ENTITIES}/jane?origin=other")) == (404, "entity-not-found")


def test_missing_or_deleted_entity_is_not_found(api: InProcessApi, flush: Flushing):
    add(api, entity("jane", name="Jane"), entity("john", name="John"))
    flush()
    api.admin.delete(f"{ENTITIES}/jane")

    assert problem(api.admin.get(f"{ENTITIES}/jane")) == (404, "entity-not-found")
    assert problem(api.admin.get(f"{ENTITIES}/nobody")) == (404, "entity-not-found")
    assert problem(api.admin.get(f"{ENTITIES}/nobody/adjacent")) == (404, "entity-not-found")
    assert ids_of(api.admin.get(ENTITIES)) == ["john"]


def test_invalid_entity_is_reported_by_every_read_and_fails_none(api: InProcessApi, flush: Flushing):
    make_invalid(api, "b")
    flush()
    add(api, entity("a", name="A"), entity("c", name="C"))

    alone = api.admin.get(f"{ENTITIES}/b")
    one_side = api.admin.get(f"{ENTITIES}/b?origin=two")
    page = api.admin.get(ENTITIES).json()
    lines = lines_of(api.admin.get(f"{ENTITIES}/stream?end=true"))

    assert problem(alone) == (422, "schema-violation")
    assert one_side.json()["schema"] == "Vessel"
    assert [item["id"] for item in page["results"]] == ["a", "c"]
    assert [(item["id"], item["schemata"]) for item in page["invalid"]] == [("b", ["Person", "Vessel"])]
    assert [line["id"] for line in (lines[0], lines[2])] == ["a", "c"]
    assert lines[1]["$invalid"] == page["invalid"][0]
    assert (lines[3]["$end"]["count"], lines[3]["$end"]["invalid"]) == (3, 1)


def test_stream_without_invalid_entities_ends_with_a_count_of_zero(api: InProcessApi):
    empty = lines_of(api.admin.get(f"{ENTITIES}/stream?end=true"))
    add(api, entity("a", name="A"))
    one = lines_of(api.admin.get(f"{ENTITIES}/stream?end=true"))

    assert empty == [{"$end": {"snapshot": None, "count": 0, "invalid": 0}}]
    assert one[-1] == {"$end": {"snapshot": None, "count": 1, "invalid": 0}}


def test_aggregations_count_invalid_entities_and_leave_none_out(api: InProcessApi):
    make_invalid(api, "b")
    add(api, entity("a", name="A"))

    counted = api.admin.post(f"{ENTITIES}/aggregate", {"metrics": ["count"]}).json()

    assert counted["results"] == [{"group": {}, "metrics": {"count": 2}}]


def test_invalid_adjacent_entity_is_distinguished_from_a_missing_one(api: InProcessApi):
    make_invalid(api, "b")
    links = [entity(f"own-{asset}", "Ownership", owner="a", asset=asset) for asset in ("b", "gone")]
    add(api, entity("a", "Company", name="A"), *links)

    page = api.admin.get(f"{ENTITIES}/own-b/adjacent").json()
    missing = api.admin.get(f"{ENTITIES}/own-gone/adjacent").json()

    assert [(item["id"], item["entity"] is None) for item in page["results"]] == [("b", True), ("a", False)]
    assert [(item["id"], item["schemata"]) for item in page["invalid"]] == [("b", ["Person", "Vessel"])]
    assert ([item["id"] for item in missing["results"]], missing["invalid"]) == (["gone", "a"], [])


def test_invalid_entities_are_listed_with_the_schemata_of_each_origin_and_the_reason(
    api: InProcessApi, flush: Flushing
):
    make_invalid(api, "b")
    add(api, entity("a", "Company", name="A"), origin="one")
    add(api, entity("a", "LegalEntity", name="A"), origin="two")
    flush()
    make_invalid(api, "d")
    add(api, entity("c", name="C"), entity("b", name="B"))

    response = api.admin.get(f"{ENTITIES}/invalid")

    assert response.json() == {
        "results": [
            {
                "id": "b",
                "reason": "No common schema: Person, Vessel",
                "schemata": ["Person", "Vessel"],
                "by_origin": [
                    {"origin": "crawl", "schemata": ["Person"]},
                    {"origin": "one", "schemata": ["Person"]},
                    {"origin": "two", "schemata": ["Vessel"]},
                ],
                "origins": 3,
            },
            {
                "id": "d",
                "reason": "No common schema: Person, Vessel",
                "schemata": ["Person", "Vessel"],
                "by_origin": [
                    {"origin": "one", "schemata": ["Person"]},
                    {"origin": "two", "schemata": ["Vessel"]},
                ],
                "origins": 2,
            },
        ],
        "next": None,
    }
    assert response.headers["Tarn-Snapshot"]


def test_invalid_entities_are_those_of_the_requested_snapshot(api: InProcessApi, flush: Flushing):
    make_invalid(api, "b")
    flush()
    api.admin.delete(f"{ENTITIES}/b?origin=two")
    make_invalid(api, "c")

    def listed(query: str) -> list[str]:
        return ids_of(api.admin.get(f"{ENTITIES}/invalid{query}"))

    assert (listed(""), listed("?at=1"), listed("?fresh=snapshot")) == (["c"], ["b"], ["b"])
    assert problem(api.admin.get(f"{ENTITIES}/invalid?at=1&fresh=snapshot")) == (400, "invalid-format")
    assert problem(api.admin.get(f"{ENTITIES}/invalid?at=7")) == (404, "snapshot-not-found")
    assert problem(api.admin.get(f"{ENTITIES}/invalid?nonsense=1")) == (422, "schema-violation")


def test_invalid_entities_are_paged_by_canonical_id(api: InProcessApi, flush: Flushing):
    for name in ("ü", "b", "a b", "c", "z"):
        make_invalid(api, name)
    add(api, entity("bb", name="B"))
    flush()

    pages: list[list[str]] = []
    cursor = None
    while cursor is not None or not pages:
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = api.admin.get(f"{ENTITIES}/invalid", params=params).json()
        pages.append([item["id"] for item in page["results"]])
        cursor = page["next"]

    assert pages == [["a b", "b"], ["c", "z"], ["ü"]]
    first = api.admin.get(f"{ENTITIES}/invalid?limit=1").json()
    assert problem(api.admin.get(ENTITIES, params={"cursor": first["next"]})) == (422, "schema-violation")
    assert problem(api.admin.get(f"{ENTITIES}/invalid?limit=1001")) == (422, "schema-violation")


def test_invalid_merged_entity_is_listed_by_its_canonical_id(api: InProcessApi):
    parts = {"p": "Person", "v": "Vessel"}
    for name, schema in parts.items():
        common = {"entity_id": name, "canonical_id": "merged", "schema": schema}
        add_statements(api, common | {"prop": "name", "value": name}, common | {"prop": "id", "value": name})

    (invalid,) = api.admin.get(f"{ENTITIES}/invalid").json()["results"]

    assert (invalid["id"], invalid["by_origin"]) == ("merged", [{"origin": "crawl", "schemata": ["Person", "Vessel"]}])


def test_invalid_entity_of_many_origins_lists_the_first_and_counts_all(api: InProcessApi):
    statements = [
        {"entity_id": "b", "schema": "Vessel" if number else "Person", "prop": "name", "value": "B",
         "origin": f"o{number:03}"}
        for number in range(MAX_ORIGINS + 5)
    ]  # fmt: skip
    lines = b"\n".join(map(orjson.dumps, statements))
    sent = api.admin.post(f"{ROOT}/statements", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert sent.status_code == 200, sent.text

    (invalid,) = api.admin.get(f"{ENTITIES}/invalid").json()["results"]

    assert [one["origin"] for one in invalid["by_origin"]] == [f"o{number:03}" for number in range(MAX_ORIGINS)]
    assert invalid["origins"] == MAX_ORIGINS + 5


@pytest.mark.parametrize("name", ["stream", "query", "aggregate", "adjacent", "invalid"])
def test_entity_named_like_a_route_is_written_listed_and_deleted(api: InProcessApi, name: str):
    assert api.admin.put(f"{ENTITIES}/{name}", entity(name, name="N")).status_code == 200

    assert ids_of(api.admin.get(ENTITIES, params={"id": name})) == [name]
    assert [item["id"] for item in lines_of(api.admin.get(f"{ENTITIES}/stream?id={name}"))] == [name]
    assert api.admin.get(f"{ENTITIES}/{name}/adjacent").json()["results"] == []
    assert api.admin.delete(f"{ENTITIES}/{name}").json()["tombstones"] == 2


def test_entity_named_like_a_route_of_another_method_is_shown(api: InProcessApi):
    add(api, entity("query", name="Q"), entity("aggregate", name="A"))

    assert [api.admin.get(f"{ENTITIES}/{name}").json()["id"] for name in ("query", "aggregate")] == [
        "query",
        "aggregate",
    ]


SPECIAL_IDS = {
    "percent": ("50%", "50%25"),
    "quotes": ("'; DROP TABLE live; --\"", "%27%3B%20DROP%20TABLE%20live%3B%20--%22"),
    "unicode": ("Ünï-кот-😀", "%C3%9Cn%C3%AF-%D0%BA%D0%BE%D1%82-%F0%9F%98%80"),
    "question": ("a?b#c&d=e", "a%3Fb%23c%26d%3De"),
    "backslash": ("a\\b", "a%5Cb"),
    "long": ("ü" * 255, "%C3%BC" * 255),
    "dots": ("..", "%2E%2E"),
    "space": (" a b ", "%20a%20b%20"),
}


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
def test_ids_with_special_characters_are_found_in_the_path_in_parameters_and_in_queries(
    api: InProcessApi, flush: Flushing, flushed: bool
):
    add(api, entity("other", name="O"), *(entity(name, name="N") for name, _ in SPECIAL_IDS.values()))
    if flushed:
        flush()

    for name, path in SPECIAL_IDS.values():
        assert api.admin.get(f"{ENTITIES}/{path}").json()["id"] == name
        assert api.admin.get(f"{ENTITIES}/{path}/adjacent").json()["results"] == []
        assert ids_of(api.admin.get(ENTITIES, params={"id": name})) == [name]
        assert ids_of(query(api, {"field": "id", "op": "eq", "value": name})) == [name]
        assert len(api.admin.get(f"{ROOT}/statements", params={"id": name}).json()["results"]) == 2
        assert api.admin.delete(f"{ENTITIES}/{path}").json()["tombstones"] == 2
        assert problem(api.admin.get(f"{ENTITIES}/{path}")) == (404, "entity-not-found")
    assert ids_of(api.admin.get(ENTITIES)) == ["other"]


def test_id_with_a_slash_is_refused_in_the_path_and_found_by_parameter(api: InProcessApi):
    add(api, entity("a/b", name="N"))

    assert problem(api.admin.get(f"{ENTITIES}/a%2Fb")) == (404, "route-not-found")
    assert ids_of(api.admin.get(ENTITIES, params={"id": "a/b"})) == ["a/b"]


@pytest.mark.parametrize("overlay", [0, 1000], ids=["overlay-not-cached", "overlay-cached"])
def test_impossible_id_is_refused_or_not_found(api: InProcessApi, overlay: int):
    add(api, entity("jane", name="Jane"))
    paths = ["%00", "a%00b", "%0A", "a" * 256, "%ED%A0%80"]

    with api.with_settings(overlay_rows=overlay) as other:
        responses = [other.admin.get(f"{ENTITIES}/{path}{below}") for path in paths for below in ("", "/adjacent")]

    assert {problem(response) for response in responses} == {(404, "entity-not-found"), (422, "schema-violation")}


# Lists


@pytest.fixture
def sample(api: InProcessApi, flush: Flushing) -> None:
    """Write people and a company of two origins, half of them flushed; `q` merges two of them."""
    add(api, entity("ada", name="Ada", birthDate="1815"), entity("acme", "Company", name="Acme", country="de"))
    merge(api, "q", "q1")
    flush()
    add(api, entity("bob", name="Bob", birthDate=["1990", "1980"]), origin="wiki")
    add(api, entity("ada", name="Augusta", country="gb"), origin="wiki")
    merge(api, "q", "q2")


FILTERED = {
    "": ["acme", "ada", "bob", "q"],
    "id=ada": ["ada"],
    "id=q1&id=bob&id=nobody": ["bob", "q"],
    "id=q": ["q"],
    "id=q&id=q2": ["q"],
    "id=": [],
    "canonical_id=q&canonical_id=ada": ["ada", "q"],
    "canonical_id=q1": [],
    "id=q1&canonical_id=q": ["q"],
    "schema=Company": ["acme"],
    "schema=LegalEntity": [],
    "schemata=LegalEntity": ["acme", "ada", "bob", "q"],
    "schemata=Organization&schemata=Vessel": ["acme"],
    "origin=wiki": ["ada", "bob"],
    "origin=wiki&origin=crawl": ["acme", "ada", "bob", "q"],
    "origin=wiki&schema=Company": [],
    "id=acme&origin=wiki": [],
    "id=ada&origin=wiki": ["ada"],
}


@pytest.mark.usefixtures("sample")
def test_list_and_stream_return_rows_that_match_every_filter(api: InProcessApi):
    listed = {filters: api.admin.get(f"{ENTITIES}?{filters}") for filters in FILTERED}
    streamed = {filters: lines_of(api.admin.get(f"{ENTITIES}/stream?{filters}")) for filters in FILTERED}

    assert {filters: ids_of(response) for filters, response in listed.items()} == FILTERED
    assert streamed == {filters: response.json()["results"] for filters, response in listed.items()}


SORTED = {
    ("id",): ["acme", "ada", "bob", "q"],
    ("-id",): ["q", "bob", "ada", "acme"],
    ("-canonical_id",): ["q", "bob", "ada", "acme"],
    ("schema", "-id"): ["acme", "q", "bob", "ada"],
    ("prop:birthDate",): ["ada", "bob", "acme", "q"],
    ("-prop:birthDate",): ["bob", "ada", "acme", "q"],
    ("-prop:name",): ["q", "bob", "ada", "acme"],
    ("first_seen",): ["acme", "ada", "q", "bob"],
    ("-last_seen", "id"): ["q", "ada", "bob", "acme"],
    ("-prop:country", "-id"): ["ada", "acme", "q", "bob"],
}


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize(
    "limit", [pytest.param(1, marks=pytest.mark.long), 3, pytest.param(100, marks=pytest.mark.long)]
)
def test_sorted_list_is_the_same_in_pages_and_as_a_query(api: InProcessApi, limit: int):
    def queried(sort: tuple[str, ...]) -> list[str]:
        ids: list[str] = []
        cursor = None
        while cursor is not None or not ids:
            page = query(api, sort=sort, limit=limit, cursor=cursor).json()
            ids += [each["id"] for each in page["results"]]
            cursor = page["next"]
        return ids

    assert {sort: all_ids(api.admin, sort=list(sort), limit=limit) for sort in SORTED} == SORTED
    assert {sort: queried(sort) for sort in SORTED} == SORTED


def pages(caller: Caller, **parameters: Any) -> Iterator[list[str]]:
    """Return the ids of a list, page by page."""
    cursor: dict[str, str] = {}
    while True:
        page = caller.get(ENTITIES, params={**parameters, **cursor}).json()
        assert len(page["results"]) <= parameters["limit"]
        yield [each["id"] for each in page["results"]]
        if page["next"] is None:
            return
        cursor = {"cursor": page["next"]}


def all_ids(caller: Caller, **parameters: Any) -> list[str]:
    return [name for page in pages(caller, **parameters) for name in page]


def test_paging_returns_each_unchanged_entity_exactly_once_during_writes(api: InProcessApi, flush: Flushing):
    rng = random.Random(6)
    unchanged = [f"stay-{number:03d}" for number in range(60)]
    deleted = [f"leave-{number:03d}" for number in range(12)]

    def random_entity(name: str) -> dict[str, Any]:
        dates = [str(rng.randrange(1900, 1930)) for _ in range(rng.randrange(3))]
        payment = entity(name, "Payment", amount=[str(rng.randrange(30)), "many"], date=dates)
        return rng.choice([payment, entity(name, name="No date"), entity(name, birthDate=dates)])

    first = [random_entity(name) for name in [*unchanged, *deleted]]
    rng.shuffle(first)
    add(api, *first[:40])
    flush()
    add(api, *first[40:])
    sorts = [
        [],
        ["-id"],
        ["prop:birthDate"],
        ["-prop:birthDate", "schema"],
        ["first_seen"],
        ["-prop:amount", "prop:date"],
    ]
    iterators = [pages(api.admin, sort=sort, limit=7) for sort in sorts]
    seen: list[list[str]] = [[] for _ in sorts]

    for step, next_pages in enumerate(zip_longest(*iterators, fillvalue=())):
        for ids, page in zip(seen, next_pages, strict=True):
            ids += page
        add(api, random_entity(f"new-{step}"), random_entity(f"a-new-{step}"))
        api.admin.delete(f"{ENTITIES}/{deleted.pop() if deleted else 'nobody'}")
        if step == 4:
            flush()

    for ids in seen:
        assert sorted(name for name in ids if name.startswith("stay")) == unchanged
        assert len(ids) == len(set(ids))


# Queries and counts


WIKI = {"field": "origin", "op": "eq", "value": "wiki"}

MATCHED: list[tuple[Any, list[str]]] = [
    (None, ["acme", "ada", "bob", "q"]),
    ({"field": "prop:name", "op": "startswith", "value": "A"}, ["acme", "ada"]),
    ({"not": {"field": "type:countries", "op": "null", "value": True}}, ["acme", "ada"]),
    ({"and": [{"field": "schemata", "op": "eq", "value": "Person"}, WIKI]}, ["ada", "bob"]),
    ({"or": [{"field": "id", "op": "in", "value": ["q2"]}, {"field": "id", "op": "eq", "value": "bob"}]}, ["bob", "q"]),
    ({"field": "prop:birthDate", "op": "lt", "value": "1981"}, ["ada", "bob"]),
]  # fmt: skip


@pytest.mark.usefixtures("sample")
def test_query_returns_entities_that_match_its_condition(api: InProcessApi):
    assert [(where, ids_of(query(api, where))) for where, _ in MATCHED] == MATCHED


@pytest.mark.usefixtures("sample")
def test_aggregate_counts_and_measures_matching_entities(api: InProcessApi):
    body = {
        "where": {"field": "schemata", "op": "eq", "value": "LegalEntity"},
        "group_by": ["schema"],
        "metrics": ["count", {"min": "prop:birthDate"}, {"count_distinct": "prop:name"}],
    }

    response = api.admin.post(f"{ENTITIES}/aggregate", body)

    assert response.json()["results"] == [
        {
            "group": {"schema": "Person"},
            "metrics": {"count": 3, "min:prop:birthDate": "1815", "count_distinct:prop:name": 4},
        },
        {
            "group": {"schema": "Company"},
            "metrics": {"count": 1, "min:prop:birthDate": None, "count_distinct:prop:name": 1},
        },
    ]
    assert len(response.headers["Tarn-Snapshot"]) == 36


# Several datasets


@pytest.fixture
def several(api: InProcessApi) -> Caller:
    """Return a client that may read three datasets of four."""
    for name in ("leaks_a", "leaks_b", "secret"):
        api.dataset(name)
        add(api, entity("jane", name=f"Jane of {name}"), entity(f"of_{name}", name="N"), dataset=name)
    add(api, entity("jane", name="Jane of test"))
    return api.tenant("reader", leaks_a="read", leaks_b="read", test="write")


def test_query_over_datasets_covers_only_those_the_caller_may_read(several: Caller):
    condition = {"field": "id", "op": "eq", "value": "jane"}

    def captions(*patterns: str) -> list[str]:
        response = several.post("/v1/entities/query", {"datasets": patterns, "where": condition})
        assert response.status_code == 200
        return [each["caption"] for each in response.json()["results"]]

    assert captions("*") == ["Jane of leaks_a", "Jane of leaks_b", "Jane of test"]
    assert captions("leaks_*", "secret") == ["Jane of leaks_a", "Jane of leaks_b"]
    assert captions("test", "te*", "test") == ["Jane of test"]
    assert captions("secret") == captions("nothing", "none_*") == []


def test_aggregate_over_datasets_counts_only_what_the_caller_may_read(api: InProcessApi, several: Caller):
    body = {"datasets": ["*"], "metrics": ["count"]}

    assert several.post("/v1/entities/aggregate", body).json()["results"][0]["metrics"] == {"count": 5}
    assert api.admin.post("/v1/entities/aggregate", body).json()["results"][0]["metrics"] == {"count": 7}
    assert several.post("/v1/entities/aggregate", body | {"datasets": ["secret"]}).json() == {"results": []}


def test_query_over_datasets_is_the_same_in_pages(several: Caller):
    ids: list[tuple[str, str]] = []
    cursor = None
    while cursor is not None or not ids:
        body = {"datasets": ["*"], "sort": ["-prop:name"], "limit": 2, "cursor": cursor}
        page = several.post("/v1/entities/query", body).json()
        ids += [(each["datasets"][0], each["id"]) for each in page["results"]]
        cursor = page["next"]

    assert ids == [
        ("leaks_a", "of_leaks_a"),
        ("leaks_b", "of_leaks_b"),
        ("test", "jane"),
        ("leaks_b", "jane"),
        ("leaks_a", "jane"),
    ]


def test_query_over_too_many_datasets_is_refused(api: InProcessApi):
    for number in range(MOST_DATASETS):
        api.dataset(f"many_{number}")

    response = api.admin.post("/v1/entities/query", {"datasets": ["*"]})
    fits = api.admin.post("/v1/entities/query", {"datasets": ["many_*"]})

    assert single_error(response) == (422, "datasets", f"match more than {MOST_DATASETS} datasets")
    assert fits.json() == {"results": [], "invalid": [], "next": None}


# Adjacent entities


@pytest.fixture
def owned(api: InProcessApi, flush: Flushing) -> None:
    """Write a company owned by a person and directed by an entity that does not exist."""
    add(
        api,
        entity("acme", "Company", name="Acme"),
        entity("owning", "Ownership", owner="jane", asset="acme"),
        entity("jane", name="Jane"),
    )
    flush()
    add(api, entity("directing", "Directorship", director="nobody", organization="acme"))


def adjacent(api: InProcessApi, name: str, **parameters: Any) -> list[tuple[str, bool, str, str | None]]:
    references: list[tuple[str, bool, str, str | None]] = []
    cursor: dict[str, str] = {}
    while True:
        response = api.admin.get(f"{ENTITIES}/{name}/adjacent", params={**parameters, **cursor})
        assert response.status_code == 200, response.text
        page = response.json()
        for each in page["results"]:
            shown = each["entity"] and each["entity"]["id"]
            references.append((each["property"], each["outgoing"], each["id"], shown))
        if page["next"] is None:
            return references
        cursor = {"cursor": page["next"]}


@pytest.mark.usefixtures("owned")
@pytest.mark.parametrize("limit", [1, 100])
def test_adjacent_entities_are_listed_with_the_property_that_leads_to_them(api: InProcessApi, limit: int):
    assert adjacent(api, "acme", limit=limit) == [
        ("directorshipOrganization", False, "directing", "directing"),
        ("ownershipAsset", False, "owning", "owning"),
    ]
    assert adjacent(api, "owning", limit=limit) == [("asset", True, "acme", "acme"), ("owner", True, "jane", "jane")]
    assert adjacent(api, "directing", limit=limit) == [
        ("director", True, "nobody", None),
        ("organization", True, "acme", "acme"),
    ]


@pytest.mark.usefixtures("owned")
def test_adjacent_entities_of_a_merged_entity_are_those_of_all_its_parts(api: InProcessApi):
    merge(api, "Q1", "jane")
    add(api, entity("owning2", "Ownership", owner="Q1", asset="acme"))

    expected = [("ownershipOwner", False, "owning", "owning"), ("ownershipOwner", False, "owning2", "owning2")]
    assert adjacent(api, "Q1") == adjacent(api, "jane") == expected
    assert ("owner", True, "jane", "Q1") in adjacent(api, "owning")


def test_reference_whose_reverse_property_has_no_name_keeps_its_own(api: InProcessApi):
    add(api, entity("a", riskSource="b"), entity("b", riskSource="a"))

    for limit in (1, 100):
        assert adjacent(api, "a", limit=limit) == [("riskSource", False, "b", "b"), ("riskSource", True, "b", "b")]


def test_invalid_adjacent_entity_is_listed_without_its_entity(api: InProcessApi):
    make_invalid(api, "odd")
    add(api, entity("owning", "Ownership", owner="odd"))

    assert adjacent(api, "owning") == [("owner", True, "odd", None)]
    assert problem(api.admin.get(f"{ENTITIES}/odd/adjacent")) == (422, "schema-violation")


# Writes as seen by readers


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
def test_delete_counts_removed_statements_of_snapshot_and_journal(api: InProcessApi, flush: Flushing, flushed: bool):
    add(api, entity("jane", name="Jane", country="de"), origin="crawl")
    add(api, entity("jane", name="Janet"), origin="wiki")
    add(api, entity("john", name="John"), origin="wiki")
    if flushed:
        flush()

    def deleted(path: str) -> int:
        return int(api.admin.delete(f"{ROOT}/{path}").json()["tombstones"])

    assert deleted("entities/jane?origin=other") == 0
    assert deleted("entities/jane?origin=crawl") == 3
    assert api.admin.get(f"{ENTITIES}/jane").json()["properties"] == {"name": ["Janet"]}
    assert deleted("entities/jane") == 2
    assert deleted("entities/jane") == 0
    statements = api.admin.get(f"{ROOT}/statements", params={"prop": "name"}).json()["results"]
    assert [item["value"] for item in statements] == ["John"]
    assert deleted(f"statements/{statements[0]['id']}?origin=crawl") == 0
    assert deleted(f"statements/{statements[0]['id']}") == 1
    assert deleted("origins/crawl") == 0
    assert deleted("origins/wiki") == 1
    assert ids_of(api.admin.get(ENTITIES)) == []


def test_put_replaces_flushed_statements_of_its_origin(api: InProcessApi, flush: Flushing):
    add(api, entity("jane", name="Jane", country="de"), origin="crawl")
    add(api, entity("jane", name="Janet"), origin="wiki")
    flush()

    api.admin.put(f"{ENTITIES}/jane?origin=crawl", entity("jane", name="Jane", birthDate="1990"))

    expected = {"birthDate": ["1990"], "name": ["Jane", "Janet"]}
    assert api.admin.get(f"{ENTITIES}/jane").json()["properties"] == expected
    flush()
    assert api.admin.get(f"{ENTITIES}/jane").json()["properties"] == expected
    assert ids_of(query(api, {"field": "prop:country", "op": "eq", "value": "de"})) == []


# Bad input

EQ: dict[str, Any] = {"field": "id", "op": "eq", "value": "a"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"where": {"field": "colour", "op": "eq", "value": "x"}}, "where.field"),
    "unknown property": ({"where": {"field": "prop:colour", "op": "eq", "value": "x"}}, "where.field"),
    "sql as a field": ({"where": {"field": "id) OR 1=1 --", "op": "eq", "value": "x"}}, "where.field"),
    "unknown op": ({"where": {"field": "id", "op": "is", "value": "x"}}, "where.op"),
    "op that the field does not support": ({"where": {"field": "schema", "op": "gt", "value": "Person"}}, "where.op"),
    "number for a string": ({"where": {"field": "id", "op": "eq", "value": 1}}, "where.value"),
    "string for a list": ({"where": {"field": "id", "op": "in", "value": "a"}}, "where.value"),
    "string for a boolean": ({"where": {"field": "prop:name", "op": "null", "value": "yes"}}, "where.value"),
    "empty and": ({"where": {"and": []}}, "where.and"),
    "text for or": ({"where": {"or": "x"}}, "where.or"),
    "list for a node": ({"where": []}, "where"),
    "unknown member of a comparison": ({"where": EQ | {"more": 1}}, "where.more"),
    "unknown member": ({"colour": 1}, "colour"),
    "unknown sort key": ({"sort": ["colour"]}, "sort.0"),
    "sql as a sort key": ({"sort": ["id; DROP TABLE live"]}, "sort.0"),
    "sort key twice": ({"sort": ["id", "id"]}, "sort.1"),
    "too many sort keys": ({"sort": ["id", "-id", "schema", "-schema"]}, "sort"),
    "limit of zero": ({"limit": 0}, "limit"),
    "limit over the maximum": ({"limit": 1001}, "limit"),
    "text for a limit": ({"limit": "many"}, "limit"),
    "100 000 ids": ({"where": {"field": "id", "op": "in", "value": ["a"] * 100_000}}, "where.value"),
    "NUL": ({"where": {"field": "id", "op": "eq", "value": "a\0"}}, "where.value"),
    "unknown schema": ({"where": {"field": "schema", "op": "eq", "value": "Colour"}}, "where.value"),
    "text for a moment": ({"where": {"field": "first_seen", "op": "gt", "value": "soon"}}, "where.value"),
}


def refusal(response: Response) -> tuple[int, list[str]]:
    return response.status_code, [error["field"] for error in response.json().get("errors", ())]


def test_invalid_query_is_refused_with_the_location_of_the_error(api: InProcessApi):
    def refusals(path: str, **more: Any) -> dict[str, tuple[int, list[str]]]:
        return {name: refusal(api.admin.post(path, {**body, **more})) for name, (body, _) in REFUSED.items()}

    expected = {name: (422, [field]) for name, (_, field) in REFUSED.items()}
    assert refusals(f"{ENTITIES}/query") == expected
    assert refusals("/v1/entities/query", datasets=["*"]) == expected


@pytest.mark.parametrize(("opening", "closing"), [('{"not":', "}"), ('{"and":[', "]}"), ("[", "]"), ('{"a":', "}")])
def test_query_of_excessive_depth_is_refused(api: InProcessApi, opening: str, closing: str):
    comparison = orjson.dumps(EQ).decode()

    def status(route: str, depth: int) -> int:
        body = '{"metrics":["count"],"where":' + opening * depth + comparison + closing * depth + "}"
        headers = {"Content-Type": "application/json"}
        return int(api.admin.post(f"{ENTITIES}/{route}", content=body, headers=headers).status_code)

    # The parsers fail at a depth of about 1000; our own validation refuses what they accept.
    depths = [33, 200, 330, 495, *range(500, 516, 5), 900, *range(980, 1030, 5), 10_000]
    assert {status(route, depth) for route in ("query", "aggregate") for depth in depths} == {400, 422}


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\\udc00\\ud800"', b"NaN", b"1e999", b"\0", b"{", b'"\xff"'])
def test_body_that_is_not_json_or_not_text_is_refused(api: InProcessApi, text: bytes):
    body = b'{"where":{"field":"id","op":"eq","value":' + text + b"}}"

    response = api.admin.post(f"{ENTITIES}/query", content=body, headers={"Content-Type": "application/json"})

    assert problem(response) in [(400, "invalid-format"), (422, "schema-violation")]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"Content-Type": "text/plain"}, b"{}", (415, "unsupported-media-type")),
        ({"Content-Type": "application/json"}, b"", (400, "empty-body")),
        ({"Content-Type": "application/json", "Accept": "text/csv"}, b"{}", (406, "not-acceptable")),
        ({"Content-Type": "application/json", "Content-Encoding": "br"}, b"{}", (415, "unsupported-media-type")),
    ],
)
def test_query_with_an_unsupported_media_type_is_refused(
    api: InProcessApi, headers: dict[str, str], body: bytes, expected: tuple[int, str]
):
    assert problem(api.admin.post(f"{ENTITIES}/query", content=body, headers=headers)) == expected


def test_entities_stream_as_ndjson_only(api: InProcessApi):
    add(api, entity("jane", name="Jane"))

    assert problem(api.admin.get(f"{ENTITIES}/stream", headers={"Accept": "text/csv"})) == (406, "not-acceptable")
    response = api.admin.get(f"{ENTITIES}/stream", headers={"Accept": "application/x-ndjson, */*;q=0.1"})
    assert response.headers["Content-Type"] == "application/x-ndjson"
    assert [line["id"] for line in lines_of(response)] == ["jane"]


SQL = ["'", "'; DROP TABLE live; --", '" OR 1=1 --', "$1", "?", "%", "_", "{}", "\\", "a') UNION SELECT * FROM x --"]


@pytest.mark.parametrize("text", SQL)
def test_sql_in_any_string_is_treated_as_a_string(api: InProcessApi, text: str):
    add(api, entity("jane", name="Jane"), entity(text, name=["Odd", text, f"x{text}"]))

    for op in ("eq", "startswith", "contains", "endswith"):
        assert ids_of(query(api, {"field": "prop:name", "op": op, "value": text})) == [text]
    assert ids_of(query(api, {"field": "prop:name", "op": "in", "value": [text] * 300})) == [text]
    assert ids_of(api.admin.get(ENTITIES, params={"id": text, "canonical_id": text})) == [text]
    assert ids_of(query(api, {"field": "id", "op": "gte", "value": text}, sort=["-prop:name"]))
    grouped = api.admin.post(
        f"{ENTITIES}/aggregate",
        {"where": {"field": "id", "op": "eq", "value": text}, "group_by": ["prop:name"], "metrics": ["count"]},
    ).json()["results"]
    assert sorted(group["group"]["prop:name"] for group in grouped) == sorted(["Odd", text, f"x{text}"])


INVALID_PARAMETERS = {
    "limit=0": "query.limit",
    "limit=1001": "query.limit",
    "limit=-1": "query.limit",
    "limit=1%00": "query.limit",
    "colour=red": "query.colour",
    "sort=colour": "query.sort.0",
    "sort=id&sort=id": "query.sort.1",
    "schema=Colour": "query.schema",
    "schemata=%27%20OR%201=1": "query.schemata",
    "origin=%27": "query.origin.0",
    "id=a%00b": "query.id",
    "canonical_id=%00": "query.canonical_id",
    "id=" + "&id=".join("a" * 1001): "query.id",
    "cursor=abc": "query.cursor",
    "at=%27": "query.at",
    "fresh=never": "query.fresh",
    "end=true": "query.end",
}


def test_invalid_parameter_is_refused_with_its_name(api: InProcessApi):
    refusals = {parameters: refusal(api.admin.get(f"{ENTITIES}?{parameters}")) for parameters in INVALID_PARAMETERS}

    assert refusals == {parameters: (422, [field]) for parameters, field in INVALID_PARAMETERS.items()}
