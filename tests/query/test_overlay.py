"""The overlay of unflushed events, cached in memory or not: readers see the same, each at its own head."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tarn.errors import Unavailable
from tarn.journal import overlay, packs
from tarn.query.reader import NOW, Reader

from tests.in_process_api import ONE_DATABASE, InProcessApi
from tests.journal.packing import pack_rows
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import Story
from tests.query.model import FLUSH, Event, Move, Step, added, deleted, erased, histories
from tests.query.reads import Reads
from tests.query.test_histories import played

pytestmark = pytest.mark.both_databases

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


def said(entity: str, canonical: str | None = None, origin: str = "crawl", moment: int = 1) -> Event:
    return added(entity, origin, NAME, canonical, moment, moment)


@played
@given(history=histories)
def test_reads_without_cache_show_the_result_of_events(api: InProcessApi, kernels: DirectKernels, history: list[Step]):
    story = Story.begin(api, kernels)
    with reader_of(api, 0) as reader:
        reads = Reads(reader, story.dataset)
        for _ in story.play(history):
            reads.check_whole(story.model)
        story.commit(said("c"))
        reads.check(story.model)
        reads.check_counts(story.model)


class PackedStory(Story):
    """A dataset whose events are stored in as many packs as possible."""

    def commit(self, *events: Event) -> None:
        super().commit(*events)
        pack_rows(self.api.services.database)


@pytest.mark.parametrize("overlay_rows", [500_000, 0])
@played
@given(history=histories)
def test_events_in_packs_are_read_and_flushed_like_rows(
    api: InProcessApi, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch, overlay_rows: int, history: list[Step]
):
    monkeypatch.setattr(packs, "ROWS", 2)
    story = PackedStory.begin(api, kernels)
    with reader_of(api, overlay_rows) as reader:
        reads = Reads(reader, story.dataset)
        for _ in story.play(history):
            reads.check_whole(story.model)
        story.commit(said("c"), said("b", "Q1"))
        reads.check(story.model)
        reads.check_counts(story.model)
        story.flush()
        reads.check_whole(story.model)


@ONE_DATABASE
@played
@given(one=histories, other=histories)
def test_datasets_that_evict_each_other_from_the_cache_are_both_read_correctly(
    api: InProcessApi, kernels: DirectKernels, one: list[Step], other: list[Step]
):
    with reader_of(api, 6) as reader:
        stories = [Story.begin(api, kernels) for _ in range(2)]
        reads = [Reads(reader, story.dataset) for story in stories]
        for _ in zip(stories[0].play(one), stories[1].play(other), strict=False):
            for story, of in zip(stories, reads, strict=True):
                of.check_whole(story.model)


@pytest.mark.parametrize("overlay_rows", [500_000, 0])
def test_readers_that_resolved_their_view_before_and_after_a_flush_are_both_correct(
    api: InProcessApi, kernels: DirectKernels, overlay_rows: int
):
    story = Story.begin(api, kernels)
    story.commit(said("a"), said("b", "a"))
    story.flush()
    story.commit(erased("a", None))
    story.commit(said("c", "a"))
    before = story.model
    with reader_of(api, overlay_rows) as reader, reader.reading() as early, reader.reading() as late:
        view = early.view(story.dataset, NOW)
        story.flush()
        story.commit(said("a", moment=9), erased("b", None))
        after = late.view(story.dataset, NOW)
        early.show(view)
        late.show(after)

        shown = [set(one.duck.execute("SELECT entity_id, last_seen FROM live").fetchall()) for one in (early, late)]

    assert shown[0] == {(row.entity_id, row.last_seen) for row in before.rows} == {("b", 1), ("c", 1)}
    assert shown[1] == {(row.entity_id, row.last_seen) for row in story.model.rows} == {("a", 9), ("c", 1)}


def test_reader_with_a_transaction_from_before_a_flush_ignores_what_another_cached_after_it(
    api: InProcessApi, kernels: DirectKernels, tmp_path: Path
):
    """Events that the later head contains are evicted; a transaction that began earlier still needs them."""
    story = Story.begin(api, kernels)
    story.commit(said("a"))
    kept = overlay.Overlay(100)
    database = api.services.database

    def look(connection: Any) -> list[str]:
        now = overlay.present(connection, story.dataset)
        found = kept.events(connection, story.dataset, now, None, lambda: tmp_path / "spooled")
        return found.on({"a", "b"}).column("entity_id").to_pylist()

    with database.read() as early:
        assert overlay.present(early, story.dataset).head.id is None
        story.flush()
        story.commit(said("b"))
        with database.read() as late:
            assert look(late) == ["b"]
        assert look(early) == ["a"]
    with database.read() as late:
        assert look(late) == ["b"]


def test_reader_with_a_transaction_from_before_a_commit_does_not_see_it_in_the_cache(
    api: InProcessApi, kernels: DirectKernels, tmp_path: Path
):
    story = Story.begin(api, kernels)
    story.commit(said("a"))
    kept = overlay.Overlay(100)

    def look(connection: Any) -> list[str]:
        now = overlay.present(connection, story.dataset)
        found = kept.events(connection, story.dataset, now, None, lambda: tmp_path / "spooled")
        return sorted(found.table.column("entity_id").to_pylist())

    with api.services.database.read() as early:
        assert overlay.present(early, story.dataset).commit == 1
        story.commit(said("b"))
        with api.services.database.read() as late:
            assert look(late) == ["a", "b"]
        assert look(early) == ["a"]


def test_journal_read_that_fails_midway_leaves_no_duplicates_for_the_next(
    api: InProcessApi, kernels: DirectKernels, monkeypatch: pytest.MonkeyPatch
):
    story = Story.begin(api, kernels)
    reads = Reads(api.services.reader, story.dataset)
    story.commit(said("a"), said("b"), said("c"))
    whole = overlay._read

    def breaks_off(*asked: Any) -> Iterator[Any]:
        for piece in whole(*asked):
            yield piece
            raise Unavailable("the database does not answer")

    monkeypatch.setattr(overlay, "FETCH", 1)
    monkeypatch.setattr(overlay, "_read", breaks_off)
    with pytest.raises(Unavailable):
        reads.get("a")
    monkeypatch.setattr(overlay, "_read", whole)

    reads.check_whole(story.model)


@ONE_DATABASE
@pytest.mark.parametrize("overlay_rows", [500_000, 0])
@pytest.mark.parametrize("flushed", range(3))
def test_entity_is_found_by_every_id_wherever_its_parts_are(
    api: InProcessApi, kernels: DirectKernels, overlay_rows: int, flushed: int
):
    """Its own statements have no other canonical id, and those of its parts do: in the journal, in the
    snapshot, or in both.
    """
    story = Story.begin(api, kernels)
    parts: list[Step] = [[said("a")], [said("b", "a")], [said("b", origin="by.hand")]]
    with reader_of(api, overlay_rows) as reader:
        for _ in story.play([*parts[:flushed], FLUSH, *parts[flushed:]]):
            Reads(reader, story.dataset).check_whole(story.model)
        Reads(reader, story.dataset).check(story.model)


@ONE_DATABASE
@pytest.mark.parametrize("overlay_rows", [500_000, 0])
@pytest.mark.parametrize(
    "happens",
    [
        [[said("b", "Q1")], FLUSH, Move("b", "Q2", 9), FLUSH, Move("b", "Q1", 3), FLUSH, Move("b", "b", 4)],
        [[said("b"), said("b", origin="by.hand")], FLUSH, [erased(None, "crawl")], [said("b", moment=7)], FLUSH,
         [erased(None, "crawl")], FLUSH, [said("b", "a", moment=2)]],
        [[said("b")], FLUSH, [deleted("b", "crawl", NAME)], FLUSH, [said("b", moment=5)], FLUSH, [said("b", moment=2)],
         FLUSH, [erased("b", "crawl"), said("b", moment=8)]],
        [[added("b", "crawl", ONE_SUM, "a", 1, 1), added("a", "crawl", ONE_SUM, None, 2, 2)], FLUSH,
         [added("b", "crawl", OTHER_SUM, "a", 3, 3)], FLUSH, [deleted("b", "crawl", OTHER_SUM)], FLUSH,
         [added("b", "crawl", ONE_SUM, "Q1", 9, 9)]],
        [[said("b"), added("b", "crawl", ("Document", "fileName", "x"), None, 1, 1)], FLUSH,
         [added("b", "crawl", ("Company", "name", "x"), None, 1, 2)], FLUSH,
         [added("b", "crawl", ("Document", "name", "x"), None, 1, 2)]],
    ],
    ids=["moved and back", "origin erased and said again", "deleted and said again", "BASE of two", "another schema"],
)  # fmt: skip
def test_history_reads_the_same_before_and_after_each_flush(
    api: InProcessApi, kernels: DirectKernels, happens: list[Step], overlay_rows: int
):
    story = Story.begin(api, kernels)
    with reader_of(api, overlay_rows) as reader:
        reads = Reads(reader, story.dataset)
        for _ in story.play([*happens, FLUSH]):
            reads.check_whole(story.model)
        reads.check(story.model)
