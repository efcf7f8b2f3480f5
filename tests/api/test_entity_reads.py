"""Entities over HTTP, read: one, lists, queries, counts, neighbours."""

import random
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import orjson
import pytest
from httpx2 import Response
from tarn.api.routes.entity_reads import MOST_DATASETS
from tarn.datasets.registry import Dataset
from tarn.model.snapshot import Snapshot
from tarn.query.entities import MAX_ORIGINS

from tests.in_process_api import Caller, InProcessApi

Flushing = Callable[[], list[Snapshot]]

ROOT = "/v1/datasets/test"
ENTITIES = f"{ROOT}/entities"


@pytest.fixture(autouse=True)
def _dataset(dataset: Dataset) -> None:
    """Every test has the dataset `test`."""


def entity(id: str, schema: str = "Person", **properties: Any) -> dict[str, Any]:
    lists = {name: values if type(values) is list else [values] for name, values in properties.items()}
    return {"id": id, "schema": schema, "properties": lists}


def add(house: InProcessApi, *entities: dict[str, Any], origin: str = "crawl", dataset: str = "test") -> None:
    answer = house.admin.post(f"/v1/datasets/{dataset}/entities?origin={origin}", list(entities))
    assert answer.status_code == 200, answer.text


def add_statements(house: InProcessApi, *statements: dict[str, Any], origin: str = "crawl") -> None:
    """Write statements, which unlike entities can have a canonical id of their own."""
    lines = b"\n".join(map(orjson.dumps, statements))
    answer = house.admin.post(
        f"{ROOT}/statements?origin={origin}", content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    assert answer.status_code == 200, answer.text


def merge(house: InProcessApi, canonical_id: str, *ids: str) -> None:
    """Say of people that they are one, called Jane."""
    for one in ids:
        statement = {
            "entity_id": one,
            "canonical_id": canonical_id,
            "schema": "Person",
            "prop": "name",
            "value": "Jane",
        }
        add_statements(house, statement, statement | {"prop": "id", "value": one})


def make_invalid(house: InProcessApi, id: str) -> None:
    """Say of an entity that it is two things which have nothing in common."""
    add(house, entity(id, "Person", name="Who"), origin="one")
    add(house, entity(id, "Vessel", name="What"), origin="two")


def ids_of(answer: Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [found["id"] for found in answer.json()["results"]]


def lines_of(answer: Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [orjson.loads(line) for line in answer.content.splitlines()]


def query(house: InProcessApi, where: Any = None, **rest: Any) -> Response:
    return house.admin.post(f"{ENTITIES}/query", {"where": where, **rest})


def problem(answer: Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("/problems/")


def single_error(answer: Response) -> tuple[int, str | None, str]:
    (found,) = answer.json()["errors"]
    return answer.status_code, found["field"], found["reason"]


# One


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
def test_entity_is_found_by_canonical_id_entity_id_and_referent(house: InProcessApi, flush: Flushing, flushed: bool):
    add(house, entity("jane", name="Jane Doe", country="de"))
    merge(house, "Q1", "a", "b")
    snapshots = flush() if flushed else []

    plain = house.admin.get(f"{ENTITIES}/jane")
    merged = [house.admin.get(f"{ENTITIES}/{name}") for name in ("Q1", "a", "b")]

    assert plain.json()["properties"] == {"country": ["de"], "name": ["Jane Doe"]}
    assert (plain.json()["caption"], plain.json()["schema"], plain.json()["datasets"]) == (
        "Jane Doe",
        "Person",
        ["test"],
    )
    assert plain.headers["Content-Type"] == "application/json"
    assert [answer.json() for answer in merged] == [merged[0].json()] * 3
    assert (merged[0].json()["id"], merged[0].json()["referents"]) == ("Q1", ["a", "b"])
    assert plain.headers.get("Tarn-Snapshot") == (snapshots[0].id if flushed else None)


def test_entity_as_one_origin_tells_it_has_nothing_of_the_others(house: InProcessApi, flush: Flushing):
    add(house, entity("jane", name="Jane"), origin="crawl")
    flush()
    add(house, entity("jane", name="Janet"), origin="wiki")

    whole = house.admin.get(f"{ENTITIES}/jane").json()
    parts = [house.admin.get(f"{ENTITIES}/jane?origin={origin}").json() for origin in ("crawl", "wiki")]

    assert (whole["properties"], whole["origin"]) == ({"name": ["Jane", "Janet"]}, ["crawl", "wiki"])
    assert [part["properties"]["name"] for part in parts] == [["Jane"], ["Janet"]]
    assert [part["origin"] for part in parts] == [["crawl"], ["wiki"]]
    assert problem(house.admin.get(f"{ENTITIES}/jane?origin=other")) == (404, "entity-not-found")


def test_entity_that_is_not_there_or_is_deleted_is_not_found(house: InProcessApi, flush: Flushing):
    add(house, entity("jane", name="Jane"), entity("john", name="John"))
    flush()
    house.admin.delete(f"{ENTITIES}/jane")

    assert problem(house.admin.get(f"{ENTITIES}/jane")) == (404, "entity-not-found")
    assert problem(house.admin.get(f"{ENTITIES}/nobody")) == (404, "entity-not-found")
    assert problem(house.admin.get(f"{ENTITIES}/nobody/adjacent")) == (404, "entity-not-found")
    assert ids_of(house.admin.get(ENTITIES)) == ["john"]


def test_entity_whose_schemata_disagree_is_told_apart_everywhere_and_ends_nothing(house: InProcessApi, flush: Flushing):
    make_invalid(house, "b")
    flush()
    add(house, entity("a", name="A"), entity("c", name="C"))

    alone = house.admin.get(f"{ENTITIES}/b")
    one_side = house.admin.get(f"{ENTITIES}/b?origin=two")
    page = house.admin.get(ENTITIES).json()
    lines = lines_of(house.admin.get(f"{ENTITIES}/stream?end=true"))

    assert problem(alone) == (422, "schema-violation")
    assert one_side.json()["schema"] == "Vessel"
    assert [found["id"] for found in page["results"]] == ["a", "c"]
    assert [(found["id"], found["schemata"]) for found in page["invalid"]] == [("b", ["Person", "Vessel"])]
    assert [line["id"] for line in (lines[0], lines[2])] == ["a", "c"]
    assert lines[1]["$invalid"] == page["invalid"][0]
    assert (lines[3]["$end"]["count"], lines[3]["$end"]["invalid"]) == (3, 1)


def test_stream_without_invalid_entities_ends_with_a_count_of_zero(house: InProcessApi):
    empty = lines_of(house.admin.get(f"{ENTITIES}/stream?end=true"))
    add(house, entity("a", name="A"))
    one = lines_of(house.admin.get(f"{ENTITIES}/stream?end=true"))

    assert empty == [{"$end": {"snapshot": None, "count": 0, "invalid": 0}}]
    assert one[-1] == {"$end": {"snapshot": None, "count": 1, "invalid": 0}}


def test_invalid_entities_are_counted_by_aggregations_which_leave_nothing_out(house: InProcessApi):
    make_invalid(house, "b")
    add(house, entity("a", name="A"))

    counted = house.admin.post(f"{ENTITIES}/aggregate", {"metrics": ["count"]}).json()

    assert counted["results"] == [{"group": {}, "metrics": {"count": 2}}]


def test_invalid_neighbour_is_told_from_one_that_is_missing(house: InProcessApi):
    make_invalid(house, "b")
    links = [entity(f"own-{asset}", "Ownership", owner="a", asset=asset) for asset in ("b", "gone")]
    add(house, entity("a", "Company", name="A"), *links)

    page = house.admin.get(f"{ENTITIES}/own-b/adjacent").json()
    missing = house.admin.get(f"{ENTITIES}/own-gone/adjacent").json()

    assert [(found["id"], found["entity"] is None) for found in page["results"]] == [("b", True), ("a", False)]
    assert [(found["id"], found["schemata"]) for found in page["invalid"]] == [("b", ["Person", "Vessel"])]
    assert ([found["id"] for found in missing["results"]], missing["invalid"]) == (["gone", "a"], [])


def test_invalid_entities_are_listed_with_the_schemata_of_each_origin_and_the_reason(
    house: InProcessApi, flush: Flushing
):
    make_invalid(house, "b")
    add(house, entity("a", "Company", name="A"), origin="one")
    add(house, entity("a", "LegalEntity", name="A"), origin="two")
    flush()
    make_invalid(house, "d")
    add(house, entity("c", name="C"), entity("b", name="B"))

    answer = house.admin.get(f"{ENTITIES}/invalid")

    assert answer.json() == {
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
    assert answer.headers["Tarn-Snapshot"]


def test_invalid_entities_are_those_of_the_state_that_is_asked_for(house: InProcessApi, flush: Flushing):
    make_invalid(house, "b")
    flush()
    house.admin.delete(f"{ENTITIES}/b?origin=two")
    make_invalid(house, "c")

    def listed(query: str) -> list[str]:
        return ids_of(house.admin.get(f"{ENTITIES}/invalid{query}"))

    assert (listed(""), listed("?at=1"), listed("?fresh=snapshot")) == (["c"], ["b"], ["b"])
    assert problem(house.admin.get(f"{ENTITIES}/invalid?at=1&fresh=snapshot")) == (400, "invalid-format")
    assert problem(house.admin.get(f"{ENTITIES}/invalid?at=7")) == (404, "snapshot-not-found")
    assert problem(house.admin.get(f"{ENTITIES}/invalid?nonsense=1")) == (422, "schema-violation")


def test_invalid_entities_are_walked_in_pages_by_canonical_id(house: InProcessApi, flush: Flushing):
    for name in ("ü", "b", "a b", "c", "z"):
        make_invalid(house, name)
    add(house, entity("bb", name="B"))
    flush()

    pages: list[list[str]] = []
    cursor = None
    while cursor is not None or not pages:
        given = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = house.admin.get(f"{ENTITIES}/invalid", params=given).json()
        pages.append([found["id"] for found in page["results"]])
        cursor = page["next"]

    assert pages == [["a b", "b"], ["c", "z"], ["ü"]]
    first = house.admin.get(f"{ENTITIES}/invalid?limit=1").json()
    assert problem(house.admin.get(ENTITIES, params={"cursor": first["next"]})) == (422, "schema-violation")
    assert problem(house.admin.get(f"{ENTITIES}/invalid?limit=1001")) == (422, "schema-violation")


def test_merged_entity_that_is_invalid_is_listed_by_its_canonical_id(house: InProcessApi):
    parts = {"p": "Person", "v": "Vessel"}
    for name, schema in parts.items():
        common = {"entity_id": name, "canonical_id": "merged", "schema": schema}
        add_statements(house, common | {"prop": "name", "value": name}, common | {"prop": "id", "value": name})

    (found,) = house.admin.get(f"{ENTITIES}/invalid").json()["results"]

    assert (found["id"], found["by_origin"]) == ("merged", [{"origin": "crawl", "schemata": ["Person", "Vessel"]}])


def test_invalid_entity_of_many_origins_lists_the_first_and_counts_all(house: InProcessApi):
    statements = [
        {"entity_id": "b", "schema": "Vessel" if number else "Person", "prop": "name", "value": "B",
         "origin": f"o{number:03}"}
        for number in range(MAX_ORIGINS + 5)
    ]  # fmt: skip
    lines = b"\n".join(map(orjson.dumps, statements))
    sent = house.admin.post(f"{ROOT}/statements", content=lines, headers={"Content-Type": "application/x-ndjson"})
    assert sent.status_code == 200, sent.text

    (found,) = house.admin.get(f"{ENTITIES}/invalid").json()["results"]

    assert [one["origin"] for one in found["by_origin"]] == [f"o{number:03}" for number in range(MAX_ORIGINS)]
    assert found["origins"] == MAX_ORIGINS + 5


@pytest.mark.parametrize("name", ["stream", "query", "aggregate", "adjacent", "invalid"])
def test_entity_named_like_a_route_is_written_listed_and_deleted(house: InProcessApi, name: str):
    assert house.admin.put(f"{ENTITIES}/{name}", entity(name, name="N")).status_code == 200

    assert ids_of(house.admin.get(ENTITIES, params={"id": name})) == [name]
    assert [found["id"] for found in lines_of(house.admin.get(f"{ENTITIES}/stream?id={name}"))] == [name]
    assert house.admin.get(f"{ENTITIES}/{name}/adjacent").json()["results"] == []
    assert house.admin.delete(f"{ENTITIES}/{name}").json()["tombstones"] == 2


def test_entity_named_like_a_route_of_another_method_is_shown(house: InProcessApi):
    add(house, entity("query", name="Q"), entity("aggregate", name="A"))

    assert [house.admin.get(f"{ENTITIES}/{name}").json()["id"] for name in ("query", "aggregate")] == [
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
def test_awkward_ids_are_found_in_the_path_in_parameters_and_in_queries(
    house: InProcessApi, flush: Flushing, flushed: bool
):
    add(house, entity("other", name="O"), *(entity(name, name="N") for name, _ in SPECIAL_IDS.values()))
    if flushed:
        flush()

    for name, path in SPECIAL_IDS.values():
        assert house.admin.get(f"{ENTITIES}/{path}").json()["id"] == name
        assert house.admin.get(f"{ENTITIES}/{path}/adjacent").json()["results"] == []
        assert ids_of(house.admin.get(ENTITIES, params={"id": name})) == [name]
        assert ids_of(query(house, {"field": "id", "op": "eq", "value": name})) == [name]
        assert len(house.admin.get(f"{ROOT}/statements", params={"id": name}).json()["results"]) == 2
        assert house.admin.delete(f"{ENTITIES}/{path}").json()["tombstones"] == 2
        assert problem(house.admin.get(f"{ENTITIES}/{path}")) == (404, "entity-not-found")
    assert ids_of(house.admin.get(ENTITIES)) == ["other"]


def test_id_with_a_slash_is_in_no_path_and_found_by_parameter(house: InProcessApi):
    add(house, entity("a/b", name="N"))

    assert problem(house.admin.get(f"{ENTITIES}/a%2Fb")) == (404, "route-not-found")
    assert ids_of(house.admin.get(ENTITIES, params={"id": "a/b"})) == ["a/b"]


@pytest.mark.parametrize("overlay", [0, 1000], ids=["asked", "kept"])
def test_id_that_no_entity_can_have_is_refused_or_not_found(house: InProcessApi, overlay: int):
    add(house, entity("jane", name="Jane"))
    paths = ["%00", "a%00b", "%0A", "a" * 256, "%ED%A0%80"]

    with house.with_settings(overlay_rows=overlay) as other:
        answers = [other.admin.get(f"{ENTITIES}/{path}{below}") for path in paths for below in ("", "/adjacent")]

    assert {problem(answer) for answer in answers} == {(404, "entity-not-found"), (422, "schema-violation")}


# Lists


@pytest.fixture
def some(house: InProcessApi, flush: Flushing) -> None:
    """People and a company, half of them flushed, by two origins; `q` is two of them."""
    add(house, entity("ada", name="Ada", birthDate="1815"), entity("acme", "Company", name="Acme", country="de"))
    merge(house, "q", "q1")
    flush()
    add(house, entity("bob", name="Bob", birthDate=["1990", "1980"]), origin="wiki")
    add(house, entity("ada", name="Augusta", country="gb"), origin="wiki")
    merge(house, "q", "q2")


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


@pytest.mark.usefixtures("some")
def test_list_and_stream_show_what_every_filter_given_lets_through(house: InProcessApi):
    listed = {filters: house.admin.get(f"{ENTITIES}?{filters}") for filters in FILTERED}
    streamed = {filters: lines_of(house.admin.get(f"{ENTITIES}/stream?{filters}")) for filters in FILTERED}

    assert {filters: ids_of(answer) for filters, answer in listed.items()} == FILTERED
    assert streamed == {filters: answer.json()["results"] for filters, answer in listed.items()}


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


@pytest.mark.usefixtures("some")
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_sorted_list_is_the_same_in_pages_and_as_a_query(house: InProcessApi, limit: int):
    def queried(sort: tuple[str, ...]) -> list[str]:
        found: list[str] = []
        cursor = None
        while cursor is not None or not found:
            page = query(house, sort=sort, limit=limit, cursor=cursor).json()
            found += [each["id"] for each in page["results"]]
            cursor = page["next"]
        return found

    assert {sort: all_ids(house.admin, sort=list(sort), limit=limit) for sort in SORTED} == SORTED
    assert {sort: queried(sort) for sort in SORTED} == SORTED


def pages(caller: Caller, **parameters: Any) -> Iterator[list[str]]:
    """The ids of a list, page by page."""
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


def test_walk_through_a_list_meets_what_stays_exactly_once_while_data_moves(house: InProcessApi, flush: Flushing):
    dice = random.Random(6)
    stays = [f"stay-{number:03d}" for number in range(250)]
    leaves = [f"leave-{number:03d}" for number in range(40)]

    def some(name: str) -> dict[str, Any]:
        dates = [str(dice.randrange(1900, 1930)) for _ in range(dice.randrange(3))]
        payment = entity(name, "Payment", amount=[str(dice.randrange(30)), "many"], date=dates)
        return dice.choice([payment, entity(name, name="No date"), entity(name, birthDate=dates)])

    first = [some(name) for name in [*stays, *leaves]]
    dice.shuffle(first)
    add(house, *first[:150])
    flush()
    add(house, *first[150:])
    sorts = [
        [],
        ["-id"],
        ["prop:birthDate"],
        ["-prop:birthDate", "schema"],
        ["first_seen"],
        ["-prop:amount", "prop:date"],
    ]
    walks = [pages(house.admin, sort=sort, limit=7) for sort in sorts]
    met: list[list[str]] = [[] for _ in sorts]

    for step, of_each in enumerate(zip_longest(*walks, fillvalue=())):
        for found, page in zip(met, of_each, strict=True):
            found += page
        add(house, some(f"new-{step}"), some(f"a-new-{step}"))
        house.admin.delete(f"{ENTITIES}/{leaves.pop() if leaves else 'nobody'}")
        if step == 12:
            flush()

    for found in met:
        assert sorted(name for name in found if name.startswith("stay")) == stays
        assert len(found) == len(set(found))


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


@pytest.mark.usefixtures("some")
def test_query_shows_what_matches_its_condition(house: InProcessApi):
    assert [(where, ids_of(query(house, where))) for where, _ in MATCHED] == MATCHED


@pytest.mark.usefixtures("some")
def test_aggregate_counts_and_measures_what_matches(house: InProcessApi):
    asked = {
        "where": {"field": "schemata", "op": "eq", "value": "LegalEntity"},
        "group_by": ["schema"],
        "metrics": ["count", {"min": "prop:birthDate"}, {"count_distinct": "prop:name"}],
    }

    answer = house.admin.post(f"{ENTITIES}/aggregate", asked)

    assert answer.json()["results"] == [
        {
            "group": {"schema": "Person"},
            "metrics": {"count": 3, "min:prop:birthDate": "1815", "count_distinct:prop:name": 4},
        },
        {
            "group": {"schema": "Company"},
            "metrics": {"count": 1, "min:prop:birthDate": None, "count_distinct:prop:name": 1},
        },
    ]
    assert len(answer.headers["Tarn-Snapshot"]) == 36


# Several datasets


@pytest.fixture
def several(house: InProcessApi) -> Caller:
    """Somebody who may read three datasets of four."""
    for name in ("leaks_a", "leaks_b", "secret"):
        house.dataset(name)
        add(house, entity("jane", name=f"Jane of {name}"), entity(f"of_{name}", name="N"), dataset=name)
    add(house, entity("jane", name="Jane of test"))
    return house.tenant("reader", leaks_a="read", leaks_b="read", test="write")


def test_query_over_datasets_sees_those_the_caller_may_read_and_no_others(several: Caller):
    asked = {"field": "id", "op": "eq", "value": "jane"}

    def found(*patterns: str) -> list[str]:
        answer = several.post("/v1/entities/query", {"datasets": patterns, "where": asked})
        assert answer.status_code == 200
        return [each["caption"] for each in answer.json()["results"]]

    assert found("*") == ["Jane of leaks_a", "Jane of leaks_b", "Jane of test"]
    assert found("leaks_*", "secret") == ["Jane of leaks_a", "Jane of leaks_b"]
    assert found("test", "te*", "test") == ["Jane of test"]
    assert found("secret") == found("nothing", "none_*") == []


def test_aggregate_over_datasets_counts_what_the_caller_may_read(house: InProcessApi, several: Caller):
    asked = {"datasets": ["*"], "metrics": ["count"]}

    assert several.post("/v1/entities/aggregate", asked).json()["results"][0]["metrics"] == {"count": 5}
    assert house.admin.post("/v1/entities/aggregate", asked).json()["results"][0]["metrics"] == {"count": 7}
    assert several.post("/v1/entities/aggregate", asked | {"datasets": ["secret"]}).json() == {"results": []}


def test_query_over_datasets_is_the_same_in_pages(several: Caller):
    found: list[tuple[str, str]] = []
    cursor = None
    while cursor is not None or not found:
        asked = {"datasets": ["*"], "sort": ["-prop:name"], "limit": 2, "cursor": cursor}
        page = several.post("/v1/entities/query", asked).json()
        found += [(each["datasets"][0], each["id"]) for each in page["results"]]
        cursor = page["next"]

    assert found == [
        ("leaks_a", "of_leaks_a"),
        ("leaks_b", "of_leaks_b"),
        ("test", "jane"),
        ("leaks_b", "jane"),
        ("leaks_a", "jane"),
    ]


def test_query_over_more_datasets_than_one_may_cover_says_so(house: InProcessApi):
    for number in range(MOST_DATASETS):
        house.dataset(f"many_{number}")

    answer = house.admin.post("/v1/entities/query", {"datasets": ["*"]})
    fits = house.admin.post("/v1/entities/query", {"datasets": ["many_*"]})

    assert single_error(answer) == (422, "datasets", f"match more than {MOST_DATASETS} datasets")
    assert fits.json() == {"results": [], "invalid": [], "next": None}


# Neighbours


@pytest.fixture
def owned(house: InProcessApi, flush: Flushing) -> None:
    """A company that a person owns, directed by somebody who is not there."""
    add(
        house,
        entity("acme", "Company", name="Acme"),
        entity("owning", "Ownership", owner="jane", asset="acme"),
        entity("jane", name="Jane"),
    )
    flush()
    add(house, entity("directing", "Directorship", director="nobody", organization="acme"))


def adjacent(house: InProcessApi, name: str, **parameters: Any) -> list[tuple[str, bool, str, str | None]]:
    found: list[tuple[str, bool, str, str | None]] = []
    cursor: dict[str, str] = {}
    while True:
        answer = house.admin.get(f"{ENTITIES}/{name}/adjacent", params={**parameters, **cursor})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        for each in page["results"]:
            shown = each["entity"] and each["entity"]["id"]
            found.append((each["property"], each["outgoing"], each["id"], shown))
        if page["next"] is None:
            return found
        cursor = {"cursor": page["next"]}


@pytest.mark.usefixtures("owned")
@pytest.mark.parametrize("limit", [1, 100])
def test_adjacent_entities_are_told_with_the_property_that_leads_there(house: InProcessApi, limit: int):
    assert adjacent(house, "acme", limit=limit) == [
        ("directorshipOrganization", False, "directing", "directing"),
        ("ownershipAsset", False, "owning", "owning"),
    ]
    assert adjacent(house, "owning", limit=limit) == [("asset", True, "acme", "acme"), ("owner", True, "jane", "jane")]
    assert adjacent(house, "directing", limit=limit) == [
        ("director", True, "nobody", None),
        ("organization", True, "acme", "acme"),
    ]


@pytest.mark.usefixtures("owned")
def test_adjacent_entities_of_a_merged_one_are_those_of_all_its_parts(house: InProcessApi):
    merge(house, "Q1", "jane")
    add(house, entity("owning2", "Ownership", owner="Q1", asset="acme"))

    expected = [("ownershipOwner", False, "owning", "owning"), ("ownershipOwner", False, "owning2", "owning2")]
    assert adjacent(house, "Q1") == adjacent(house, "jane") == expected
    assert ("owner", True, "jane", "Q1") in adjacent(house, "owning")


def test_reference_without_a_name_for_its_other_side_keeps_its_own(house: InProcessApi):
    add(house, entity("a", riskSource="b"), entity("b", riskSource="a"))

    for limit in (1, 100):
        assert adjacent(house, "a", limit=limit) == [("riskSource", False, "b", "b"), ("riskSource", True, "b", "b")]


def test_neighbour_that_cannot_be_put_together_is_there_without_its_entity(house: InProcessApi):
    make_invalid(house, "odd")
    add(house, entity("owning", "Ownership", owner="odd"))

    assert adjacent(house, "owning") == [("owner", True, "odd", None)]
    assert problem(house.admin.get(f"{ENTITIES}/odd/adjacent")) == (422, "schema-violation")


# Writes, as readers see them


@pytest.mark.parametrize("flushed", [False, True], ids=["unflushed", "flushed"])
def test_delete_counts_what_it_ends_wherever_that_is(house: InProcessApi, flush: Flushing, flushed: bool):
    add(house, entity("jane", name="Jane", country="de"), origin="crawl")
    add(house, entity("jane", name="Janet"), origin="wiki")
    add(house, entity("john", name="John"), origin="wiki")
    if flushed:
        flush()

    def deleted(path: str) -> int:
        return int(house.admin.delete(f"{ROOT}/{path}").json()["tombstones"])

    assert deleted("entities/jane?origin=other") == 0
    assert deleted("entities/jane?origin=crawl") == 3
    assert house.admin.get(f"{ENTITIES}/jane").json()["properties"] == {"name": ["Janet"]}
    assert deleted("entities/jane") == 2
    assert deleted("entities/jane") == 0
    statements = house.admin.get(f"{ROOT}/statements", params={"prop": "name"}).json()["results"]
    assert [found["value"] for found in statements] == ["John"]
    assert deleted(f"statements/{statements[0]['id']}?origin=crawl") == 0
    assert deleted(f"statements/{statements[0]['id']}") == 1
    assert deleted("origins/crawl") == 0
    assert deleted("origins/wiki") == 1
    assert ids_of(house.admin.get(ENTITIES)) == []


def test_put_replaces_what_its_origin_said_and_that_was_flushed(house: InProcessApi, flush: Flushing):
    add(house, entity("jane", name="Jane", country="de"), origin="crawl")
    add(house, entity("jane", name="Janet"), origin="wiki")
    flush()

    house.admin.put(f"{ENTITIES}/jane?origin=crawl", entity("jane", name="Jane", birthDate="1990"))

    expected = {"birthDate": ["1990"], "name": ["Jane", "Janet"]}
    assert house.admin.get(f"{ENTITIES}/jane").json()["properties"] == expected
    flush()
    assert house.admin.get(f"{ENTITIES}/jane").json()["properties"] == expected
    assert ids_of(query(house, {"field": "prop:country", "op": "eq", "value": "de"})) == []


# Bad input

EQ: dict[str, Any] = {"field": "id", "op": "eq", "value": "a"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"where": {"field": "colour", "op": "eq", "value": "x"}}, "where.field"),
    "unknown property": ({"where": {"field": "prop:colour", "op": "eq", "value": "x"}}, "where.field"),
    "sql as a field": ({"where": {"field": "id) OR 1=1 --", "op": "eq", "value": "x"}}, "where.field"),
    "unknown op": ({"where": {"field": "id", "op": "is", "value": "x"}}, "where.op"),
    "op that makes no sense": ({"where": {"field": "schema", "op": "gt", "value": "Person"}}, "where.op"),
    "number for a string": ({"where": {"field": "id", "op": "eq", "value": 1}}, "where.value"),
    "string for a list": ({"where": {"field": "id", "op": "in", "value": "a"}}, "where.value"),
    "string for a boolean": ({"where": {"field": "prop:name", "op": "null", "value": "yes"}}, "where.value"),
    "empty and": ({"where": {"and": []}}, "where.and"),
    "text for or": ({"where": {"or": "x"}}, "where.or"),
    "list for a node": ({"where": []}, "where"),
    "member of nobody": ({"where": EQ | {"more": 1}}, "where.more"),
    "unknown member": ({"colour": 1}, "colour"),
    "unknown sort key": ({"sort": ["colour"]}, "sort.0"),
    "sql as a sort key": ({"sort": ["id; DROP TABLE live"]}, "sort.0"),
    "sort key twice": ({"sort": ["id", "id"]}, "sort.1"),
    "too many sort keys": ({"sort": ["id", "-id", "schema", "-schema"]}, "sort"),
    "limit of none": ({"limit": 0}, "limit"),
    "limit beyond": ({"limit": 1001}, "limit"),
    "text for a limit": ({"limit": "many"}, "limit"),
    "100 000 ids": ({"where": {"field": "id", "op": "in", "value": ["a"] * 100_000}}, "where.value"),
    "NUL": ({"where": {"field": "id", "op": "eq", "value": "a\0"}}, "where.value"),
    "unknown schema": ({"where": {"field": "schema", "op": "eq", "value": "Colour"}}, "where.value"),
    "text for a moment": ({"where": {"field": "first_seen", "op": "gt", "value": "soon"}}, "where.value"),
}


def refusal(answer: Response) -> tuple[int, list[str]]:
    return answer.status_code, [found["field"] for found in answer.json().get("errors", ())]


def test_query_that_makes_no_sense_is_refused_with_its_place(house: InProcessApi):
    def asked(path: str, **more: Any) -> dict[str, tuple[int, list[str]]]:
        return {name: refusal(house.admin.post(path, {**body, **more})) for name, (body, _) in REFUSED.items()}

    expected = {name: (422, [field]) for name, (_, field) in REFUSED.items()}
    assert asked(f"{ENTITIES}/query") == expected
    assert asked("/v1/entities/query", datasets=["*"]) == expected


@pytest.mark.parametrize(("opening", "closing"), [('{"not":', "}"), ('{"and":[', "]}"), ("[", "]"), ('{"a":', "}")])
def test_nodes_of_any_depth_are_refused_and_break_nothing(house: InProcessApi, opening: str, closing: str):
    comparison = orjson.dumps(EQ).decode()

    def asked(route: str, depth: int) -> int:
        body = '{"metrics":["count"],"where":' + opening * depth + comparison + closing * depth + "}"
        headers = {"Content-Type": "application/json"}
        return int(house.admin.post(f"{ENTITIES}/{route}", content=body, headers=headers).status_code)

    # The parsers give up at a depth of about 1000; what they let through is refused by us.
    depths = [33, 200, 330, 495, *range(500, 516, 5), 900, *range(980, 1030, 5), 10_000]
    assert {asked(route, depth) for route in ("query", "aggregate") for depth in depths} == {400, 422}


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\\udc00\\ud800"', b"NaN", b"1e999", b"\0", b"{", b'"\xff"'])
def test_body_that_is_no_json_or_no_text_is_refused(house: InProcessApi, text: bytes):
    body = b'{"where":{"field":"id","op":"eq","value":' + text + b"}}"

    answer = house.admin.post(f"{ENTITIES}/query", content=body, headers={"Content-Type": "application/json"})

    assert problem(answer) in [(400, "invalid-format"), (422, "schema-violation")]


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({"Content-Type": "text/plain"}, b"{}", (415, "unsupported-media-type")),
        ({"Content-Type": "application/json"}, b"", (400, "empty-body")),
        ({"Content-Type": "application/json", "Accept": "text/csv"}, b"{}", (406, "not-acceptable")),
        ({"Content-Type": "application/json", "Content-Encoding": "br"}, b"{}", (415, "unsupported-media-type")),
    ],
)
def test_query_of_another_kind_is_refused(
    house: InProcessApi, headers: dict[str, str], body: bytes, expected: tuple[int, str]
):
    assert problem(house.admin.post(f"{ENTITIES}/query", content=body, headers=headers)) == expected


def test_entities_stream_as_lines_and_as_nothing_else(house: InProcessApi):
    add(house, entity("jane", name="Jane"))

    assert problem(house.admin.get(f"{ENTITIES}/stream", headers={"Accept": "text/csv"})) == (406, "not-acceptable")
    answer = house.admin.get(f"{ENTITIES}/stream", headers={"Accept": "application/x-ndjson, */*;q=0.1"})
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert [line["id"] for line in lines_of(answer)] == ["jane"]


SQL = ["'", "'; DROP TABLE live; --", '" OR 1=1 --', "$1", "?", "%", "_", "{}", "\\", "a') UNION SELECT * FROM x --"]


@pytest.mark.parametrize("text", SQL)
def test_sql_in_any_string_is_a_string(house: InProcessApi, text: str):
    add(house, entity("jane", name="Jane"), entity(text, name=["Odd", text, f"x{text}"]))

    for op in ("eq", "startswith", "contains", "endswith"):
        assert ids_of(query(house, {"field": "prop:name", "op": op, "value": text})) == [text]
    assert ids_of(query(house, {"field": "prop:name", "op": "in", "value": [text] * 300})) == [text]
    assert ids_of(house.admin.get(ENTITIES, params={"id": text, "canonical_id": text})) == [text]
    assert ids_of(query(house, {"field": "id", "op": "gte", "value": text}, sort=["-prop:name"]))
    grouped = house.admin.post(
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


def test_parameter_that_makes_no_sense_is_refused_with_its_name(house: InProcessApi):
    found = {parameters: refusal(house.admin.get(f"{ENTITIES}?{parameters}")) for parameters in INVALID_PARAMETERS}

    assert found == {parameters: (422, [field]) for parameters, field in INVALID_PARAMETERS.items()}
