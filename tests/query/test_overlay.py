"""The overlay of unflushed events, cached in memory or not: readers see the same, each at its own head."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, sampled_from
from tarn.errors import Unavailable
from tarn.journal import overlay, packs
from tarn.query.reader import NOW, Reader

from tests.in_process_api import InProcessApi
from tests.journal.convert_to_packs import pack_rows
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import HistoryPlayer
from tests.query.model import FLUSH, Event, Move, Step, added, deleted, erased, histories
from tests.query.reads import Reads
from tests.query.test_histories import history_settings

UNCACHED = pytest.mark.parametrize("overlay_rows", [500_000, pytest.param(0, marks=pytest.mark.long)])

NAME = ("Person", "name", "x")
ONE_SUM = ("Person", "id", "1")
OTHER_SUM = ("Person", "id", "2")


@contextmanager
def reader_of(api: InProcessApi, overlay_rows: int) -> Iterator[Reader]:
    """Return the reader of another process, with the same cache size."""
    services = api.services
    settings = services.settings.model_copy(update={"overlay_rows": overlay_rows})
    reader = Reader(settings, services.database, services.store)
    try:
        yield reader
    finally:
        reader.close()


def event(entity: str, canonical: str | None = None, origin: str = "crawl", moment: int = 1) -> Event:
    return added(entity, origin, NAME, canonical, moment, moment)


class PackingPlayer(HistoryPlayer):
    """Plays a history whose events are stored in as many packs as possible."""

    def commit(self, *events: Event) -> None:
        super().commit(*events)
        pack_rows(self.api.services.database)


@history_settings
@given(history=histories, is_packed=booleans(), overlay_rows=sampled_from([500_000, 0]))
def test_events_in_rows_or_packs_are_read_and_flushed_alike_with_and_without_cache(
    api: InProcessApi, kernels: DirectKernels, is_packed: bool, overlay_rows: int, history: list[Step]
):
    player = (PackingPlayer if is_packed else HistoryPlayer).begin(api, kernels)
    with mock.patch.object(packs, "ROWS", 2), reader_of(api, overlay_rows) as reader:
        reads = Reads(reader, player.dataset)
        for _ in player.play(history):
            reads.check_basic_reads(player.model)
        player.commit(event("c"), event("b", "Q1"))
        reads.check(player.model)
        reads.check_counts(player.model)
        player.flush()
        reads.check_basic_reads(player.model)


@history_settings
@given(one=histories, other=histories)
def test_datasets_that_evict_each_other_from_the_cache_are_both_read_correctly(
    api: InProcessApi, kernels: DirectKernels, one: list[Step], other: list[Step]
):
    with reader_of(api, 6) as reader:
        players = [HistoryPlayer.begin(api, kernels) for _ in range(2)]
        reads = [Reads(reader, player.dataset) for player in players]
        for _ in zip(players[0].play(one), players[1].play(other), strict=False):
            for player, reads_of_one in zip(players, reads, strict=True):
                reads_of_one.check_basic_reads(player.model)


@pytest.mark.both_databases
@pytest.mark.parametrize("overlay_rows", [500_000, 0])
def test_readers_that_resolved_their_view_before_and_after_a_flush_are_both_correct(
    api: InProcessApi, kernels: DirectKernels, overlay_rows: int
):
    player = HistoryPlayer.begin(api, kernels)
    player.commit(event("a"), event("b", "a"))
    player.flush()
    player.commit(erased("a", None))
    player.commit(event("c", "a"))
    before = player.model
    with reader_of(api, overlay_rows) as reader, reader.reading() as early, reader.reading() as late:
        view = early.view(player.dataset, NOW)
        player.flush()
        player.commit(event("a", moment=9), erased("b", None))
        after = late.view(player.dataset, NOW)
        early.show(view)
        late.show(after)

        shown = [set(one.duck.execute("SELECT entity_id, last_seen FROM live").fetchall()) for one in (early, late)]

    assert shown[0] == {(row.entity_id, row.last_seen) for row in before.rows} == {("b", 1), ("c", 1)}
    assert shown[1] == {(row.entity_id, row.last_seen) for row in player.model.rows} == {("a", 9), ("c", 1)}


@pytest.mark.both_databases
def test_reader_with_a_transaction_older_than_a_flush_ignores_events_cached_after_it(
    api: InProcessApi, kernels: DirectKernels, tmp_path: Path
):
    """Events that the later head contains are evicted; a transaction that began earlier still needs them."""
    player = HistoryPlayer.begin(api, kernels)
    player.commit(event("a"))
    cache = overlay.Overlay(100)
    database = api.services.database

    def entity_ids(connection: Any) -> list[str]:
        now = overlay.present(connection, player.dataset)
        events = cache.events(connection, player.dataset, now, None, lambda: tmp_path / "spooled")
        return events.on({"a", "b"}).column("entity_id").to_pylist()

    with database.read() as early:
        assert overlay.present(early, player.dataset).head.id is None
        player.flush()
        player.commit(event("b"))
        with database.read() as late:
            assert entity_ids(late) == ["b"]
        assert entity_ids(early) == ["a"]
    with database.read() as late:
        assert entity_ids(late) == ["b"]


@pytest.mark.both_databases
def test_reader_with_a_transaction_older_than_a_commit_does_not_see_its_cached_events(
    api: InProcessApi, kernels: DirectKernels, tmp_path: Path
):
    player = HistoryPlayer.begin(api, kernels)
    player.commit(event("a"))
    cache = overlay.Overlay(100)

    def entity_ids(connection: Any) -> list[str]:
        now = overlay.present(connection, player.dataset)
        events = cache.events(connection, player.dataset, now, None, lambda: tmp_path / "spooled")
        return sorted(events.table.column("entity_id").to_pylist())

    with api.services.database.read() as early:
        assert overlay.present(early, player.dataset).commit == 1
        player.commit(event("b"))
        with api.services.database.read() as late:
            assert entity_ids(late) == ["a", "b"]
        assert entity_ids(early) == ["a"]


@pytest.mark.both_databases
def test_journal_read_that_fails_midway_leaves_no_duplicates_for_the_next(
    api: InProcessApi, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    player = HistoryPlayer.begin(api, kernels)
    reads = Reads(api.services.reader, player.dataset)
    player.commit(event("a"), event("b"), event("c"))
    original = overlay._read

    def failing(*arguments: Any) -> Iterator[Any]:
        for piece in original(*arguments):
            yield piece
            raise Unavailable("the database does not answer")

    monkeypatch.setattr(overlay, "FETCH", 1)
    monkeypatch.setattr(overlay, "_read", failing)
    with pytest.raises(Unavailable):
        reads.get("a")
    monkeypatch.setattr(overlay, "_read", original)

    reads.check_basic_reads(player.model)


@UNCACHED
@pytest.mark.parametrize("flushed", range(3))
def test_entity_is_found_by_every_id_wherever_its_parts_are(
    api: InProcessApi, kernels: DirectKernels, overlay_rows: int, flushed: int
):
    """Its own statements have no other canonical id, and those of its parts do: in the journal, in the
    snapshot, or in both.
    """
    player = HistoryPlayer.begin(api, kernels)
    parts: list[Step] = [[event("a")], [event("b", "a")], [event("b", origin="by.hand")]]
    with reader_of(api, overlay_rows) as reader:
        for _ in player.play([*parts[:flushed], FLUSH, *parts[flushed:]]):
            Reads(reader, player.dataset).check_basic_reads(player.model)
        Reads(reader, player.dataset).check(player.model)


@UNCACHED
@pytest.mark.parametrize(
    "steps",
    [
        [[event("b", "Q1")], FLUSH, Move("b", "Q2", 9), FLUSH, Move("b", "Q1", 3), FLUSH, Move("b", "b", 4)],
        [[event("b"), event("b", origin="by.hand")], FLUSH, [erased(None, "crawl")], [event("b", moment=7)], FLUSH,
         [erased(None, "crawl")], FLUSH, [event("b", "a", moment=2)]],
        [[event("b")], FLUSH, [deleted("b", "crawl", NAME)], FLUSH, [event("b", moment=5)], FLUSH,
         [event("b", moment=2)], FLUSH, [erased("b", "crawl"), event("b", moment=8)]],
        [[added("b", "crawl", ONE_SUM, "a", 1, 1), added("a", "crawl", ONE_SUM, None, 2, 2)], FLUSH,
         [added("b", "crawl", OTHER_SUM, "a", 3, 3)], FLUSH, [deleted("b", "crawl", OTHER_SUM)], FLUSH,
         [added("b", "crawl", ONE_SUM, "Q1", 9, 9)]],
        [[event("b"), added("b", "crawl", ("Document", "fileName", "x"), None, 1, 1)], FLUSH,
         [added("b", "crawl", ("Company", "name", "x"), None, 1, 2)], FLUSH,
         [added("b", "crawl", ("Document", "name", "x"), None, 1, 2)]],
    ],
    ids=["moved and back", "origin erased and added again", "deleted and added again", "BASE of two", "another schema"],
)  # fmt: skip
def test_history_reads_the_same_before_and_after_each_flush(
    api: InProcessApi, kernels: DirectKernels, steps: list[Step], overlay_rows: int
):
    player = HistoryPlayer.begin(api, kernels)
    with reader_of(api, overlay_rows) as reader:
        reads = Reads(reader, player.dataset)
        for _ in player.play([*steps, FLUSH]):
            reads.check_basic_reads(player.model)
        reads.check(player.model)
