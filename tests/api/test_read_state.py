"""Which state a read returns, and to whom: `at`, `fresh`, cursors, grants."""

import base64
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from httpx2 import Response
from sqlalchemy import update
from tarn.datasets.registry import Dataset
from tarn.db.tables import snapshots
from tarn.model.datasets.snapshot import Snapshot
from tarn.model.ids import now
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
    """Create the dataset `test` for every test."""


def read(caller: Caller, name: str, query: str = "") -> Response:
    method, path, body = READS[name]
    return caller(method, f"{path}?{query}", **({} if body is None else {"json": body}))


@pytest.fixture
def history(api: InProcessApi, flush: Flushing) -> list[Snapshot]:
    """Write Jane in the first snapshot, her name and John in the second; the journal deletes Jane and adds Joe."""
    add(api, entity("jane", "Person"))
    (first,) = flush()
    add(api, entity("jane", name="Jane"), entity("john", name="John"))
    (second,) = flush()
    api.admin.delete(f"{ENTITIES}/jane")
    add(api, entity("joe", name="Joe"))
    return [first, second]


def test_state_is_selected_by_number_id_latest_timestamp_and_ref(api: InProcessApi, history: list[Snapshot]):
    first, second = history
    api.admin.put(f"{ROOT}/refs/release", {"snapshot": "1"})
    then = first.created.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    names = ["1", first.id, then, "release", "2", second.id, "latest", "2999-01-01"]

    by_name = {name: api.admin.get(f"{ENTITIES}?at={name}") for name in names}

    shown = [(response.headers["Tarn-Snapshot"], ids_of(response)) for response in by_name.values()]
    assert shown == [(first.id, ["jane"])] * 4 + [(second.id, ["jane", "john"])] * 4


def test_default_state_is_head_and_journal_or_the_head_alone(api: InProcessApi, history: list[Snapshot]):
    responses = {fresh: api.admin.get(f"{ENTITIES}?{fresh}") for fresh in ("", "fresh=overlay", "fresh=snapshot")}

    assert [ids_of(response) for response in responses.values()] == [["joe", "john"], ["joe", "john"], ["jane", "john"]]
    assert {response.headers["Tarn-Snapshot"] for response in responses.values()} == {history[1].id}


@pytest.mark.usefixtures("history")
def test_reads_of_a_past_state_are_unchanged_by_later_writes(api: InProcessApi, flush: Flushing):
    before = {name: read(api.admin, name, "at=2").content for name in READS}
    add(api, entity("jane", name="Janet"))
    flush()
    api.admin.delete(f"{ROOT}/origins/crawl")
    flush()

    assert {name: read(api.admin, name, "at=2").content for name in READS} == before
    assert ids_of(api.admin.get(ENTITIES)) == []


@pytest.mark.parametrize("name", READS)
def test_every_read_names_its_snapshot_and_refuses_an_invalid_state(
    api: InProcessApi, database, history: list[Snapshot], name: str
):
    served = read(api.admin, name, "fresh=snapshot")
    both = read(api.admin, name, "at=1&fresh=snapshot")
    missing = [problem(read(api.admin, name, f"at={at}")) for at in ("3", "0", history[0].id[:-4] + "0000")]
    too_early = read(api.admin, name, "at=1999-12-31T23:59:59Z")
    no_ref = read(api.admin, name, "at=nothing")
    with database.write() as connection:
        connection.execute(update(snapshots).where(snapshots.c.seq == 1).values(expired=now()))
    gone = read(api.admin, name, "at=1")

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
def test_state_with_an_unusual_name_is_served_or_not_found(api: InProcessApi):
    problems = {
        problem(response)
        for at in UNUSUAL_NAMES
        if (response := api.admin.get(f"{ENTITIES}?at={at}")).status_code != 200
    }

    assert problems <= {(404, "snapshot-not-found"), (404, "ref-not-found")}


def test_dataset_without_snapshots_names_none(api: InProcessApi):
    add(api, entity("jane", name="Jane"))

    assert "Tarn-Snapshot" not in api.admin.get(ENTITIES).headers
    assert ids_of(api.admin.get(f"{ENTITIES}?fresh=snapshot")) == []
    assert problem(api.admin.get(f"{ENTITIES}?at=latest")) == (404, "no-snapshots")
    end = lines_of(api.admin.get(f"{ENTITIES}/stream?end=true"))[-1]
    assert end == {"$end": {"snapshot": None, "count": 1, "invalid": 0}}


def test_fresh_read_is_served_from_the_snapshot_of_its_flush(api: InProcessApi, kernels: DirectKernels):
    services = api.services
    flusher = SparkFlusher(services.settings, services.database, services.store, "tester", kernels=lambda: kernels)
    reader = api.tenant("reader", test="read")
    add(api, entity("jane", name="Jane"))
    with working(make_worker(api, flusher)):
        first = reader.get(f"{ENTITIES}?fresh=flush")
        again = reader.get(f"{ENTITIES}/jane?fresh=flush")

    assert ids_of(first) == ["jane"]
    log = api.admin.get(f"{ROOT}/snapshots").json()["results"]
    assert [entry["id"] for entry in log] == [first.headers["Tarn-Snapshot"]] == [again.headers["Tarn-Snapshot"]]


def test_fresh_read_whose_flush_does_not_finish_is_refused_with_retry_after(api: InProcessApi):
    add(api, entity("jane", name="Jane"))
    with api.with_settings(commit_wait=0.0) as without_wait:
        response = without_wait.admin.get(f"{ENTITIES}?fresh=flush")

    assert problem(response) == (503, "unavailable")
    assert int(response.headers["Retry-After"]) > 0


# Cursors


def cursor_of(response: Response) -> str:
    assert response.status_code == 200, response.text
    cursor = response.json()["next"]
    assert type(cursor) is str
    return cursor


def forged(cursor: str, position: Any) -> str:
    """Return a cursor with the list of this one and another position, as an attacker could build it."""
    list_name, _ = orjson.loads(base64.urlsafe_b64decode(cursor + "=="))
    return base64.urlsafe_b64encode(orjson.dumps([list_name, position])).decode().rstrip("=")


@pytest.fixture
def cursor(api: InProcessApi) -> str:
    add(api, entity("a", name="A"), entity("b", name="B"))
    return cursor_of(api.admin.get(f"{ENTITIES}?limit=1"))


FOREIGN = (422, ["query.cursor"])


def test_cursor_of_another_list_tenant_or_dataset_is_refused(api: InProcessApi, cursor: str):
    api.dataset("other")
    other = api.tenant("other_tenant", any="read")

    others = [
        api.admin.get(f"{ENTITIES}?sort=-id&cursor={cursor}"),
        api.admin.get(f"{ENTITIES}?schema=Person&cursor={cursor}"),
        api.admin.get(f"{ENTITIES}?fresh=snapshot&cursor={cursor}"),
        api.admin.get(f"{ROOT}/statements?cursor={cursor}"),
        api.admin.get(f"{ENTITIES}/a/adjacent?cursor={cursor}"),
        api.admin.get(f"/v1/datasets/other/entities?cursor={cursor}"),
        other.get(f"{ENTITIES}?cursor={cursor}"),
        api.admin.post(f"{ENTITIES}/query", {"cursor": cursor}),
        api.admin.post("/v1/entities/query", {"datasets": ["test"], "cursor": cursor}),
    ]

    assert [refusal(response) for response in others] == [FOREIGN] * len(others)
    assert ids_of(api.admin.get(f"{ENTITIES}?limit=50&cursor={cursor}")) == ["b"]


@pytest.mark.usefixtures("cursor")
def test_cursor_of_a_query_is_valid_for_that_query_only(api: InProcessApi):
    body: dict[str, Any] = {"where": {"field": "prop:name", "op": "gte", "value": "A"}, "limit": 1}
    own = cursor_of(api.admin.post(f"{ENTITIES}/query", body))
    changed = body | {"where": body["where"] | {"value": "B"}}

    assert ids_of(api.admin.post(f"{ENTITIES}/query", body | {"cursor": own, "limit": 9})) == ["b"]
    assert refusal(api.admin.post(f"{ENTITIES}/query", changed | {"cursor": own})) == FOREIGN
    assert refusal(api.admin.post(f"{ENTITIES}/query", body | {"sort": ["-id"], "cursor": own})) == FOREIGN


BROKEN = [
    "", 7, None, [], {}, "7", "null", "{}", "[]", '["a"]', '["a","test","more"]', "[1,2]", '[null,"test"]', '"ab"',
    '[["a"],"test"]', '["a",{}]', '["\\u0000","test"]', "[" * 500, '["' + "a" * 300 + '","test"]', '["a","test"', "\0",
    "'; DROP TABLE live",
]  # fmt: skip


def test_truncated_or_forged_cursor_is_refused(api: InProcessApi, cursor: str):
    forged_cursors = [forged(cursor, position) for position in BROKEN]
    cut = [cursor[:length] for length in range(1, len(cursor))] + [cursor + "A", "é", "%00", "a" * 10_000]

    refused = [refusal(api.admin.get(ENTITIES, params={"cursor": each})) for each in forged_cursors + cut]
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
def test_position_of_the_wrong_type_is_refused(api: InProcessApi, sort: str, good: Any, bad: list[Any]):
    own = cursor_of(api.admin.get(f"{ENTITIES}?sort={sort}&limit=1"))

    def read_from(*position: Any) -> Response:
        forged_cursor = forged(own, orjson.dumps(position).decode())
        return api.admin.get(ENTITIES, params={"sort": sort, "cursor": forged_cursor})

    refused = [*(read_from(value, "a", "test") for value in bad), read_from(good, 7, "test"), read_from(good, "a")]

    assert read_from(good, "a", "test").status_code == 200
    assert [refusal(response) for response in refused] == [FOREIGN] * len(refused)


@pytest.mark.usefixtures("cursor")
def test_position_of_a_statement_or_an_adjacent_entity_of_the_wrong_type_is_refused(api: InProcessApi):
    add(api, entity("own", "Ownership", owner="a", asset="b"))
    statements = cursor_of(api.admin.get(f"{ROOT}/statements?limit=1"))
    adjacent = cursor_of(api.admin.get(f"{ENTITIES}/own/adjacent?limit=1"))
    id_ = "00" * 20

    positions: list[Any] = [
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
    for position in positions:
        text = orjson.dumps(position).decode()
        assert refusal(api.admin.get(f"{ROOT}/statements", params={"cursor": forged(statements, text)})) == FOREIGN
    adjacent_positions: list[Any] = [
        7,
        None,
        "abc",
        ["p", "n"],
        ["p", "n", 1],
        [1, "n", True],
        ["p", None, True],
        [[], {}, False],
    ]
    for position in adjacent_positions:
        text = orjson.dumps(position).decode()
        assert refusal(api.admin.get(f"{ENTITIES}/own/adjacent", params={"cursor": forged(adjacent, text)})) == FOREIGN


# Permissions


@pytest.mark.parametrize("name", READS)
def test_caller_without_grants_gets_the_response_of_a_missing_dataset(api: InProcessApi, name: str):
    add(api, entity("jane", name="Jane"))
    api.dataset("other")
    unrelated = api.tenant("unrelated", other="admin")
    method, path, body = READS[name]
    elsewhere = path.replace("/test/", "/nothing/")

    hidden = unrelated(method, path, json=body)
    missing = unrelated(method, elsewhere, json=body)

    assert problem(hidden) == problem(missing) == (404, "dataset-not-found")
    assert hidden.text.replace("test", "nothing") == missing.text
    assert problem(api.anonymous(method, path, json=body)) == (401, "unauthenticated")


def test_reader_reads_everything_and_writes_nothing(api: InProcessApi):
    add(api, entity("jane", name="Jane"))
    reader = api.tenant("reader", test="read")

    assert {name: read(reader, name).status_code for name in READS} == dict.fromkeys(READS, 200)
    writes = [
        reader.post(ENTITIES, entity("john", name="John")),
        reader.put(f"{ENTITIES}/jane", entity("jane")),
        reader.delete(f"{ENTITIES}/jane"),
        reader.delete(f"{ROOT}/origins/crawl"),
        reader.delete(f"{ROOT}/statements/{'0' * 40}"),
    ]
    assert [problem(response) for response in writes] == [(403, "forbidden")] * len(writes)
    assert ids_of(api.admin.get(ENTITIES)) == ["jane"]
