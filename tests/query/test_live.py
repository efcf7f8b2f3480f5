"""The relation `live`: the files that it reads, and bounds that never hide a row."""

import pytest
from tarn.model.datasets.snapshot import Column, Snapshot, Table
from tarn.query.planner import ScanPlan
from tarn.query.reader import NOW, Reading, RequestedState
from tarn.query.views import View

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.lake.manifests import dataset_of
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import HistoryPlayer
from tests.query.model import Event, added, deleted, erased
from tests.query.reads import Reads

pytestmark = ONE_DATABASE

NAME = ("Person", "name", "x")


def event(entity: str, canonical: str | None = None, origin: str = "crawl", moment: int = 1) -> Event:
    return added(entity, origin, NAME, canonical, moment, moment)


def files_for(
    api: InProcessApi, player: HistoryPlayer, snapshot: Snapshot, name: str, origin: str | None = None
) -> set[str]:
    """Return the data files that a read of one id opens."""
    plan = ScanPlan(api.services.store, player.dataset, snapshot, origin)
    scans = [plan.rows(ids=[name]), plan.rows(ids=[name], by="entity_id"), plan.changes(ids=[name])]
    files = (*snapshot.statements.files, *snapshot.translog.files)
    return {file.path for file in files if any(scan is not None and file.path in scan.sql for scan in scans)}


def remove(api: InProcessApi, player: HistoryPlayer, snapshot: Snapshot, but: set[str]) -> int:
    """Delete all data files but these; return how many were deleted."""
    layout, gone = player.dataset.layout, 0
    for folder, table in ((layout.statements, snapshot.statements), (layout.translog, snapshot.translog)):
        for file in table.files:
            if file.path not in but:
                api.services.store.delete([f"{folder}/{file.path}"])
                gone += 1
    return gone


def test_read_of_one_entity_opens_only_files_that_may_hold_it(api: InProcessApi, kernels: DirectKernels):
    player = HistoryPlayer.begin(api, kernels)
    for letter in "abcdef":
        player.commit(event(f"{letter}1"), event(f"{letter}2", origin="by.hand"), event(f"{letter}3", f"{letter}1"))
        player.flush()
    player.commit(deleted("c2", "by.hand", NAME), event("e1", moment=9))
    (head,) = player.flush()
    needed = files_for(api, player, head, "c1")
    assert len(needed) == 1
    assert len(files_for(api, player, head, "c2")) == 3
    assert not files_for(api, player, head, "c1", "by.hand")
    assert not files_for(api, player, head, "nobody")

    gone = remove(api, player, head, needed)

    assert gone == len(head.statements.files) + len(head.translog.files) - 1
    reads = Reads(api.services.reader, player.dataset)
    for name in ("c1", "c3"):
        assert reads.get(name) == player.model.one("c1")
    assert reads.get("nobody") is None


def test_ids_longer_than_a_bound_are_found(api: InProcessApi, kernels: DirectKernels):
    """Bounds are truncated to 64 characters; later characters must not matter."""
    player = HistoryPlayer.begin(api, kernels)
    start = "é" * 64
    longest = "\U0010ffff" * 255
    names = [
        start,
        start + "a",
        start + "z" * 100,
        start + "\U0010ffff",
        start[:63],
        longest,
        longest[:64],
        longest[:65],
    ]
    for name in names:
        player.commit(event(name, moment=3), event(f"{name[:200]}-part", name))
        player.flush()
    player.commit(*(event(name, moment=9) for name in names))
    player.flush()

    reads = Reads(api.services.reader, player.dataset)
    for name in names:
        assert reads.get(name) == player.model.one(name), name
        assert reads.get(f"{name[:200]}-part") == player.model.one(f"{name[:200]}-part"), name
    reads.check_basic_reads(player.model)


@pytest.mark.parametrize("known", ["nothing", "nulls alone", "one bound"])
def test_file_without_reported_bounds_is_never_skipped(api: InProcessApi, kernels: DirectKernels, known: str):
    player = HistoryPlayer.begin(api, kernels)
    player.commit(event("a"), event("b", "a"), event("c", origin="by.hand"))
    player.flush()
    player.commit(event("a", moment=5), erased("c", None))
    (head,) = player.flush()
    columns = {
        "nothing": {},
        "nulls alone": {"entity_id": Column(nulls=0), "canonical_id": Column(nulls=0)},
        "one bound": {"entity_id": Column(min="zz"), "canonical_id": Column(max="0")},
    }[known]

    def without(table: Table) -> Table:
        return table.model_copy(
            update={"files": [file.model_copy(update={"columns": columns}) for file in table.files]}
        )

    bare = head.model_copy(update={"statements": without(head.statements), "translog": without(head.translog)})

    def entities_and_times(reading: Reading, name: str) -> set[tuple[str, int]]:
        reading.show_entities(View(player.dataset, bare), [name])
        return set(reading.duck.execute("SELECT entity_id, last_seen FROM live").fetchall())

    reads = Reads(api.services.reader, player.dataset)
    for name in ("a", "b", "c"):
        assert reads.read(entities_and_times, name) == {
            (row.entity_id, row.last_seen) for row in player.model.named([name])
        }


def test_datasets_read_together_do_not_mix(api: InProcessApi, kernels: DirectKernels):
    """Each has its own head, its own unflushed events, and entities of the same ids."""
    players = [HistoryPlayer.begin(api, kernels) for _ in range(3)]
    players[0].commit(event("a", moment=1))
    players[0].flush()
    players[0].commit(erased("a", None), event("b"))
    players[1].commit(event("a", moment=2), event("b", "a"))
    players[1].flush()
    players[2].commit(event("a", moment=3))
    names = [player.dataset.name for player in players]

    everything = api.admin.post("/v1/entities/query", {"datasets": names})
    by_id = api.admin.post(
        "/v1/entities/query", {"datasets": names, "where": {"field": "id", "op": "eq", "value": "b"}}
    )

    def shown(answer) -> list[tuple[str, str]]:
        return [(entity["id"], entity["datasets"][0]) for entity in answer.json()["results"]]

    # In the order of the names, in which the tenth comes before the second.
    assert shown(everything) == sorted([("a", names[1]), ("a", names[2]), ("b", names[0])])
    assert shown(by_id) == sorted([("a", names[1]), ("b", names[0])])


def test_delete_removes_and_counts_statements_that_reads_show_in_snapshot_and_journal(
    api: InProcessApi, kernels: DirectKernels
):
    api.dataset("test")
    player = HistoryPlayer(api, kernels, dataset_of(api.services.database, "test"))
    player.commit(event("a"), event("a", origin="by.hand"), event("b", "a"), event("c"))
    player.flush()
    player.commit(added("a", "crawl", ("Person", "name", "y"), None, 1, 1), deleted("c", "crawl", NAME))
    base = "/v1/datasets/test"

    def tombstones(path: str) -> int:
        answer = api.admin.delete(base + path)
        assert answer.status_code == 200, answer.text
        return answer.json()["tombstones"]

    assert tombstones("/entities/c") == 0
    assert tombstones("/entities/a?origin=crawl") == 2
    assert tombstones("/entities/a?origin=crawl") == 0
    statement = api.admin.get(f"{base}/statements?id=b").json()["results"]
    assert [(row["entity_id"], row["origin"]) for row in statement] == [("a", "by.hand"), ("b", "crawl")]
    assert tombstones(f"/statements/{statement[0]['id']}") == 1
    assert tombstones("/origins/crawl") == 1
    assert tombstones("/origins/crawl") == 0
    assert api.admin.get(f"{base}/statements").json()["results"] == []
    assert len(api.admin.get(f"{base}/statements?fresh=snapshot").json()["results"]) == 4


def test_read_without_journal_shows_the_snapshot_alone_or_nothing(api: InProcessApi, kernels: DirectKernels):
    player = HistoryPlayer.begin(api, kernels)
    reads = Reads(api.services.reader, player.dataset)
    player.commit(event("a"))
    assert reads.get("a", state=RequestedState(fresh="snapshot")) is None
    assert reads.entity_stream(RequestedState(fresh="snapshot")) == []
    player.flush()
    player.commit(erased("a", None))
    assert reads.get("a", state=RequestedState(fresh="snapshot")) == player.head.one("a")
    assert reads.get("a", state=NOW) is None
