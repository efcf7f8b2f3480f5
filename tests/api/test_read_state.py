"""Which state is read, by whom, and from where on: `at`, `fresh`, cursors, grants."""

import base64
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from httpx2 import Response
from sqlalchemy import update
from tarn.datasets.registry import Dataset
from tarn.db.tables import snapshots
from tarn.model.ids import now
from tarn.model.snapshot import Snapshot
from tarn.worker.flusher import SparkFlusher

from tests.api.test_entity_reads import ENTITIES, ROOT, add, entity, ids_of, lines_of, problem, refusal
from tests.in_process_api import Caller, InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.worker.workers import make_worker, working

Flushing = Callable[[], list[Snapshot]]

READS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "get": ("GET", f"{ENTITIES}/jane", None),
    "list": ("GET", ENTITIES, None),
    "stream": ("GET", f"{ENTITIES}/stream", None),
    "query": ("POST", f"{ENTITIES}/query", {}),
    "aggregate": ("POST", f"{ENTITIES}/aggregate", {"metrics": ["count"]}),
    "adjacent": ("GET", f"{ENTITIES}/jane/adjacent", None),
    "statements": ("GET", f"{ROOT}/statements", None),
    "statement stream": ("GET", f"{ROOT}/statements/stream", None),
}


@pytest.fixture(autouse=True)
def _dataset(dataset: Dataset) -> None:
    """Every test has the dataset `test`."""


def read(caller: Caller, name: str, query: str = "") -> Response:
    method, path, body = READS[name]
    return caller(method, f"{path}?{query}", **({} if body is None else {"json": body}))


@pytest.fixture
def history(house: InProcessApi, flush: Flushing) -> list[Snapshot]:
    """Jane in the first snapshot, her name and John in the second; she is gone from the journal, and Joe is in it."""
    add(house, entity("jane", "Person"))
    (first,) = flush()
    add(house, entity("jane", name="Jane"), entity("john", name="John"))
    (second,) = flush()
    house.admin.delete(f"{ENTITIES}/jane")
    add(house, entity("joe", name="Joe"))
    return [first, second]


def test_state_is_named_by_number_id_latest_moment_and_ref(house: InProcessApi, history: list[Snapshot]):
    first, second = history
    house.admin.put(f"{ROOT}/refs/release", {"snapshot": "1"})
    then = first.created.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    names = ["1", first.id, then, "release", "2", second.id, "latest", "2999-01-01"]

    found = {name: house.admin.get(f"{ENTITIES}?at={name}") for name in names}

    shown = [(answer.headers["Tarn-Snapshot"], ids_of(answer)) for answer in found.values()]
    assert shown == [(first.id, ["jane"])] * 4 + [(second.id, ["jane", "john"])] * 4


def test_present_is_the_head_and_the_journal_or_the_head_alone(house: InProcessApi, history: list[Snapshot]):
    answers = {fresh: house.admin.get(f"{ENTITIES}?{fresh}") for fresh in ("", "fresh=overlay", "fresh=snapshot")}

    assert [ids_of(answer) for answer in answers.values()] == [["joe", "john"], ["joe", "john"], ["jane", "john"]]
    assert {answer.headers["Tarn-Snapshot"] for answer in answers.values()} == {history[1].id}


@pytest.mark.usefixtures("history")
def test_every_read_of_a_state_of_the_past_answers_the_same_whatever_comes_after(house: InProcessApi, flush: Flushing):
    before = {name: read(house.admin, name, "at=2").content for name in READS}
    add(house, entity("jane", name="Janet"))
    flush()
    house.admin.delete(f"{ROOT}/origins/crawl")
    flush()

    assert {name: read(house.admin, name, "at=2").content for name in READS} == before
    assert ids_of(house.admin.get(ENTITIES)) == []


@pytest.mark.parametrize("name", READS)
def test_every_read_names_its_snapshot_and_refuses_what_is_no_state(
    house: InProcessApi, database, history: list[Snapshot], name: str
):
    served = read(house.admin, name, "fresh=snapshot")
    both = read(house.admin, name, "at=1&fresh=snapshot")
    missing = [problem(read(house.admin, name, f"at={at}")) for at in ("3", "0", history[0].id[:-4] + "0000")]
    too_early = read(house.admin, name, "at=1999-12-31T23:59:59Z")
    no_ref = read(house.admin, name, "at=nothing")
    with database.write() as connection:
        connection.execute(update(snapshots).where(snapshots.c.seq == 1).values(expired=now()))
    gone = read(house.admin, name, "at=1")

    assert (served.status_code, served.headers["Tarn-Snapshot"]) == (200, history[1].id)
    assert refusal(both) == (400, ["query.fresh"])
    assert missing == [(404, "snapshot-not-found")] * 3
    assert problem(too_early) == (404, "snapshot-not-found")
    assert problem(no_ref) == (404, "ref-not-found")
    assert problem(gone) == (410, "snapshot-gone")


UNUSUAL_NAMES = [
    "0001-01-01T00:00:00%2B14:00",
    "9999-12-31T23:59:59-14:00",
    "2024-W01-1",
    "9" * 18,
    "9" * 40,
    "12:00",
    "a" * 128,
]


@pytest.mark.usefixtures("history")
def test_state_with_an_awkward_name_is_found_or_not(house: InProcessApi):
    found = {
        problem(answer) for at in UNUSUAL_NAMES if (answer := house.admin.get(f"{ENTITIES}?at={at}")).status_code != 200
    }

    assert found <= {(404, "snapshot-not-found"), (404, "ref-not-found")}


def test_dataset_without_snapshots_names_none_and_has_none_to_read(house: InProcessApi):
    add(house, entity("jane", name="Jane"))

    assert "Tarn-Snapshot" not in house.admin.get(ENTITIES).headers
    assert ids_of(house.admin.get(f"{ENTITIES}?fresh=snapshot")) == []
    assert problem(house.admin.get(f"{ENTITIES}?at=latest")) == (404, "no-snapshots")
    end = lines_of(house.admin.get(f"{ENTITIES}/stream?end=true"))[-1]
    assert end == {"$end": {"snapshot": None, "count": 1, "invalid": 0}}


def test_read_after_a_flush_is_served_from_the_snapshot_that_holds_it(house: InProcessApi, kernels: DirectKernels):
    services = house.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    reader = house.tenant("reader", test="read")
    add(house, entity("jane", name="Jane"))
    with working(make_worker(house, flusher)):
        first = reader.get(f"{ENTITIES}?fresh=flush")
        again = reader.get(f"{ENTITIES}/jane?fresh=flush")

    assert ids_of(first) == ["jane"]
    log = house.admin.get(f"{ROOT}/snapshots").json()["results"]
    assert [entry["id"] for entry in log] == [first.headers["Tarn-Snapshot"]] == [again.headers["Tarn-Snapshot"]]


def test_read_after_a_flush_that_does_not_come_is_told_to_try_again(house: InProcessApi):
    add(house, entity("jane", name="Jane"))
    with house.with_settings(commit_wait=0.0) as impatient:
        answer = impatient.admin.get(f"{ENTITIES}?fresh=flush")

    assert problem(answer) == (503, "unavailable")
    assert int(answer.headers["Retry-After"]) > 0


# Cursors


def cursor_of(answer: Response) -> str:
    assert answer.status_code == 200, answer.text
    cursor = answer.json()["next"]
    assert type(cursor) is str
    return cursor


def forged(cursor: str, position: Any) -> str:
    """A cursor with the list of this one and another position, as somebody with time would make it."""
    made_for, _ = orjson.loads(base64.urlsafe_b64decode(cursor + "=="))
    return base64.urlsafe_b64encode(orjson.dumps([made_for, position])).decode().rstrip("=")


@pytest.fixture
def cursor(house: InProcessApi) -> str:
    add(house, entity("a", name="A"), entity("b", name="B"))
    return cursor_of(house.admin.get(f"{ENTITIES}?limit=1"))


FOREIGN = (422, ["query.cursor"])


def test_cursor_of_another_list_tenant_or_dataset_is_refused(house: InProcessApi, cursor: str):
    house.dataset("other")
    somebody = house.tenant("somebody", any="read")

    others = [
        house.admin.get(f"{ENTITIES}?sort=-id&cursor={cursor}"),
        house.admin.get(f"{ENTITIES}?schema=Person&cursor={cursor}"),
        house.admin.get(f"{ENTITIES}?fresh=snapshot&cursor={cursor}"),
        house.admin.get(f"{ROOT}/statements?cursor={cursor}"),
        house.admin.get(f"{ENTITIES}/a/adjacent?cursor={cursor}"),
        house.admin.get(f"/v1/datasets/other/entities?cursor={cursor}"),
        somebody.get(f"{ENTITIES}?cursor={cursor}"),
        house.admin.post(f"{ENTITIES}/query", {"cursor": cursor}),
        house.admin.post("/v1/entities/query", {"datasets": ["test"], "cursor": cursor}),
    ]

    assert [refusal(answer) for answer in others] == [FOREIGN] * len(others)
    assert ids_of(house.admin.get(f"{ENTITIES}?limit=50&cursor={cursor}")) == ["b"]


@pytest.mark.usefixtures("cursor")
def test_cursor_of_a_query_is_good_for_that_query_alone(house: InProcessApi):
    asked: dict[str, Any] = {"where": {"field": "prop:name", "op": "gte", "value": "A"}, "limit": 1}
    own = cursor_of(house.admin.post(f"{ENTITIES}/query", asked))
    changed = asked | {"where": asked["where"] | {"value": "B"}}

    assert ids_of(house.admin.post(f"{ENTITIES}/query", asked | {"cursor": own, "limit": 9})) == ["b"]
    assert refusal(house.admin.post(f"{ENTITIES}/query", changed | {"cursor": own})) == FOREIGN
    assert refusal(house.admin.post(f"{ENTITIES}/query", asked | {"sort": ["-id"], "cursor": own})) == FOREIGN


BROKEN = [
    "", 7, None, [], {}, "7", "null", "{}", "[]", '["a"]', '["a","test","more"]', "[1,2]", '[null,"test"]', '"ab"',
    '[["a"],"test"]', '["a",{}]', '["\\u0000","test"]', "[" * 500, '["' + "a" * 300 + '","test"]', '["a","test"', "\0",
    "'; DROP TABLE live",
]  # fmt: skip


def test_cursor_that_was_cut_or_made_by_hand_is_refused(house: InProcessApi, cursor: str):
    made = [forged(cursor, position) for position in BROKEN]
    cut = [cursor[:length] for length in range(1, len(cursor))] + [cursor + "A", "é", "%00", "a" * 10_000]

    refused = [refusal(house.admin.get(ENTITIES, params={"cursor": each})) for each in made + cut]
    assert refused == [FOREIGN] * len(refused)


@pytest.mark.parametrize(
    ("sort", "good", "bad"),
    [
        ("first_seen", 0, ["0", 0.5, 10**18, None]),
        ("prop:amount", 1.5, ["1", True, [1.5], 7]),
        ("prop:name", None, [1, "n" * 257, ["n"]]),
        ("schema", "Person", [None, {}]),
    ],
)
@pytest.mark.usefixtures("cursor")
def test_position_of_the_wrong_type_is_refused(house: InProcessApi, sort: str, good: Any, bad: list[Any]):
    own = cursor_of(house.admin.get(f"{ENTITIES}?sort={sort}&limit=1"))

    def read_from(*position: Any) -> Response:
        place = forged(own, orjson.dumps(position).decode())
        return house.admin.get(ENTITIES, params={"sort": sort, "cursor": place})

    refused = [*(read_from(value, "a", "test") for value in bad), read_from(good, 7, "test"), read_from(good, "a")]

    assert read_from(good, "a", "test").status_code == 200
    assert [refusal(answer) for answer in refused] == [FOREIGN] * len(refused)


@pytest.mark.usefixtures("cursor")
def test_place_of_a_statement_or_a_neighbour_of_the_wrong_type_is_refused(house: InProcessApi):
    add(house, entity("own", "Ownership", owner="a", asset="b"))
    statements = cursor_of(house.admin.get(f"{ROOT}/statements?limit=1"))
    beside = cursor_of(house.admin.get(f"{ENTITIES}/own/adjacent?limit=1"))
    id_ = "00" * 20

    places: list[Any] = [
        7,
        None,
        "a",
        ["a", id_],
        ["a", "xy", "o"],
        ["a", 7, "o"],
        [7, id_, "o"],
        ["a", id_, None],
        [[], id_, {}],
    ]
    for place in places:
        text = orjson.dumps(place).decode()
        assert refusal(house.admin.get(f"{ROOT}/statements", params={"cursor": forged(statements, text)})) == FOREIGN
    neighbours: list[Any] = [
        7,
        None,
        "abc",
        ["p", "n"],
        ["p", "n", 1],
        [1, "n", True],
        ["p", None, True],
        [[], {}, False],
    ]
    for place in neighbours:
        text = orjson.dumps(place).decode()
        assert refusal(house.admin.get(f"{ENTITIES}/own/adjacent", params={"cursor": forged(beside, text)})) == FOREIGN


# Who may read


@pytest.mark.parametrize("name", READS)
def test_stranger_gets_the_answer_of_a_dataset_that_is_not_there(house: InProcessApi, name: str):
    add(house, entity("jane", name="Jane"))
    house.dataset("other")
    stranger = house.tenant("stranger", other="admin")
    method, path, body = READS[name]
    elsewhere = path.replace("/test/", "/nothing/")

    hidden = stranger(method, path, json=body)
    missing = stranger(method, elsewhere, json=body)

    assert problem(hidden) == problem(missing) == (404, "dataset-not-found")
    assert hidden.text.replace("test", "nothing") == missing.text
    assert problem(house.nobody(method, path, json=body)) == (401, "unauthenticated")


def test_reader_reads_everything_and_writes_nothing(house: InProcessApi):
    add(house, entity("jane", name="Jane"))
    reader = house.tenant("reader", test="read")

    assert {name: read(reader, name).status_code for name in READS} == dict.fromkeys(READS, 200)
    writes = [
        reader.post(ENTITIES, entity("john", name="John")),
        reader.put(f"{ENTITIES}/jane", entity("jane")),
        reader.delete(f"{ENTITIES}/jane"),
        reader.delete(f"{ROOT}/origins/crawl"),
        reader.delete(f"{ROOT}/statements/{'0' * 40}"),
    ]
    assert [problem(answer) for answer in writes] == [(403, "forbidden")] * len(writes)
    assert ids_of(house.admin.get(ENTITIES)) == ["jane"]
