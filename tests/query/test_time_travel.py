"""Past states are immutable: byte for byte, after any later write, delete or flush."""

from collections.abc import Iterator

import pytest
from tarn.query.output.statement_formats import FORMATS

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import HistoryPlayer
from tests.query.model import COMPACT, FACTS, ORIGINS, PACK, Move, Step, added, erased

ENTITIES = ("a", "b", "c")


def answers(api: InProcessApi, player: HistoryPlayer, at: str) -> Iterator[tuple[str, bytes, str]]:
    """Return the bytes of every kind of read of a state, with the snapshot that it names."""
    base = f"/v1/datasets/{player.dataset.name}"
    paths = [f"/entities/{name}" for name in (*ENTITIES, "Q1")]
    paths += ["/entities", "/entities?limit=2&sort=-last_seen", "/entities?id=b", "/entities?schemata=LegalEntity"]
    paths += ["/entities/stream", "/entities/stream?origin=crawl", "/entities/b/adjacent", "/statements?prop=name"]
    for path in paths:
        answer = api.admin.get(base + path, params={"at": at})
        assert answer.status_code in (200, 404, 422), answer.text
        yield path, _steady(answer.content), answer.headers.get("Tarn-Snapshot", "")
    for form in FORMATS:
        answer = api.admin.get(f"{base}/statements/stream", params={"at": at}, headers={"Accept": form})
        assert answer.status_code == 200, answer.text
        yield form, answer.content, answer.headers["Tarn-Snapshot"]
    for path, body in (
        ("/entities/query", {"where": {"field": "prop:name", "op": "eq", "value": "x"}}),
        ("/entities/aggregate", {"group_by": ["schema"], "metrics": ["count"]}),
    ):
        answer = api.admin.post(base + path, body, params={"at": at})
        assert answer.status_code == 200, answer.text
        yield path, answer.content, answer.headers["Tarn-Snapshot"]


def _steady(body: bytes) -> bytes:
    """Remove the request id from a problem, which differs each time."""
    return b"" if body.startswith(b'{"type"') else body


@pytest.mark.contract("H6")
def test_past_state_returns_the_same_bytes_after_later_writes_deletes_moves_flushes_and_compactions(
    api: InProcessApi, kernels: DirectKernels
):
    player = HistoryPlayer.begin(api, kernels)
    for origin, entity in zip(ORIGINS, ENTITIES, strict=True):
        player.commit(*(added(entity, origin, fact, None, 1, 5) for fact in FACTS))
    (first,) = player.flush()
    player.commit(added("a", "crawl", FACTS[0], "Q1", 3, 9), erased("c", None))
    (second,) = player.flush()
    names = {"1": first, first.created.isoformat(): first, second.id: second}
    before = {name: list(answers(api, player, name)) for name in names}
    assert all(snapshot in (names[name].id, "") for name in names for _, _, snapshot in before[name])

    later: list[Step] = [
        [added("c", "crawl", FACTS[0], None, 1, 50), added("a", "by.hand", FACTS[1], None, 7, 7)],
        [erased("b", None)],
        Move("a", "b", 60),
        [erased(None, "crawl")],
        PACK,
        COMPACT,
    ]
    for _ in player.play(later):
        assert list(answers(api, player, "1")) == before["1"]
        player.flush()

    assert {name: list(answers(api, player, name)) for name in names} == before
    assert list(answers(api, player, "latest")) != before[second.id]


def test_timestamp_before_the_first_snapshot_and_number_after_the_last_are_not_found(
    api: InProcessApi, kernels: DirectKernels
):
    player = HistoryPlayer.begin(api, kernels)
    player.commit(added("a", "crawl", FACTS[0], None, 1, 1))
    (first,) = player.flush()

    for at in ("1999-01-01", "2", str(10**18)):
        answer = api.admin.get(f"/v1/datasets/{player.dataset.name}/entities/a", params={"at": at})
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "snapshot-not-found")
    answer = api.admin.get(f"/v1/datasets/{player.dataset.name}/entities/a", params={"at": "2999-01-01"})
    assert answer.headers["Tarn-Snapshot"] == first.id
