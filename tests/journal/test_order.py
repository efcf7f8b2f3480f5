"""The journal's order under real concurrency: commit numbers, segments, visibility."""

import threading

import pytest
from sqlalchemy import func, select
from tarn.access.audit import AuditedAction
from tarn.datasets.registry import Dataset, find
from tarn.db.engine import Database
from tarn.db.tables import journal_batches
from tarn.journal import head
from tarn.journal.batches import Batch
from tarn.journal.parsing.event_buffer import Events
from tarn.journal.writer import Writer
from tarn.model.ftm.entity import Exploder
from tarn.model.names import DatasetName
from tarn.model.tenant import ADMIN
from tarn.settings import Settings

from tests.in_process_api import InProcessApi
from tests.journal import journal

pytestmark = pytest.mark.both_databases

WRITERS, EACH = 6, 25


@pytest.fixture
def dataset(api: InProcessApi) -> Dataset:
    api.dataset("test")
    with api.services.database.read() as connection:
        stored = find(connection, DatasetName("test"))
    assert stored is not None
    return stored


def events(entity: str) -> Events:
    collected = Events()
    collected.add_entity(
        Exploder().explode("test", {"id": entity, "schema": "Person", "properties": {"name": entity}}), "o", 0
    )
    return collected


def run(*acts) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_many(settings: Settings, dataset: Dataset, name: str) -> None:
    """Write like one API process: with a writer of its own on the same database."""
    database = Database(settings.database_url)
    writer = Writer(database, settings)
    for number in range(EACH):
        batch = Batch(dataset, ADMIN, AuditedAction(None, "add_entities", "test", f"{name}-{number}"), "o")
        writer.submit(batch, events(f"{name}-{number}")).result()
    writer.close()
    database.close()


def test_rows_written_during_a_rotation_are_in_exactly_one_segment(
    api: InProcessApi, settings: Settings, dataset: Dataset
):
    closed: dict[int, int] = {}
    done = threading.Event()

    def rotate() -> None:
        while not done.is_set():
            with api.services.database.write() as connection:
                segment = head.rotate(connection, dataset.id)
            closed[segment] = in_segments_up_to(api, segment)

    def write() -> None:
        run(*(lambda name=f"w{number}": write_many(settings, dataset, name) for number in range(WRITERS)))
        done.set()

    run(rotate, write)

    batches = sorted(journal.batches(api), key=lambda batch: batch["commit"])
    assert [batch["commit"] for batch in batches] == list(range(1, WRITERS * EACH + 1))
    assert [batch["segment"] for batch in batches] == sorted(batch["segment"] for batch in batches)
    assert len(closed) > 1
    for segment, seen in closed.items():
        assert in_segments_up_to(api, segment) == seen, "a segment changed after it was closed"


def test_commit_numbers_become_visible_in_ascending_order(api: InProcessApi, settings: Settings, dataset: Dataset):
    gaps: list[tuple[int, int]] = []
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            with api.services.database.read() as connection:
                newest, count = connection.execute(
                    select(func.coalesce(func.max(journal_batches.c.commit), 0), func.count())
                ).one()
            if newest != count:
                gaps.append((newest, count))

    def write() -> None:
        run(*(lambda name=f"w{number}": write_many(settings, dataset, name) for number in range(WRITERS)))
        done.set()

    run(poll, write)

    assert gaps == []
    assert len(journal.rows(api)) == WRITERS * EACH * 2


def test_waiting_batches_share_a_transaction_and_a_failing_one_fails_alone(api: InProcessApi, dataset: Dataset):
    writer = api.services.writer
    gone = Dataset("no-such-id", DatasetName("gone"))
    act = AuditedAction(None, "add_entities", "test", "r")
    with api.services.database.write() as connection:
        head.check_pressure(connection, dataset, api.services.settings)
        # On SQLite the writer's thread waits for this transaction, and collects the batches that arrive meanwhile.
        waiting = [writer.submit(Batch(dataset, ADMIN, act, "o"), events(f"e{number}")) for number in range(20)]
        failing = writer.submit(Batch(gone, ADMIN, act, "o"), events("x"))
        waiting += [writer.submit(Batch(dataset, ADMIN, act, "o"), events(f"f{number}")) for number in range(20)]

    commits = [future.result(30).answer["commit"] for future in waiting]

    assert sorted(commits) == list(range(1, 41))
    assert type(failing.exception(30)).__name__ == "DatasetNotFound"
    assert len(journal.rows(api)) == 80


def in_segments_up_to(api: InProcessApi, segment: int) -> int:
    with api.services.database.read() as connection:
        return connection.execute(
            select(func.count()).select_from(journal_batches).where(journal_batches.c.segment <= segment)
        ).scalar_one()
