"""Fairness of flushes: a tenant with a thousand pending jobs does not delay a tenant with one."""

from datetime import timedelta

import pytest
from sqlalchemy import insert
from tarn.db import jobs
from tarn.db.engine import Database
from tarn.db.tables import datasets, journal_batches, journal_head
from tarn.db.tables import jobs as jobs_table
from tarn.errors import Locked
from tarn.model.ids import new_id, now
from tarn.model.work.job import JobState, Operation
from tarn.model.work.round_robin import round_robin
from tarn.settings import Settings
from tarn.storage.store import Store
from tarn.worker.flusher import SparkFlusher
from tarn.worker.loop import MOST_DUE

from tests.in_process_api import InProcessApi
from tests.worker.flushers import SqlFlusher
from tests.worker.workers import make_worker

pytestmark = pytest.mark.both_databases

MANY = 1000


def add_datasets(database: Database, tenant: str, count: int) -> list[str]:
    """Create datasets, in each of which the oldest unflushed write is this tenant's, and return their ids."""
    moment = now() - timedelta(hours=1)
    ids = [new_id() for _ in range(count)]
    batch = {
        "tenant": tenant,
        "state": "committed",
        "is_stage": False,
        "segment": 1,
        "commit": 1,
        "entities": 1,
        "rows": 1,
        "size": 1,
        "reserved": 1,
        "metadata": {},
        "created": moment,
        "expires": moment,
    }
    head = {"commit": 1, "segment": 1, "rows": 1, "size": 1, "oldest": moment}
    with database.write() as connection:
        connection.execute(
            insert(datasets),
            [
                {"id": dataset_id, "name": f"d_{dataset_id[-12:]}", "state": "active", "created": moment, "revision": 0}
                for dataset_id in ids
            ],
        )
        connection.execute(insert(journal_head), [{"dataset_id": dataset_id, **head} for dataset_id in ids])
        connection.execute(
            insert(journal_batches), [{"uid": new_id(), "dataset_id": dataset_id, **batch} for dataset_id in ids]
        )
    return ids


def add_flushes(database: Database, tenant: str, dataset_ids: list[str]) -> None:
    values = {"operation": Operation.FLUSH, "arguments": {}, "tenant": tenant, "request": "r", "attempts": 0}
    with database.write() as connection:
        connection.execute(
            insert(jobs_table),
            [
                {"id": new_id(), "dataset_id": dataset_id, "state": JobState.QUEUED, "created": now(), **values}
                for dataset_id in dataset_ids
            ],
        )


def test_round_robin_takes_the_first_of_each_tenant_before_any_second():
    queued = [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6), (None, 7)]

    assert round_robin(queued) == [1, 4, 5, 7, 2, 6, 3]
    assert round_robin([]) == []


def test_flush_of_one_tenant_is_claimed_together_with_the_first_of_another_that_has_a_thousand(database: Database):
    of_alice, of_bob = add_datasets(database, "alice", 1), add_datasets(database, "bob", 1)
    add_flushes(database, "alice", of_alice * MANY)
    add_flushes(database, "bob", of_bob)

    with database.write() as connection:
        claimed = jobs.claim_all(connection, "w", Operation.FLUSH, silent_after=30)

    assert len(claimed) == jobs.MAX_CLAIMED < MANY
    assert [job.tenant for job in claimed].count("bob") == 1


def test_due_datasets_of_one_tenant_come_after_the_first_of_another_that_has_a_thousand(
    database: Database, settings: Settings, store: Store
):
    of_alice = add_datasets(database, "alice", MANY)
    [of_bob] = add_datasets(database, "bob", 1)

    due = SparkFlusher(settings, database, store, "w").due()

    assert set(due[:2]) == {due[0], of_bob}
    assert due[0] in of_alice
    assert sorted(due) == sorted([*of_alice, of_bob])


def test_round_has_all_requested_flushes_and_a_limited_number_of_due_datasets(api: InProcessApi):
    database = api.services.database
    flusher = SqlFlusher(database)
    flusher.over_threshold = add_datasets(database, "alice", MOST_DUE + 50)
    requested = add_datasets(database, "bob", 1)
    add_flushes(database, "bob", requested)
    flusher.rejecting = dict.fromkeys(
        [*flusher.over_threshold, *requested], Locked("another worker has the dataset", holder="w")
    )

    make_worker(api, flusher).flush()

    assert flusher.rounds == [[*requested, *flusher.over_threshold[:MOST_DUE]]]
