"""Purge: a purged entity is in no file, journal row or snapshot afterwards."""

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
from tarn.model.datasets.snapshot import Snapshot, SnapshotOperation
from tarn.model.names import RefName
from tarn.model.work.job import PurgeOptions
from tarn.pipeline.jobs.flush import Flush
from tarn.pipeline.jobs.purge import Purge
from tarn.pipeline.jobs.rewrite import Rewriter

from tests.in_process_api import InProcessApi
from tests.pipeline.history import Expected, head, shown, stored
from tests.pipeline.kernels import DirectKernels
from tests.pipeline.test_fold import drawn
from tests.pipeline.test_rewrite import ignore, write_batch

SECRET = "nobody-may-know-of-her"


@pytest.fixture
def purge(api: InProcessApi, kernels: DirectKernels) -> Purge:
    services = api.services
    publisher = SnapshotPublisher(services.database, services.store, services.settings, "tester")
    rewriting = Rewriter(services.database, services.store, publisher, lambda: kernels)
    flush = Flush(services.database, services.store, publisher, lambda: kernels)
    vacuum = Vacuum(services.database, services.store, services.settings, publisher)
    return Purge(services.database, rewriting, flush, vacuum)


@pytest.mark.parametrize("seed", range(4))
def test_purged_entity_is_nowhere_and_everything_else_is_unchanged(
    api: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], purge: Purge, seed: int
):
    draw = random.Random(seed)
    services = api.services
    expected = Expected()
    for number in range(4):
        batch = [drawn(draw) for _ in range(6)]
        if number != 2:
            batch.append(drawn(draw) | {"kind": 1, "id": bytes([number]) * 20, "entity_id": SECRET, "origin": "crawl"})
        write_batch(api, dataset, batch)
        expected.commit(batch)
        if number != 3:
            flush()
    with services.database.write() as connection:
        refs.put(connection, dataset, RefName("before"), "1", "admin")
    hers = [identity for identity, row in expected.live.items() if row["entity_id"] == SECRET]

    result = purge.run(dataset, PurgeOptions(entity_ids=[SECRET], confirm=True), ignore)

    after = head(api, dataset)
    remaining = {identity: row for identity, row in expected.live.items() if identity not in hers}
    assert shown(stored(services.store, dataset, after)) == shown(remaining)
    assert (result.statements, result.refs, after.rows.live) == (len(hers), ["before"], len(remaining))
    with services.database.read() as connection:
        assert [row for row in connection.execute(select(journal)) if SECRET in str(row)] == []
        with pytest.raises(SnapshotGone):
            snapshots.find(connection, dataset, "1")
    texts = [services.store.get(entry.path) for entry in services.store.list(dataset.layout.root)]
    assert [text for text in texts if SECRET.encode() in text] == []


@pytest.mark.both_databases
def test_purge_of_an_unknown_entity_expires_history(
    api: InProcessApi, dataset: Dataset, flush: Callable[[], list[Snapshot]], purge: Purge
):
    """The entity may have existed in an earlier snapshot."""
    for _ in range(3):
        write_batch(api, dataset, [drawn(random.Random(1)) | {"kind": 1}])
        flush()

    result = purge.run(dataset, PurgeOptions(entity_ids=["never-seen"], confirm=True), ignore)

    assert (result.statements, result.snapshot) == (0, None)
    assert result.expired == 2
    assert head(api, dataset).operation in (SnapshotOperation.FLUSH, SnapshotOperation.VACUUM)


def test_purge_of_a_dataset_without_snapshots_does_nothing(dataset: Dataset, purge: Purge):
    result = purge.run(dataset, PurgeOptions(entity_ids=["x"], confirm=True), ignore)

    assert (result.statements, result.files, result.expired) == (0, 0, 0)
