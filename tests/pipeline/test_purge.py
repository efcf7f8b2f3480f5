"""Purge: what is erased is in no file, no row of the journal and no snapshot any more."""

import random
from collections.abc import Callable

import pytest
from sqlalchemy import select
from tarn.datasets.registry import Dataset
from tarn.db.tables import journal
from tarn.errors import SnapshotGone
from tarn.integrity.vacuum import Vacuum
from tarn.lake import refs, snapshots
from tarn.lake.commit import SnapshotPublisher
from tarn.model.job import PurgeOptions
from tarn.model.names import RefName
from tarn.model.snapshot import Change, Snapshot
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.purge import Purge
from tarn.pipeline.jobs.rewrite import Rewriter

from tests.in_process_api import InProcessApi
from tests.pipeline.history import Expected, head, shown, stored
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_fold import drawn
from tests.pipeline.test_rewrite import ignore, say

SECRET = "nobody-may-know-of-her"


@pytest.fixture
def purge(house: InProcessApi, kernels: DirectKernels) -> Purge:
    services = house.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    rewriting = Rewriter(services.database, services.store, publisher, lambda: kernels)
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    vacuum = Vacuum(services.database, services.store, services.settings, publisher)
    return Purge(services.database, rewriting, flush, vacuum)


@pytest.mark.parametrize("seed", range(4))
def test_purged_entity_is_nowhere_and_all_else_is_as_it_was(
    house: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], purge: Purge, seed: int
):
    draw = random.Random(seed)
    services = house.services
    expected = Expected()
    for number in range(4):
        batch = [drawn(draw) for _ in range(6)]
        if number != 2:
            batch.append(drawn(draw) | {"kind": 1, "id": bytes([number]) * 20, "entity_id": SECRET, "origin": "crawl"})
        say(house, dataset, batch)
        expected.commit(batch)
        if number != 3:
            flush()
    with services.database.write() as connection:
        refs.put(connection, dataset, RefName("before"), "1", "admin")
    hers = [place for place, row in expected.live.items() if row["entity_id"] == SECRET]

    result = purge.run(dataset, PurgeOptions(entity_ids=[SECRET], confirm=True), ignore)

    after = head(house, dataset)
    left = {place: row for place, row in expected.live.items() if place not in hers}
    assert shown(stored(services.store, dataset, after)) == shown(left)
    assert (result.statements, result.refs, after.rows.live) == (len(hers), ["before"], len(left))
    with services.database.read() as connection:
        assert [row for row in connection.execute(select(journal)) if SECRET in str(row)] == []
        with pytest.raises(SnapshotGone):
            snapshots.find(connection, dataset, "1")
    texts = [services.store.get(entry.path) for entry in services.store.list(dataset.layout.root)]
    assert [text for text in texts if SECRET.encode() in text] == []


def test_purge_of_what_is_not_there_gives_up_history_all_the_same(
    house: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], purge: Purge
):
    """It may have been there once."""
    for _ in range(3):
        say(house, dataset, [drawn(random.Random(1)) | {"kind": 1}])
        flush()

    result = purge.run(dataset, PurgeOptions(entity_ids=["never-seen"], confirm=True), ignore)

    assert (result.statements, result.snapshot) == (0, None)
    assert result.expired == 2
    assert head(house, dataset).operation in (Change.FLUSH, Change.VACUUM)


def test_dataset_without_snapshots_has_nothing_to_be_purged(dataset: Dataset, purge: Purge):
    result = purge.run(dataset, PurgeOptions(entity_ids=["x"], confirm=True), ignore)

    assert (result.statements, result.files, result.expired) == (0, 0, 0)
